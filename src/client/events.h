/* events.h - a streamed answer of the OpenAI interface, taken apart as it comes.
 *
 * Bytes from outside: server-sent events in pieces of any size, each "data: {...}" or
 * "data: [DONE]". Other fields and comments are skipped. Chat chunks and completions are both
 * understood; text is content, reasoning, a tool call's name or arguments, or a completion's. */
#ifndef HD_CLIENT_EVENTS_H
#define HD_CLIENT_EVENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct client_text {
    char *at;
    size_t n, cap;
} client_text;

/* Zeroed with keep set or not, it is ready. Release with client_events_deinit(). */
typedef struct client_events {
    bool keep; /* the answer's text is wanted afterwards */
    client_text line;
    client_text content, reasoning; /* kept ones; not NUL-terminated */
    int64_t with_text;              /* events that carried text */
    bool done;                      /* [DONE] came */
    bool finished;                  /* a finish reason came */
    bool failed; /* an error came instead of a chunk, or no JSON; see error */
    bool no_memory;
    char error[200];
    int64_t prompt_tokens, completion_tokens, cached_tokens; /* valid with has_* */
    bool has_usage, has_cached;
} client_events;

/* Takes bytes[n]; returns how many events with text were completed by them. After a failure
 * nothing more is read. */
int64_t client_events_feed(client_events *e, const char *bytes, size_t n);
void client_events_deinit(client_events *e);

/* Copies UTF-8 for people to read: control characters become spaces, and what does not fit is cut
 * between characters. */
void client_copy_text(char *out, size_t size, const char *text);

/* Appends bytes; false without memory. */
bool client_text_add(client_text *t, const char *bytes, size_t n);

#endif
