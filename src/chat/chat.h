/* chat.h - OpenAI messages and tools become the prompt text a model was trained on.
 *
 * hd_chat_parse() checks a JSON document and keeps views into it; hd_chat_render() writes the
 * prompt of one encoding. A prompt is one text cut into spans: control spans are ours, and
 * only inside them may a tokenizer match special tokens; content spans come from outside and
 * are plain text whatever they spell, so no message can forge a control token. Spans do not
 * cut words: ordinary tokenization runs across their borders. */
#ifndef HD_CHAT_CHAT_H
#define HD_CHAT_CHAT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "tokenizer/span.h"
#include "tokenizer/tokenizer.h"

enum {
    HD_CHAT_MAX_MESSAGES = 4096,
    HD_CHAT_MAX_PARTS = 1024, /* of one message */
    HD_CHAT_MAX_TOOLS = 128,
    HD_CHAT_MAX_CALLS = 128, /* of one message */
};

typedef enum hd_chat_encoding {
    HD_CHAT_V2,
    HD_CHAT_V3,           /* December 2024 */
    HD_CHAT_V3_0324,      /* the user turn opens the assistant's; text before calls is kept */
    HD_CHAT_R1,           /* thinking: the prompt opens <think> */
    HD_CHAT_R1_0528,      /* as V3_0324; the model opens <think> itself */
    HD_CHAT_V31,          /* hybrid */
    HD_CHAT_V31_TERMINUS, /* also V3.2-Exp */
    HD_CHAT_V32,          /* DSML, function_calls */
    HD_CHAT_V4,           /* DSML, tool_calls; preview releases */
    HD_CHAT_V4_0731,      /* the same with three levels of effort */
    HD_CHAT_N_ENCODINGS
} hd_chat_encoding;

typedef enum hd_chat_role {
    HD_CHAT_SYSTEM,
    HD_CHAT_DEVELOPER,
    HD_CHAT_USER,
    HD_CHAT_ASSISTANT,
    HD_CHAT_TOOL,
    HD_CHAT_LATEST_REMINDER,
    HD_CHAT_N_ROLES
} hd_chat_role;

typedef enum hd_chat_task { /* internal one-token answers of V4 */
                            HD_TASK_NONE,
                            HD_TASK_ACTION,
                            HD_TASK_QUERY,
                            HD_TASK_AUTHORITY,
                            HD_TASK_DOMAIN,
                            HD_TASK_TITLE,
                            HD_TASK_READ_URL,
                            HD_N_TASKS
} hd_chat_task;

typedef enum hd_chat_effort { /* how hard V4 is asked to think */
                              HD_EFFORT_NONE,
                              HD_EFFORT_LOW,
                              HD_EFFORT_HIGH,
                              HD_EFFORT_MAX
} hd_chat_effort;

typedef struct hd_chat_text { /* a view; may hold NUL bytes */
    const char *data;
    size_t n;
} hd_chat_text;

typedef struct hd_chat_part {
    hd_chat_text text; /* or the type's name */
    bool unsupported;  /* not a text part */
} hd_chat_part;

typedef struct hd_chat_call {
    hd_chat_text id; /* may be empty */
    hd_chat_text name;
    hd_chat_text arguments; /* as given, when given as a string */
    json_t *object;         /* as given, when given as an object; else NULL */
} hd_chat_call;

typedef struct hd_chat_message {
    int32_t index; /* in the document, for errors; -1: not from there */
    hd_chat_role role;
    hd_chat_task task;
    bool has_content; /* null and absent are not; "" is */
    bool prefix;      /* an answer to be continued */
    bool wo_eos;
    int32_t n_parts; /* a string is one part */
    int32_t n_calls;
    const hd_chat_part *parts;
    const hd_chat_call *calls;
    hd_chat_text reasoning;
    hd_chat_text call_id;
    json_t *tools;           /* system and developer: its own tools, or NULL */
    json_t *response_format; /* likewise */
} hd_chat_message;

