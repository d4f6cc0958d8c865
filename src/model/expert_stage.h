/* expert_stage.h - runs MoE layers whose experts are not all resident: hands over the experts of a
 * layer in waves, as they arrive.
 *
 * An expert is *resident*; *staged*, which means that it was copied to memory of the device; or
 * *elsewhere*. Rows are sorted by expert slot (ops/moe.h), so a wave is a range of slots, and the
 * experts of its rows are resident or staged while the wave lasts. Operators read them through the
 * tables of the wave. Results do not depend on the waves (D8).
 *
 * Three kinds: expert_disk.h stages in host memory what lies in files, expert_host.h in device
 * memory what operators read in host memory, expert_fetch.h in device memory what is copied from a
 * peer's memory or from host memory. */
#ifndef HD_MODEL_EXPERT_STAGE_H
#define HD_MODEL_EXPERT_STAGE_H

#include "device/device.h"
#include "base/expert_table.h"
#include "base/status.h"
#include "ops/ops.h"

typedef struct hd_expert_stage hd_expert_stage;

void hd_expert_stage_close(hd_expert_stage *s); /* NULL is fine */

/* The rows of a layer. */
typedef struct hd_expert_layer {
    const hd_ops *ops;
    hd_stream *stream; /* on which its operators run */
    int32_t layer;
    /* [slots + 1] first place of each slot, in device memory. It stays until the last wave. */
    const int32_t *offset;
    int32_t n_places; /* of all slots, at most */
    /* The rows, and what is computed of them: x[assignment[p] / top_k], weighted by weight[assignment[p]] or, NULL, by
     * 1, becomes y[p]. For experts that are not computed in waves. */
    hd_rows x, y;
    const int32_t *assignment;
    const float *weight;
    int32_t top_k;
    /* [n_next] experts that rows will probably choose in layer `next`, in host memory; NULL: no
     * prediction */
    const int32_t *next_choices;
    int32_t n_next, next;
} hd_expert_layer;

/* The experts of a wave: places [first_place, first_place + n_places) of the layer. */
typedef struct hd_expert_wave {
    int32_t n; /* slots; 0: the layer is done */
    int32_t first_place, n_places;
    const int32_t *offset;                   /* [n + 1] from 0, in device memory */
    const hd_expert_table *gate, *up, *down; /* [n] */
} hd_expert_wave;

/* Begins with a layer. A layer that was not ended is given up. */
void hd_expert_stage_begin(hd_expert_stage *s, const hd_expert_layer *layer);

/* Ends the wave before, and returns the next one. Where the stage is queued, what it points to stays;
 * elsewhere until the next call. After a failure, which names what could not be
 * fetched, the layer has no more waves. */
hd_status hd_expert_stage_next(hd_expert_stage *s, hd_expert_wave *out, hd_err *err);

/* Returns whether predictions are of use. */
bool hd_expert_stage_predicts(const hd_expert_stage *s);

/* ---- between two steps ---- */

/* rows: hd_model_expert_rows() in host memory. Which experts are resident follows them. */
void hd_expert_stage_follow(hd_expert_stage *s, const int64_t *rows);

/* Carries on with moves of experts to and from memory of the device. Never waits. */
void hd_expert_stage_move(hd_expert_stage *s);

typedef struct hd_expert_stage_stats {
    const char *source;     /* "file", "peer" or "host" */
    int32_t n_slots;        /* experts that can be resident or staged at once */
    int32_t n_experts;      /* of all layers, that are elsewhere or in slots */
    size_t bytes;           /* memory of the slots */
    size_t expert_bytes;    /* of one slot: what a fetch copies, at most */
    size_t elsewhere_bytes; /* of those n_experts where they lie */
    int64_t used;           /* of them: those that layers computed with */
    int64_t staged;         /* of these: were resident, or staged or on their way already */
    int64_t fetched;
    int64_t fetched_bytes;
    int64_t predicted; /* experts that were elsewhere when they were predicted */
    int64_t right;     /* of them: were used in the layer for which they were */
    int64_t ahead;     /* of those that were fetched: were fetched by a prediction */
    int64_t moved;     /* that became resident because they were used most */
    int64_t failed;    /* fetches that failed */
    int64_t wait_ns;   /* time in which a step had nothing to compute */
    int64_t fetch_ns;  /* what fetching all that the main layers lack takes; 0: not measured */
    int64_t sent, sent_rows;        /* of those used, the host computed; their rows */
    int64_t predicted_ns, taken_ns; /* of rounds with such: hd_fetch_counts */
    int32_t files, direct;          /* files, and those that are read with O_DIRECT */
} hd_expert_stage_stats;

hd_expert_stage_stats hd_expert_stage_read_stats(const hd_expert_stage *s); /* any thread */

/* Whether it serves a model whose device does not let the host read offsets. */
bool hd_expert_stage_is_queued(const hd_expert_stage *s);

#endif
