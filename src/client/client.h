/* client.h - a load on a server that speaks the OpenAI interface, and what each request of it saw.
 *
 * One thread drives all requests, over libcurl and epoll; every answer is streamed. What is asked
 * depends on the load alone: lengths, arrival times and texts are drawn by Philox from the seed.
 * Times are taken when bytes arrive, before they are parsed. Nothing is asked twice: a request
 * that failed is counted under the name of its failure. Definitions of the times: docs/bench.md. */
#ifndef HD_CLIENT_CLIENT_H
#define HD_CLIENT_CLIENT_H

#include <jansson.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/quantiles.h"
#include "base/status.h"

/* ---- the server ---- */

typedef struct client_server {
    char *base;  /* "http://127.0.0.1:30000/v1" */
    char *model; /* the name that requests carry */
    char *key;   /* sent as a bearer token, or NULL */
    bool chat;   /* /chat/completions; false: /completions */
    double timeout_s;
} client_server;

/* url is http(s)://host[:port][/path]; "/v1" is added where the path does not end so. model NULL:
 * the first that the server lists. Proxies of the environment are not used. Release with
 * client_server_deinit(), also after a failure. */
hd_status client_server_open(client_server *out, const char *url, const char *key,
                             const char *model, bool chat, double timeout_s, hd_err *err);
void client_server_deinit(client_server *s);

/* ---- the load ---- */

typedef struct client_range {
    int64_t low, high; /* drawn uniformly, both included; 1 <= low <= high */
} client_range;

typedef struct client_load {
    int64_t conversations; /* 0: as many as fit into duration_s */
    double duration_s;     /* no request is sent later; 0: no limit */
    int64_t turns;         /* requests of a conversation, each after the answer to the last */
    client_range input;    /* tokens of the first prompt, the shared prefix among them */
    client_range turn;     /* tokens that each later turn adds, besides the answer */
    client_range output;   /* max_tokens */
    int64_t prefix;        /* tokens of the first prompt that a group shares */
    int64_t groups;
    int64_t token_ids;   /* prompts are ids below this, /completions only; 0: text */
    int64_t concurrency; /* conversations at once, at most; 0: no limit */
    double rate;         /* conversations that arrive in a second, Poisson; 0: at once */
    int64_t seed;
    int64_t level; /* runs of one seed with other levels share no text */
    double temperature;
    bool ignore_eos;
    const json_t *extra;                     /* members that every body gets, or NULL */
    double tokens_per_word, template_tokens; /* of text: client_measure() */
} client_load;

/* Two short requests measure how many tokens this server makes of a word, and whether it takes
 * ignore_eos; *why_not says what it answered where load->ignore_eos was taken back, else "". */
hd_status client_measure(const client_server *s, client_load *load, char why_not[200],
                         hd_err *err);

/* ---- a run ---- */

enum { CLIENT_ERRORS = 24 };

typedef struct client_error {
    char name[96];    /* "HTTP 429 rate_limit_exceeded", "timeout", "stream cut" */
    char sample[200]; /* the first message that came with it, or "" */
    int64_t count;
} client_error;

/* One request; times in ns since the run began. */
typedef struct client_record {
    int64_t conversation;
    int32_t turn;
    int64_t due_ns;                     /* when it should have been sent */
    int64_t sent_ns, first_ns, last_ns; /* first and last event with text; 0: none came */
    int64_t input, output; /* tokens; of a server without usage 0, and events with text */
    int64_t cached;        /* prompt tokens from the server's cache; -1: it does not say */
    bool counted;          /* the server said how many tokens */
    int32_t error;         /* -1: none; otherwise the place in errors */
} client_record;

typedef struct client_run {
    client_record *records; /* [n] requests that ended, in the order of their sending */
    int64_t n, cap;
    int64_t unfinished; /* sent and then given up, when the run was stopped */
    double *gaps_ms;    /* [n_gaps] between consecutive events with text, of good requests */
    int64_t n_gaps, cap_gaps;
    client_error errors[CLIENT_ERRORS]; /* the last one takes all further names */
    int32_t n_errors;
    int64_t duration_ns;
    bool gave_up;     /* after a thousand failures in a row */
    double processor; /* the share of one processor that the client itself used */
} client_run;

/* Ends early when *stop becomes true, or after a thousand failures in a row. quiet: no progress
 * bar. Failed requests are no failure of the run. Release with client_run_deinit(), also after a
 * failure. */
hd_status client_run_all(client_run *out, const client_server *s, const client_load *load,
                         const volatile sig_atomic_t *stop, bool quiet, hd_err *err);
void client_run_deinit(client_run *r);

/* ---- figures ---- */

/* Objectives in milliseconds; 0: none. */
typedef struct client_objectives {
    double ttft, tpot, e2e;
} client_objectives;

enum { CLIENT_CURVE = 101 };

typedef struct client_times { /* milliseconds */
    hd_quantiles quantiles;
    double curve[CLIENT_CURVE]; /* percentiles 0 to 100 */
} client_times;

typedef struct client_figures {
    int64_t completed, failed, unfinished;
    int64_t input_tokens, output_tokens;
    int64_t cached_tokens; /* -1: no answer said */
    int64_t uncounted;     /* answers without usage: their events were counted */
    double seconds, requests_s, input_s, output_s, total_s;
    double concurrency;        /* sum of the requests' E2E over the run's duration */
    double good_s, good_share; /* requests within all objectives; -1: there are none */
    client_times ttft, itl, tpot, e2e;
    hd_quantiles late; /* sending after it was due */
} client_figures;

/* May be given a run that was stopped. */
hd_status client_figures_of(client_figures *out, const client_run *run,
                            const client_objectives *o, hd_err *err);

/* TTFT, E2E and TPOT of a good request in ms; -1: it has none. */
double client_ttft(const client_record *q);
double client_e2e(const client_record *q);
double client_tpot(const client_record *q);

#endif
