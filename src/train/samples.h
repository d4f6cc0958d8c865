/* samples.h - samples of another server: what /generate is asked, and its reply, which is not trusted. */
#ifndef HD_TRAIN_SAMPLES_H
#define HD_TRAIN_SAMPLES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct hd_sample_request {
    const int32_t *prompt; /* [n_prompt] */
    int32_t n_prompt, n;   /* n: samples */
    int32_t max_tokens;
    float temperature;
    uint64_t seed; /* below 2^63 */
    bool routes;   /* the experts of every position, too */
    bool keys;     /* and the keys that indexers selected */
} hd_sample_request;

/* Writes the body of a request. The caller frees it; NULL without memory. */
char *hd_sample_body(const hd_sample_request *r);

/* What a sample must be to count, and where it goes. */
typedef struct hd_sample_reply {
    int32_t vocab, layers, top_k, n_experts; /* of the model */
    int32_t key_layers, key_top_k;           /* layers with an indexer, and what each selects */
    int32_t n;                               /* out: tokens, 1 to max_tokens of the request */
    int32_t *tokens;                         /* [max_tokens] out */
    float *logprob; /* [max_tokens] out: of the tempered distribution */
    bool truncated; /* out: ended by its length */
    /* out, read with `routes` of the request: [n_prompt + n - 1, layers, top_k] experts, -1 in
     * layers without; room for n_prompt + max_tokens - 1 rows */
    int32_t *routes;
    /* likewise with `keys`: [n_prompt + n - 1, key_layers, key_top_k], -1: none */
    int32_t *keys;
} hd_sample_reply;

/* Reads the reply text[bytes] to r into out[r->n]. HD_EFORMAT, with the reason: it is none of n
 * samples, one has no or too many tokens, a token, expert, key or log-probability that cannot be, or was
 * aborted. */
hd_status hd_sample_read(hd_sample_reply *out, const hd_sample_request *r, const char *text,
                         size_t bytes, hd_err *err);

#endif
