/* reply.h - the reply parser: splits model output into reasoning, content and tool calls
 * (reasoning parser and tool call parser).
 *
 * The input is the bytes of tokens, in slices of any size; the output is events through a
 * callback. With adjacent deltas joined, the events are the same for every slicing. Bytes
 * are held back only while they could begin a marker. Every delta is valid UTF-8 in complete
 * characters: invalid bytes become U+FFFD.
 * One thread owns a parser. docs/reply.md describes which deviations are tolerated. */
#ifndef HD_CHAT_REPLY_H
#define HD_CHAT_REPLY_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "hadal_types.h"
#include "chat/chat.h"

#define HD_REPLY_MAX_NAME   256 /* bytes, of a tool and of a parameter */
#define HD_REPLY_MAX_PARAMS 256 /* of one call in DSML */

typedef enum hd_reply_format {
    HD_REPLY_PLAIN, /* V2: no thinking, no calls */
    HD_REPLY_V3,    /* V3, R1: function, separator, name, fenced JSON */
    HD_REPLY_V31,   /* V3.1, V3.2-Exp: name, separator, JSON */
    HD_REPLY_V32,   /* DSML, function_calls */
    HD_REPLY_V4,    /* DSML, tool_calls */
    HD_REPLY_V41    /* DSML, calls, a blank before every word */
} hd_reply_format;

hd_reply_format hd_reply_format_of(hd_chat_encoding encoding);

typedef struct hd_reply_param {
    const char *name;
    size_t n;
    bool is_string; /* by its schema */
} hd_reply_param;

typedef struct hd_reply_tool {
    const char *name;
    size_t n;
    const hd_reply_param *params; /* may be NULL; used if a call does not state its types */
    int32_t n_params;
} hd_reply_tool;

/* The tools of a request, in the form that the parser needs. */
typedef struct hd_reply_tools {
    hd_reply_tool *tools;
    int32_t n_tools;
    hd_reply_param *params; /* storage */
} hd_reply_tools;

/* tools: an array of OpenAI tools, or NULL; it must outlive *out, which points into it.
 * Entries that are not a named function are skipped. */
hd_status hd_reply_tools_init(hd_reply_tools *out, json_t *tools, hd_err *err);
void hd_reply_tools_deinit(hd_reply_tools *t); /* an all-zero one is fine */

/* Writes the text with which a reply begins a call of tool[n], up to its arguments, in spans
 * like a prompt. Release with hd_chat_prompt_deinit(). */
hd_status hd_reply_opening(hd_chat_prompt *out, hd_reply_format format, const char *tool,
                           size_t n, hd_err *err);

typedef struct hd_reply_options {
    hd_reply_format format;
    bool starts_in_reasoning; /* the prompt ended with <think> */
    bool thinking_off;        /* think tags are dropped, everything is content */
    bool parse_tools;         /* false: calls are plain text */
    /* calls of tools that were not offered become text; false: they are passed on */
    bool unknown_as_text;
    bool whole_calls;  /* the events of a call are emitted together when it is complete */
    bool strict;       /* deviations from the official format are HD_EFORMAT; for tests */
    bool own_spelling; /* a block in a spelling other than the format's is text */
    bool flagged;      /* think tags, end of sentence and the markers of V3 and V3.1 are tokens
                       that come as special pieces; spelled in plain text they are text */
    bool dsml_flagged; /* likewise the DSML token */
    const hd_reply_tool *tools; /* borrowed until close */
    int32_t n_tools;
    size_t max_bytes;     /* of the reply; 0 = 64 MiB; more is HD_EINVAL */
    size_t max_arguments; /* bytes of one call's arguments; 0 = 16 MiB */
} hd_reply_options;

typedef enum hd_reply_event_kind {
    HD_REPLY_REASONING,  /* text */
    HD_REPLY_CONTENT,    /* text */
    HD_REPLY_CALL_BEGIN, /* call, text: the name */
    HD_REPLY_ARGUMENTS,  /* call, text: a piece of the JSON object */
    HD_REPLY_CALL_END,   /* call, end */
    HD_REPLY_NOTE        /* note: something was not as the format has it */
} hd_reply_event_kind;

