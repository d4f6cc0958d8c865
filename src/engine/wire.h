/* wire.h - requests and step outputs as bytes: between the front, in the process of rank 0, and
 * leaders of attention groups in other processes (remote.c).
 *
 * Messages are fixed structs and arrays, of processes of one version on machines of one byte
 * order. All counts are checked against the bytes and against the engine's limits before use. */
#ifndef HD_ENGINE_WIRE_H
#define HD_ENGINE_WIRE_H

#include "engine/engine_internal.h"

/* Bytes that are still to be read. */
typedef struct engine_reader {
    const char *at;
    size_t n;
} engine_reader;

typedef enum engine_record_kind {
    /* from the front to a leader */
    ENGINE_RECORD_SUBMIT,
    ENGINE_RECORD_CANCEL,
    ENGINE_RECORD_RETRACT,
    ENGINE_RECORD_FLUSH,
    ENGINE_RECORD_JOB, /* of pages; the id is its number */
    /* from a leader to the front */
    ENGINE_RECORD_OUTPUT,
    ENGINE_RECORD_PROMPT, /* prompt log-probabilities */
    ENGINE_RECORD_PAGE,   /* of a request whose pages are exported: the next one */
    ENGINE_RECORD_JOB_DONE,
    ENGINE_RECORD_COUNTS, /* of experts; the id is the record's */
    ENGINE_RECORD_STATE
} engine_record_kind;

/* Begins every record. id: of a request or a choice. */
typedef struct engine_record {
    int32_t kind, group;
    uint64_t id, n; /* n: bytes of the request, job or page that follows; else 0 */
} engine_record;

/* Appends a record's head. */
hd_status engine_put_record(hd_bytes *to, engine_record_kind kind, int32_t group, uint64_t id,
                            hd_err *err);

/* Copies the next n bytes to out. HD_EPEER: there are fewer. */
hd_status engine_take_bytes(engine_reader *from, void *out, size_t n, hd_err *err);

/* The record of a request with all that its scheduler and its sampler need; its text stays with
 * the front. */
hd_status engine_put_request(hd_bytes *to, const engine_request *r, hd_err *err);

/* Fills e->requests[] at the request's place, which must be free, by the bytes behind its record.
 * On failure the place is free again. */
hd_status engine_take_request(hd_engine *e, engine_reader *from, uint64_t id, hd_err *err);

/* The record of a job. */
hd_status engine_put_job(hd_bytes *to, const hd_page_job *job, hd_err *err);

/* Fills the job by the bytes behind its record; free its tokens and its message, also on failure. */
hd_status engine_take_job(const hd_engine *e, engine_reader *from, hd_page_job *job,
                          hd_err *err);

hd_status engine_put_job_done(const hd_engine *e, hd_bytes *to, const hd_page_job *job,
                              hd_err *err);
hd_status engine_take_job_done(const hd_engine *e, engine_reader *from, hd_page_job *job,
                               hd_err *err);

/* The record of n counts of experts, for the record of that number (recording.c). */
hd_status engine_put_counts(hd_bytes *to, int32_t group, uint64_t number, const int64_t *counts,
                            size_t n, hd_err *err);

/* The record of a page of a request; n 0: none comes any more, as st says. */
hd_status engine_put_page(hd_bytes *to, int32_t group, uint64_t id, hd_status st,
                          const void *page, size_t n, hd_err *err);

/* Gives the next page of n bytes to who waits for the request's pages. */
hd_status engine_take_page(const hd_engine *e, engine_reader *from, engine_request *r,
                           uint64_t n, hd_err *err);

/* Frees such a request. */
void engine_forget_request(hd_engine *e, engine_request *r);

hd_status engine_put_output(hd_bytes *to, int32_t group, const engine_step_output *p,
                            hd_err *err);

/* p->top has room for engine_post_tops(); the caller frees p->why. */
hd_status engine_take_output(const hd_engine *e, engine_reader *from, uint64_t id,
                             engine_step_output *p, hd_err *err);

hd_status engine_put_prompt(hd_bytes *to, int32_t group, uint64_t id,
                            const hd_prompt_logprobs *p, hd_err *err);

/* Writes them to the request, which must have asked for them. */
hd_status engine_take_prompt(engine_reader *from, engine_request *r, hd_err *err);

#endif
