/* hadal_types.h - data that the public API and the parts of the engine share: limits of a
 * request, logit biases, finish reasons, and what a step adds to a choice. It is a part of
 * hadal.h. Every folder of src may include it. */
#ifndef HADAL_TYPES_H
#define HADAL_TYPES_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Limits of one request. They are macros because descriptions and messages contain them. */
#define HD_MAX_CHOICES      64
#define HD_MAX_ALTERNATIVES 512 /* top log-probabilities of one token */
#define HD_MAX_RELAXED_TOP  20
#define HD_DEFAULT_LOGPROBS 20                  /* of hd_engine_options.max_logprobs */
#define HD_MAX_DRAFTS       7                   /* draft tokens of one sequence in one step */
#define HD_MAX_STEP_TOKENS  (HD_MAX_DRAFTS + 1) /* accepted drafts and the token after them */
#define HD_MAX_STOP_STRINGS 16
#define HD_MAX_STOP_BYTES   256 /* of one stop string */
#define HD_MAX_STOP_TOKENS  64
#define HD_MAX_BIAS         1024 /* biased tokens */
#define HD_MAX_EFFORT       100  /* V4.1's reasoning effort */

/* a draft depth: it is chosen by measured acceptance and cost */
enum { HD_DRAFTS_AUTO = -1 };

/* KV groups: pages by lifetime, as long as the prefix or while a window reaches them */
typedef enum hd_kv_group { HD_KV_FULL, HD_KV_WINDOW, HD_N_KV_GROUPS } hd_kv_group;

/* Bins of a histogram of the device's idle times between decode graphs, each of HD_GAP_NS
 * nanoseconds. The last bin: or longer. */
enum { HD_GAP_BINS = 64, HD_GAP_NS = 500 };

/* Kinds of exchanges between ranks (comm/comm.h). Broadcasts bring commands: a rank with nothing to
 * do waits in one. */
typedef enum hd_comm_op {
    HD_COMM_OP_ALL_REDUCE,
    HD_COMM_OP_REDUCE_SCATTER,
    HD_COMM_OP_ALL_GATHER,
    HD_COMM_OP_BROADCAST,
    HD_COMM_OP_DISPATCH,
    HD_COMM_OP_COMBINE,
    HD_N_COMM_OPS
} hd_comm_op;

typedef struct hd_comm_op_figures {
    int64_t calls, bytes; /* bytes that came from other ranks, without headers */
    int64_t ns, wait_ns;  /* in the calls; of that, until other ranks had got so far */
} hd_comm_op_figures;

/* What a rank has done since its process began. */
typedef struct hd_rank_figures {
    int64_t passes, compute_ns; /* forward passes; time in them without exchanges */
    hd_comm_op_figures of[HD_N_COMM_OPS];
} hd_rank_figures;

/* Why a choice ended. */
typedef enum hd_finish_reason {
    HD_FINISH_NONE,    /* it is not finished */
    HD_FINISH_STOP,    /* end of sequence, stop token or stop string */
    HD_FINISH_LENGTH,  /* max_tokens or the context was reached */
    HD_FINISH_ABORT,   /* it was cancelled */
    HD_FINISH_TIMEOUT, /* it waited too long in the queue */
    HD_FINISH_ERROR    /* the device or this request's computation failed */
} hd_finish_reason;

typedef struct hd_logit_bias {
    int32_t token;
    float value; /* added to the token's logit; -INFINITY forbids the token */
} hd_logit_bias;

/* Of which distribution log-probabilities are. Greedy requests have raw ones in every mode. */
typedef enum hd_logprob_mode {
    HD_LOGPROB_RAW,      /* the model's logits, before all sampling parameters */
    HD_LOGPROB_TEMPERED, /* after bias, bans, constraint, penalties and temperature */
    HD_LOGPROB_SAMPLED   /* also after top-k, top-p and min-p: what the draw is from */
} hd_logprob_mode;

typedef struct hd_alternative {
    int32_t token; /* -1 ends the list early */
    float logprob;
} hd_alternative;

/* What one step adds to one choice. */
typedef struct hd_step_tokens {
    int32_t tokens[HD_MAX_STEP_TOKENS]; /* accepted drafts first; the end token is included */
    float logprobs[HD_MAX_STEP_TOKENS];
    const hd_alternative *top; /* [n_tokens, n_top] most probable first */
    int32_t n_tokens, n_top;
    int32_t n_drafted, n_accepted; /* drafts that this step verified and accepted */
    int32_t n_cached;              /* prompt tokens that were found in the prefix cache */
    int32_t n_prefilled;           /* prompt tokens that are cached or computed by now */
    hd_finish_reason finish_reason;
} hd_step_tokens;

/* Log-probabilities of prompt tokens from, from + 1, ... */
typedef struct hd_prompt_logprobs {
    const int32_t *tokens;     /* [n] */
    const float *logprobs;     /* [n] */
    const hd_alternative *top; /* [n, n_top] most probable first */
    int32_t n, n_top, from;
} hd_prompt_logprobs;

/* What the layers chose for a position, so that a trainer can replay it: the experts of the
 * router, in order of preference, in all decoder layers, -1 where there are none; the keys of the
 * indexer, in ascending order and then -1, in the layers that have one. */
typedef enum hd_replay { HD_REPLAY_EXPERTS, HD_REPLAY_KEYS, HD_N_REPLAYS } hd_replay;

/* Choices for positions from, from + 1, ... of a sequence. Numbers have number_bytes (1, 2 or 4)
 * each, little-endian; all bits are set in -1, and in no other key. */
typedef struct hd_replay_rows {
    const uint8_t *rows; /* [n, layers, top_k] */
    int32_t n, from, layers, top_k, number_bytes;
} hd_replay_rows;

#ifdef __cplusplus
}
#endif

#endif
