/* chat.h - chat templates: renders OpenAI messages and tools as the prompt text that a model
 * was trained on.
 *
 * hd_chat_parse() checks a JSON document and keeps views into it; hd_chat_render() writes
 * the prompt in one chat format. A prompt is one text divided into spans. Control spans are
 * written here, and a tokenizer may match special tokens only inside them. Content spans
 * come from the client and are plain text whatever they spell, so no message can forge a
 * control token. Tokenization runs across the borders of spans. */
#ifndef HD_CHAT_CHAT_H
#define HD_CHAT_CHAT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "hadal_types.h"
#include "tokenizer/span.h"
#include "tokenizer/tokenizer.h"

enum {
    HD_CHAT_MAX_MESSAGES = 4096,
    HD_CHAT_MAX_PARTS = 1024 /* of one message */
};
#define HD_CHAT_MAX_TOOLS 128
#define HD_CHAT_MAX_CALLS 128 /* of one message */

typedef enum hd_chat_encoding {
    HD_CHAT_V2,
    HD_CHAT_V3,      /* December 2024 */
    HD_CHAT_V3_0324, /* the user turn opens the assistant's; text before tool calls is kept */
    HD_CHAT_R1,      /* thinking: the prompt opens <think> */
    HD_CHAT_R1_0528, /* like V3_0324; the model writes <think> itself */
    HD_CHAT_V31,     /* hybrid */
    HD_CHAT_V31_TERMINUS, /* also V3.2-Exp */
    HD_CHAT_V32,          /* DSML, function_calls */
    HD_CHAT_V4,           /* DSML, tool_calls; preview releases */
    HD_CHAT_V4_0731,      /* the same with three reasoning efforts */
    HD_CHAT_V41,          /* DSML, calls; system messages anywhere, effort as a number */
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

typedef enum hd_chat_task { /* V4's internal tasks with one-token answers */
                            HD_TASK_NONE,
                            HD_TASK_ACTION,
                            HD_TASK_QUERY,
                            HD_TASK_AUTHORITY,
                            HD_TASK_DOMAIN,
                            HD_TASK_TITLE,
                            HD_TASK_READ_URL,
                            HD_N_TASKS
} hd_chat_task;

typedef enum hd_chat_effort { /* reasoning effort of V4 and V4.1 */
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
    hd_chat_text arguments; /* set if given as a string */
    json_t *object;         /* set if given as an object; else NULL */
} hd_chat_call;

typedef struct hd_chat_message {
    int32_t index; /* index in the document, for errors; -1: not from the document */
    hd_chat_role role;
    hd_chat_task task;
    bool has_content; /* false for null and absent; true for "" */
    bool prefix;      /* an answer that the model continues; V3.1 and V4.1 */
    bool wo_eos;
    int32_t n_parts; /* a string is one part */
    int32_t n_calls;
    const hd_chat_part *parts;
    const hd_chat_call *calls;
    hd_chat_text reasoning;
    hd_chat_text call_id;
    json_t *tools;           /* system and developer: tools of the message, or NULL */
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
    bool thinking;             /* ignored by formats without thinking */
    bool no_generation_prompt; /* do not open an answer after the last message */
    hd_chat_effort effort;
    int32_t effort_number; /* V4.1: 1 to 100 instead of a level; 0: none */
    size_t max_bytes;      /* of the prompt; 0 = 256 MiB */
} hd_chat_options;

/* Text of one assistant message in the prompt: it begins where a generation prompt would
 * have ended, and includes the end-of-sentence token. */
typedef struct hd_chat_block {
    int32_t message;           /* index of the message */
    size_t begin, end;         /* in the text */
    bool thought;              /* it begins with reasoning */
    size_t n_reasoning;        /* bytes of reasoning from begin on */
    size_t content, n_content; /* where its content is, and how many bytes */
    int32_t n_calls;           /* all tool calls of the message, or none */
    hd_ids tokens;             /* of the block, see hd_chat_encode() */
} hd_chat_block;

typedef struct hd_chat_prompt {
    char *text; /* UTF-8, not NUL-terminated */
    size_t n;
    hd_text_span *spans; /* back to back over text, kinds alternating, none empty */
    int32_t n_spans;
    hd_chat_block *blocks; /* [n_blocks] earlier answers, in text order */
    int32_t n_blocks;
} hd_chat_prompt;

/* Parses a JSON document of messages or tools like hd_json_parse(), but strings may contain
 * \u0000 and numbers may have any size. A number that jansson cannot hold becomes a string
 * that begins with U+FDD0 U+FDD1; a document that contains such a string is refused. text[n]
 * must be NUL. The caller owns *out. Error codes: duplicate_key, invalid_json. */
hd_status hd_chat_parse_json(json_t **out, const char *text, size_t n, const char *what,
                             hd_err *err);
/* whether v is a string that represents such a number */
bool hd_chat_is_number(const json_t *v);

/* Converts these strings back to numbers in text[n], which jansson wrote from such a
 * document without JSON_ENSURE_ASCII. Infinities become 1e999. Returns the new length. */
size_t hd_chat_bare_numbers(char *text, size_t n);

/* Checks messages (an array), tools and response_format (either may be NULL or JSON null).
 * The conversation points into the documents, which must outlive it. strict also requires
 * what the OpenAI API requires and no chat format needs: ids on calls, and known ids on
 * results. */
hd_status hd_chat_parse(hd_conversation *out, json_t *messages, json_t *tools,
                        json_t *response_format, bool strict, hd_err *err);
void hd_conversation_deinit(hd_conversation *c); /* an all-zero one is fine */

/* On failure *out is empty. */
hd_status hd_chat_render(hd_chat_prompt *out, const hd_conversation *c,
                         const hd_chat_options *options, hd_err *err);
void hd_chat_prompt_deinit(hd_chat_prompt *p); /* an all-zero one is fine */

/* Appends the prompt's token ids to out. For a block with tokens these replace its text; the
 * caller must set only tokens that the model generated after the text before the block. */
hd_status hd_chat_encode(const hd_chat_prompt *p, const hd_tokenizer *t, hd_ids *out,
                         hd_err *err);

/* Detects the chat format of a checkpoint or tokenizer directory, and whether its prompts
 * open <think> by default. Templates are compared by their text, never executed. */
hd_status hd_chat_detect(hd_chat_encoding *out, bool *thinks, const char *dir, hd_err *err);

/* Whether a chat format thinks by default. */
bool hd_chat_thinks(hd_chat_encoding encoding);
const char *hd_chat_encoding_name(hd_chat_encoding encoding);

#endif
