/* capacity.h - what a number of GPUs can serve: whether a model fits a layout, and its predicted
 * times, for a load of equal requests. All of it is predicted, from the engine's own memory plan and
 * from the bytes and operations of its own steps; nothing is measured. docs/plan.md has the
 * formulas. */
#ifndef HD_CAPACITY_CAPACITY_H
#define HD_CAPACITY_CAPACITY_H

#include "capacity/gpu.h"
#include "capacity/memory.h"
#include "capacity/traced_rank.h"
#include "kv/hisparse_choice.h"

/* Requests that run all the time, over all attention groups: when one ends, the next begins. */
typedef struct hd_load {
    int32_t users;          /* requests that run at the same time */
    int32_t prompt, output; /* tokens of each */
    int32_t chunk;          /* rows of a prefill step */
    int32_t drafts;         /* of each sequence and step */
    double accepted;        /* of these, the mean of a step */
    double balancedness;    /* of experts over ranks: mean / busiest */
    bool overlap; /* two micro-batches hide exchanges behind kernels, or these behind those */
} hd_load;

/* Where routed experts lie that have no room on their rank. */
typedef enum hd_experts_at {
    HD_EXPERTS_HELD, /* nowhere: all must fit */
    HD_EXPERTS_ON_HOST,
    HD_EXPERTS_ON_DISK
} hd_experts_at;

typedef struct hd_capacity_args {
    const hd_model_spec *spec;
    const hd_gpu *gpu;
    hd_load load;
    hd_precision precision;
    hd_dtype kv_type; /* of cached entries; HD_NONE: hd_cuda_kv_type() of the precision */
    const hd_grammar_vocab *vocab; /* NULL: without masks of response formats */
    /* Above 1: so many ranks with requests of their own divide the weights of routed experts between
     * them (DWDP). Each copies those of a layer that it lacks from the others while it computes the
     * layer before. The layout must be that of one rank. */
    int32_t dwdp;
    hd_experts_at experts; /* but for HELD the layout must be that of one rank, and dwdp 1 */
    double host_bytes;     /* for experts on the host; 0: enough */
    double host_rate;   /* bytes of experts per second whose rows the host computes; 0: none */
    int32_t hisparse;   /* hd_kv_resident_rows() */
    bool hisparse_auto; /* as many rows as fit, where that pays */
} hd_capacity_args;

typedef struct hd_capacity {
    hd_parallel_config parallel;
    int32_t dwdp; /* ranks as in hd_capacity_args; else 1 */
    /* Of the experts: the part that the rank has, and the bytes of the main layers' others, which are
     * elsewhere. A step takes at least the time of those that it fetches. */
    double resident, elsewhere_bytes;
    double on_host; /* of those that a step of decode needs, the host computes this part */
    /* DWDP: the shortest prompt whose kernels take as long as the copies, in a step of its own; 0:
     * none that the model knows, up to 64K tokens. Shorter ones are for expert parallelism. */
    int32_t hidden_rows;
    hd_engine_sizes sizes;
    /* Of a group, decided if args.hisparse_auto. A step of decode takes miss_s longer if it is on; what
     * prompts fetch is not counted. */
    hd_hisparse_choice hisparse;
    hd_rank_memory memory;
    double free;                    /* bytes of a rank that remain; < 0: it does not fit */
    hd_step_cost *prefill, *decode; /* of a chunk in the middle of a prompt; of all users */
    double ttft_s;                  /* one prompt, and no other work */
    double prefill_s;               /* of one prompt in full chunks */
    double step_s;                  /* of a decode step */
    double user_tokens_s;           /* while no other request is in prefill */
    /* with the prefill of all requests between decode steps */
    double output_tokens_s, input_tokens_s; /* of all ranks */
} hd_capacity;

/* Returns the type of cached entries. */
static inline hd_dtype hd_capacity_kv_type(const hd_capacity_args *a) {
    return a->kv_type ? a->kv_type : hd_cuda_kv_type(a->precision);
}

/* Predicts one layout. HD_EUNSUPPORTED: it cannot divide the model; HD_EINVAL: a load that is
 * none. The caller owns *out (hd_capacity_close). */
hd_status hd_capacity_predict(hd_capacity *out, const hd_capacity_args *a,
                              const hd_parallel_config *parallel, hd_err *err);
void hd_capacity_close(hd_capacity *c); /* an all-zero one is fine */

/* Seconds of a step, as the load says with or without overlap; at least those of fetching. */
double hd_capacity_step_seconds(const hd_step_cost *step, bool overlap);

/* The number of ranks among which to divide a dense MLP, so that its weights and the hidden states that
 * these ranks gather take least memory: of weights / n + n hidden states, after SGLang's large-scale
 * EP report. */
double hd_capacity_dense_tp(double weight_bytes, double hidden_bytes);

/* Layouts of n ranks that `hadal serve` has: attention groups of equal size, experts divided over
 * all ranks or, with one group, over any number. Returns how many there are; at most `cap` are
 * written. */
int32_t hd_capacity_layouts(hd_parallel_config *out, int32_t cap, int32_t n,
                            const hd_model_spec *spec);

/* Marks those of n predictions that fit, and that no other which fits exceeds both in tokens per
 * second of a user and in those of all ranks: best[n]. Returns their number. */
int32_t hd_capacity_front(const hd_capacity *all, int32_t n, bool *best);

#endif