typedef struct hd_conversation {
    hd_chat_message *messages;
    int32_t n;
    json_t *tools;           /* of the request; NULL: none */
    json_t *response_format; /* of the request; NULL: none */
    hd_chat_part *parts;     /* storage */
    hd_chat_call *calls;     /* storage */
} hd_conversation;

typedef struct hd_chat_options {
    hd_chat_encoding encoding;
    bool thinking;             /* changes nothing where an encoding has one form only */
    bool no_generation_prompt; /* stop after the last message instead of opening an answer */
    hd_chat_effort effort;
    size_t max_bytes; /* of the prompt; 0 = 256 MiB */
} hd_chat_options;

/* What an assistant's message says: from behind all that a prompt for it would have ended with
 * to its end of sentence. */
typedef struct hd_chat_block {
    int32_t message;           /* its index */
    size_t begin, end;         /* in the text */
    bool thought;              /* it begins with reasoning */
    size_t n_reasoning;        /* bytes of it from begin on */
    size_t content, n_content; /* where its content is, and how many bytes */
    int32_t n_calls;           /* all of the message's, or none */
    hd_ids tokens;             /* of the block, see hd_chat_encode() */
} hd_chat_block;

typedef struct hd_chat_prompt {
    char *text; /* UTF-8, not NUL-terminated */
    size_t n;
    hd_text_span *spans; /* back to back over text, kinds alternating, none empty */
    int32_t n_spans;
    hd_chat_block *blocks; /* [n_blocks] of earlier answers, in the order of the text */
    int32_t n_blocks;
} hd_chat_prompt;

/* Parses a document of messages or tools: JSON as hd_json_parse() reads it, but strings may
 * hold \u0000 and numbers may have any size. Such a number becomes a string that begins with
 * U+FDD0 U+FDD1; a document in which a string does so is refused. text[n] must be NUL. *out is
 * the caller's. */
hd_status hd_chat_parse_json(json_t **out, const char *text, size_t n, const char *what,
                             hd_err *err);
bool hd_chat_is_number(const json_t *v); /* a string that is such a number */

/* Of such a document as jansson writes it in text[n], without JSON_ENSURE_ASCII: these numbers
 * stand there as numbers again, infinities as 1e999. Returns how long it is now. */
size_t hd_chat_bare_numbers(char *text, size_t n);

/* Checks messages (an array), tools and response_format (either may be NULL or JSON null).
 * The conversation points into the documents, which must outlive it. strict demands what the
 * OpenAI interface does and no encoding needs: ids on calls and on results, known ones. */
hd_status hd_chat_parse(hd_conversation *out, json_t *messages, json_t *tools,
                        json_t *response_format, bool strict, hd_err *err);
void hd_conversation_deinit(hd_conversation *c); /* an all-zero one is fine */

/* On failure *out is empty. */
hd_status hd_chat_render(hd_chat_prompt *out, const hd_conversation *c,
                         const hd_chat_options *options, hd_err *err);
void hd_chat_prompt_deinit(hd_chat_prompt *p); /* an all-zero one is fine */

/* Appends the prompt's ids to out, with the tokens of a block in place of its text where the
 * caller has put some there: those of a model that was given what stands before the block. */
hd_status hd_chat_encode(const hd_chat_prompt *p, const hd_tokenizer *t, hd_ids *out,
                         hd_err *err);

/* The encoding of a checkpoint or tokenizer directory, and whether its prompts open <think>
 * unless told otherwise. Templates are compared by what they hold, never run. */
hd_status hd_chat_detect(hd_chat_encoding *out, bool *thinks, const char *dir, hd_err *err);

/* Whether an encoding thinks when nobody says. */
bool hd_chat_thinks(hd_chat_encoding encoding);
const char *hd_chat_encoding_name(hd_chat_encoding encoding);
const char *hd_chat_role_name(hd_chat_role role);

#endif
