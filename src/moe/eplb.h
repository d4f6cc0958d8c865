/* eplb.h - which expert each slot of each rank holds, so that ranks get equal loads; and the
 * exact split of a batch over the copies of its experts.
 *
 * A layer has experts and slots; slots belong to ranks in order, ranks to nodes in order. Every
 * expert has a slot, and spare slots hold further copies. Layers are independent. All results
 * depend on the arguments only, so every rank computes the same. */
#ifndef HD_MOE_EPLB_H
#define HD_MOE_EPLB_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

enum {
    HD_EPLB_MAX_LAYERS = 1024,
    HD_EPLB_MAX_EXPERTS = 4096,
    HD_EPLB_MAX_SLOTS = 16384, /* of a layer */
    HD_EPLB_MAX_RANKS = 4096,
    HD_EPLB_TILE = 128, /* rows of a tile of the grouped GEMM */
};

#define HD_EPLB_MAX_LOAD  0x1p63 /* of an expert */
#define HD_EPLB_TARGET    0.97
#define HD_EPLB_READ_ROWS 256.0 /* reading an expert's weights takes as long as so many rows */

typedef enum hd_eplb_algorithm {
    HD_EPLB_HADAL,     /* never worse than PUBLISHED; for an even split over copies */
    HD_EPLB_PUBLISHED, /* the algorithm of DeepSeek's EPLB */
    HD_EPLB_FLOW,      /* for a split of every batch by hd_eplb_split */
} hd_eplb_algorithm;

/* What a rank's time in a step depends on. */
typedef enum hd_eplb_phase {
    HD_EPLB_ROWS,    /* its rows */
    HD_EPLB_PREFILL, /* tiles of HD_EPLB_TILE rows */
    HD_EPLB_DECODE,  /* rows, and experts whose weights are read; then no copies are used */
} hd_eplb_phase;

typedef struct hd_eplb_args {
    const double *loads; /* [layers][experts] rows, 0 to HD_EPLB_MAX_LOAD */
    int32_t layers, experts, slots, ranks;
    int32_t nodes;             /* 0: 1; divides ranks */
    int32_t groups;            /* of experts, kept on one node if nodes divides groups; 0: 1 */
    const int32_t *rank_slots; /* [ranks]; NULL: equal, the first ranks one more */
    const bool *gone;          /* [ranks] ranks whose slots stay empty; NULL: none */
    const int32_t *previous;   /* [layers][slots] map to repair, -1: empty; NULL: plan anew */
    int64_t max_moves;         /* of a layer in a repair; < 0: no limit */
    double target;    /* share of the bound at which a repair stops; 0: HD_EPLB_TARGET */
    double step_rows; /* rows of a layer in a step, for PREFILL and DECODE */
    hd_eplb_algorithm algorithm;
    hd_eplb_phase phase;
} hd_eplb_args;

typedef struct hd_eplb_map {
    int32_t layers, experts, slots, ranks;
    int32_t most_copies;
    int32_t *slot_expert;  /* [layers][slots]; -1: empty */
    int32_t *expert_slots; /* [layers][experts][most_copies]; -1 behind the last */
    int32_t *n_copies;     /* [layers][experts] */
    int32_t *rank_slot0;   /* [ranks + 1] first slot of each rank */
    double *balancedness;  /* [layers] mean / max of the ranks' costs, where the mean is that
                            * of a plan without copies; of FLOW, with a free split */
    double *bound;         /* [layers] no plan has a higher balancedness */
    int32_t *moves;        /* [layers] experts that a rank gets and did not hold in previous */
    int32_t *lost;         /* [layers] experts that no rank held in previous */
    int32_t n_reached;     /* layers at the target */
    bool no_copies;        /* the phase makes copies harmful: spare slots are empty */
} hd_eplb_map;

/* Plans all layers. HD_EINVAL with a sentence for arguments that have no plan: fewer slots than
 * experts, a load out of range, an invalid previous map; for PUBLISHED, numbers that do not
 * divide. A repair may exceed max_moves only for experts that no rank holds. */
hd_status hd_eplb_plan(hd_eplb_map *out, const hd_eplb_args *a, hd_err *err);
void hd_eplb_map_close(hd_eplb_map *m);

/* ---- the split of a batch ---- */

/* A placement of one layer as a graph, and memory for its splits; immutable but for that. */
typedef struct hd_eplb_splitter hd_eplb_splitter;

/* slot_expert [slots], -1: empty; rank_slot0 [ranks + 1]. Both are copied. */
hd_status hd_eplb_splitter_open(hd_eplb_splitter **out, const int32_t *slot_expert,
                                const int32_t *rank_slot0, int32_t experts, int32_t ranks,
                                hd_err *err);
void hd_eplb_splitter_close(hd_eplb_splitter *s);

/* hd_split_rows() of moe/split.h. */
int64_t hd_eplb_split(hd_eplb_splitter *s, const int32_t *rows, int32_t *out,
                      bool *certificate);

/* ---- files ---- */

typedef struct hd_eplb_loads {
    double *loads; /* [layers][experts] */
    int32_t layers, experts;
} hd_eplb_loads;

/* Reads [layers][experts] or [passes][layers][experts] counts, bare or as "logical_count" of an
 * object. Passes are added; with z > 0 a load is n * (mean + z * deviation) of its n passes.
 * `what` names the text in errors. */
hd_status hd_eplb_loads_read(hd_eplb_loads *out, const char *text, size_t n, double z,
                             const char *what, hd_err *err);
void hd_eplb_loads_close(hd_eplb_loads *l);

/* Reads a map [layers][slots], -1: empty: bare JSON, "physical_to_logical_map" of an object
 * (SGLang), or "initial_global_assignments" of YAML (TensorRT-LLM). text[n] is a
 * NUL. The caller frees *out. */
hd_status hd_eplb_map_read(int32_t **out, int32_t *layers, int32_t *slots, const char *text,
                           size_t n, const char *what, hd_err *err);

/* All of a map as JSON, or what SGLang reads; NULL without memory. */
json_t *hd_eplb_map_json(const hd_eplb_map *m);
json_t *hd_eplb_map_sglang(const hd_eplb_map *m);
/* What TensorRT-LLM reads. The caller frees the text; NULL without memory. */
char *hd_eplb_map_tensorrt(const hd_eplb_map *m);

#endif
