/* chat_internal.h - shared by the chat formats: the prompt writer, the special tokens, and
 * JSON as Python writes it. */
#ifndef HD_CHAT_CHAT_INTERNAL_H
#define HD_CHAT_CHAT_INTERNAL_H

#include "chat/chat.h"
#include "chat/markers.h"

typedef struct pyjson_frame {
    json_t *container;
    void *member; /* the next one of an object */
    size_t next;  /* how many are written */
} pyjson_frame;

/* A prompt writer. The first failure is kept and later writes are ignored, so the caller
 * checks once at the end. */
typedef struct chat_out {
    hd_chat_prompt *prompt;
    size_t cap;
    size_t max;
    int32_t span_cap;
    int32_t block_cap;
    int32_t frame_cap;
    pyjson_frame *frames; /* where in a JSON value the writer stands */
    const char *part_gap; /* between text parts */
    hd_status status;
    hd_err *err;
} chat_out;

void chat_control(chat_out *o, const char *literal);
void chat_content(chat_out *o, hd_chat_text text);
void chat_content_bytes(chat_out *o, const char *data, size_t n);
/* The text parts, joined by the format's part_gap. */
void chat_parts(chat_out *o, const hd_chat_message *m);

/* Called around the text of an answer, see hd_chat_block: reasoning, then text, then n_calls
 * calls. */
void chat_begin_block(chat_out *o, const hd_chat_message *m, int32_t n_calls);
void chat_end_block(chat_out *o);
/* Its reasoning and the tag behind it. */
void chat_reasoning(chat_out *o, const hd_chat_message *m);

typedef struct chat_job {
    const hd_conversation *c;
    const hd_chat_options *options;
    chat_out *out;
    hd_err *err;
} chat_job;

typedef hd_status chat_render_fn(const chat_job *job);
chat_render_fn chat_render_v2, chat_render_v3, chat_render_v31, chat_render_v32, chat_render_v4;

/* Writes all system and developer texts joined by an empty line, as in templates up to V3.1;
 * sets *any if there was one. */
void chat_system_texts(const chat_job *job, bool *any);

/* Arguments of a call as one JSON text. */
void chat_arguments(chat_out *o, const hd_chat_call *call);

/* The text in a block, with everything up to and including one </think> removed. */
typedef enum chat_think_cut { CHAT_CUT_NONE, CHAT_CUT_FIRST, CHAT_CUT_LAST } chat_think_cut;
void chat_answer(chat_out *o, const hd_chat_message *m, chat_think_cut cut);

/* Refuses a field, as hd_field_of() makes it, with "FIELD: why"; returns status. */
hd_status chat_fail(hd_err *err, hd_status status, hd_field field, const char *why, ...)
    HD_PRINTF(4, 5);

/* Returns HD_EUNSUPPORTED with the message, its field and the chat format in the error. */
hd_status chat_refuse(const chat_job *job, const hd_chat_message *m, const char *field,
                      const char *why);

/* --- chat_dsml.c: what V3.2, V4 and V4.1 share --- */

/* How a format writes DSML. */
typedef struct dsml_dialect {
    const char *block, *invoke, *parameter; /* words of the tags, with the space before them */
    const char *before_tools, *after_tools; /* around the lines of the tools */
} dsml_dialect;

/* Copies the messages, with the request's tools and response format in the leading system or
 * developer message, which is created if absent. drop_silent leaves out system and developer
 * messages that say nothing. The caller frees *out. */
hd_status dsml_messages(hd_chat_message **out, int32_t *n, const chat_job *job,
                        bool drop_silent);
int32_t dsml_last_user(const hd_chat_message *m, int32_t n); /* -1: none */
/* Blank line and tools, blank line and response format, for those that there are. */
void dsml_extras(chat_out *o, const hd_chat_message *m, const dsml_dialect *d);
void dsml_calls(chat_out *o, const hd_chat_message *m, const dsml_dialect *d);

/* --- pyjson.c: JSON as Python's json module reads and writes it --- */

/* As json.dumps(value, ensure_ascii=False, indent=indent or None). */
void pyjson_write(chat_out *o, json_t *value, int indent);
/* As json.loads: duplicate keys (the last wins), NaN and the infinities are fine unless
 * document is set. NULL when it is not JSON; then why (may be NULL) holds jansson's reason. */
json_t *pyjson_parse(const char *text, size_t n, bool document, json_error_t *why);
/* A string that stands for a number of any size. */
bool pyjson_is_number(const json_t *value);

#endif
