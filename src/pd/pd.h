/* pd.h - prefill and decode on different servers (docs/pd.md): fetches the pages of prompts from the
 * servers that computed them, and computes prompts for others.
 *
 * A server with the role "decode" connects to those that prefill for it; one with the role "prefill"
 * listens. A thread owns the connections and the leases (kv/lease.h); pages are copied on the step
 * threads of the engine, between steps. Whatever fails, a request ends like one without a prefill
 * server: its prompt is computed here. */
#ifndef HD_PD_PD_H
#define HD_PD_PD_H

#include <stdio.h>

#include "engine/engine.h"
#include "kv/lease.h"

enum { PD_MAX_PEERS = 64 }; /* of either kind: to fetch from; that fetch here */

#define PD_PORT        "30200"
#define PD_TRANSFER_AT "127.0.0.1:" PD_PORT

typedef enum pd_role { PD_ROLE_NONE, PD_ROLE_PREFILL, PD_ROLE_DECODE, PD_ROLE_BOTH } pd_role;

typedef struct pd_options {
    pd_role role;
    const char *name; /* this server's address for clients, "HOST:PORT" */
    /* Of "prefill" and "both": where others connect, "HOST:PORT"; NULL: PD_TRANSFER_AT */
    const char *transfer_at;
    /* Of "decode" and "both": "NAME=HOST:PORT,...": the address of a prefill server for clients, by
     * which requests name it, and where it listens for this. Without =HOST:PORT it is the port of
     * PD_TRANSFER_AT on that host. "dns:HOST:PORT=PORT" stands for all servers that the name resolves
     * to, at any time; the second port is that where they listen for this. */
    const char *peers;
    const char *key;  /* secret of all servers; NULL: only on the loopback interface */
    int32_t limit_ms; /* after so long the prompt is computed here; 0: 60 s */
    const char *model_dir;
    /* The engine has a new request, whose events must be polled. */
    void (*submitted)(void *ctx);
    void *ctx;
} pd_options;

typedef struct pd pd;

/* Checks the options and binds the address, before the sandbox. *listener: -1 without one. */
hd_status pd_bind(int *listener, const pd_options *o, hd_err *err);

/* Starts. The engine must outlive it, and its events must be polled until pd_close(). Takes the
 * listener, also on failure. */
hd_status pd_open(pd **out, hd_engine *e, const pd_options *o, int listener, hd_err *err);

/* Ends all leases; requests that wait are computed here. NULL is fine. */
void pd_close(pd *p);

/* Why a request that named a prefill server was not sent there. */
typedef enum pd_skip {
    PD_SKIP_UNKNOWN, /* not in the list */
    PD_SKIP_DOWN,    /* not connected */
    PD_SKIP_SUSPECT, /* what it sent was wrong a short while ago */
    PD_SKIP_CACHED,  /* nothing lacks */
    PD_SKIP_FULL,    /* no lease is free, or the prompt is too long for one */
    PD_N_SKIPS
} pd_skip;

const char *pd_skip_name(pd_skip skip);

typedef struct pd_stats {
    hd_lease_counts leases;
    int32_t open[2][HD_N_LEASE_STATES]; /* [0]: as sender, [1]: as receiver */
    int64_t asked;                      /* requests that named a prefill server */
    int64_t skipped[PD_N_SKIPS];
    int64_t pages_in, pages_out, tokens_in; /* tokens of FULL pages */
    int64_t wait_ns; /* from a request's arrival to the end of its lease, of all that had one */
} pd_stats;

void pd_read_stats(pd *p, pd_stats *out);

typedef struct pd_peer_status {
    char name[272];
    bool fetches; /* it fetches here; else pages are fetched from it */
    bool up;
    uint64_t bytes_in, bytes_out, suspicion;
    char why[200]; /* why it is not up; "": it is, or nobody knows */
} pd_peer_status;

/* Reads the i-th place, whose name is "" if no server has it. False: there are no more. */
bool pd_read_peer(pd *p, int32_t i, pd_peer_status *out);

/* Writes all that in Prometheus' text format. label: goes into every series. */
void pd_put_metrics(FILE *out, const char *label, pd *p);

#endif