typedef enum hd_reply_end {
    HD_REPLY_COMPLETE, /* the arguments are one complete JSON object */
    HD_REPLY_CUT,      /* the reply ended inside it */
    HD_REPLY_MALFORMED /* a note follows, and the call's text as content */
} hd_reply_end;

/* Reasons of notes. "text": the call becomes content. */
#define HD_REPLY_NOTES(X)                                                                     \
    X(TEXT_IN_CALL, "text between the tags of a call")                             /* text */ \
    X(BAD_TAG, "a call's tag is misspelled")                                       /* text */ \
    X(BAD_ARGUMENTS, "the arguments are not a JSON object")                        /* text */ \
    X(DUPLICATE_PARAMETER, "a parameter is given twice")                           /* text */ \
    X(PARAMETER_OUTSIDE, "a parameter outside a call")                             /* text */ \
    X(MIXED_ARGUMENTS, "a JSON body and parameters in one call")                   /* text */ \
    X(UNFINISHED, "the reply ends inside a call")                                  /* text */ \
    X(UNKNOWN_TOOL, "a call of a tool that was not offered")                       /* text */ \
    X(TOO_MANY_CALLS, "more than " HD_STR(HD_CHAT_MAX_CALLS) " calls")             /* text */ \
    X(TOO_MANY_PARAMETERS, "more than " HD_STR(HD_REPLY_MAX_PARAMS) " parameters") /* text */ \
    X(NAME_TOO_LONG, "a name of more than " HD_STR(HD_REPLY_MAX_NAME) " bytes")    /* text */ \
    X(ARGUMENTS_TOO_LONG, "the arguments are longer than allowed")                 /* text */ \
    X(TOOLS_NOT_OFFERED, "a block of calls, but no tools were offered")            /* text */ \
    X(STRAY_TAG, "a tag of a call outside a block of calls")                       /* text */ \
    X(TEXT_BETWEEN_CALLS, "text between calls; it is content")                                \
    X(BLOCK_IN_REASONING, "a block of calls inside the reasoning; it ends that")              \
    X(BLANK_CALL, "a call without a name and arguments is skipped")                           \
    X(NOT_JSON, "a value that should be JSON is none; it became a string")                    \
    X(MISSING_END, "the end of a call or block is missing")                                   \
    X(NO_ARGUMENTS, "a call without arguments; they became {}")                               \
    X(SPELLING, "spelled or spaced differently from the format")                              \
    X(THINK_TAG, "a think tag where none belongs; dropped")                                   \
    X(UNFINISHED_REASONING, "the end of the reasoning never came")                            \
    X(CUT, "the reply was cut inside a call or block")

typedef enum hd_reply_note {
#define X(name, text) HD_REPLY_NOTE_##name,
    HD_REPLY_NOTES(X)
#undef X
        HD_REPLY_N_NOTES
} hd_reply_note;

const char *hd_reply_note_text(hd_reply_note note);

typedef struct hd_reply_event {
    hd_reply_event_kind kind;
    int32_t call; /* 0, 1, ... within the reply */
    hd_reply_end end;
    hd_reply_note note;
    const char *text; /* until the callback returns; not NUL-terminated */
    size_t n;
} hd_reply_event;

typedef void hd_reply_sink(void *user, const hd_reply_event *event);

typedef struct hd_reply hd_reply;

hd_status hd_reply_open(hd_reply **out, const hd_reply_options *options, hd_reply_sink *sink,
                        void *user, hd_err *err);
void hd_reply_close(hd_reply *r); /* NULL is fine */

/* special: the piece is one special token. A failure is final; emitted events remain valid.
 * The end-of-sentence token ends the reply, and later input is ignored. */
hd_status hd_reply_feed(hd_reply *r, const void *bytes, size_t n, bool special, hd_err *err);

/* Emits what is held back. HD_FINISH_STOP: the model ended its reply; any other reason: the
 * output was truncated. Does nothing after the end-of-sentence token or when called again. */
hd_status hd_reply_finish(hd_reply *r, hd_finish_reason reason, hd_err *err);

bool hd_reply_in_reasoning(const hd_reply *r);

#endif
