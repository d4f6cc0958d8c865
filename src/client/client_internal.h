/* client_internal.h - what the files of client/ share. */
#ifndef HD_CLIENT_CLIENT_INTERNAL_H
#define HD_CLIENT_CLIENT_INTERNAL_H

#include <curl/curl.h>

#include "client/client.h"
#include "client/events.h"
#include "client/multi.h"

/* ---- plan.c: what the load asks ---- */

int64_t plan_input(const client_load *load, int64_t conversation, int32_t turn);
int64_t plan_output(const client_load *load, int64_t conversation, int32_t turn);
/* Seconds between the arrivals of a conversation and the one before. */
double plan_gap(const client_load *load, int64_t conversation);
/* The text of a turn, malloc'ed; NULL without memory. */
char *plan_text(const client_load *load, int64_t conversation, int32_t turn, int64_t tokens);
json_t *plan_ids(const client_load *load, int64_t conversation, int64_t tokens);
/* n words of a text that no run sends, for measuring. */
char *plan_sample(const client_load *load, int64_t n);

/* ---- body.c: conversations as request bodies ---- */

/* What was said so far: messages, or the text of a completion. Owned. */
typedef struct dialog {
    json_t *prompt;
} dialog;

/* Adds what the user says in this turn: text, or token ids. */
bool dialog_ask(dialog *c, const client_server *s, const client_load *load, int64_t index,
                int32_t turn);
/* Adds the answer of the server. */
bool dialog_answer(dialog *c, const client_server *s, const client_events *e);
void dialog_deinit(dialog *c);
/* The body, malloc'ed; NULL without memory. */
char *body_write(const client_server *s, const client_load *load, json_t *prompt,
                 int64_t max_tokens, bool stream);

/* ---- wire.c: the requests of a load ---- */

typedef struct wire {
    client_multi multi;
    struct curl_slist *headers;
    char *url;
} wire;

hd_status wire_open(wire *w, const client_server *s, const char *path, hd_err *err);
void wire_close(wire *w);
/* A handle with everything set that requests have in common; NULL without memory. */
CURL *wire_handle(const wire *w, const client_server *s);

/* ---- server.c ---- */

/* Names what a reply of an error status says: "HTTP 429 CODE", and its message. */
void client_name_refusal(client_error *out, long status, const char *body, size_t n);

#endif
