/* expert_fetch.h - experts that lie in the memory of peers or of the host, fetched into staging sets
 * of device memory before layers need them (DWDP).
 *
 * While a layer is computed, the missing experts of the next `depth` layers are copied on a stream of
 * their own, each to the next of depth + 1 sets. Two events guard a set: `fetched`, for which
 * operators wait before they read it, and `consumed`, for which copies wait before they overwrite
 * it. Nothing else orders the two streams, the host waits for neither, and no rank waits for
 * another: a peer only has to keep its experts where they are. Tables of layers point into the
 * sets, so operators read experts where they arrive, and steps can be queued ahead.
 *
 * What lies in the memory of another host is read by threads (comm/pieces.h), in the same order. Before a set
 * is used, the host waits for what they read into it.
 *
 * Where the host can read which experts a layer's rows chose, and these are few or a set does not
 * hold a layer's, only those are fetched, behind the router.
 *
 * What memory is left beside the sets holds resident experts, in each layer those that were used
 * most (moe/residency.h). They are exchanged one by one: copied to a spare slot beside a step, and
 * read from the next step on.
 *
 * Sources: issue 26; DWDP in TensorRT-LLM; facts/performance.md 2.8. */
#ifndef HD_MODEL_EXPERT_FETCH_H
#define HD_MODEL_EXPERT_FETCH_H

#include "comm/pieces.h"
#include "model/expert_stage.h"
#include "weights/weights.h"

enum { HD_MAX_FETCH_DEPTH = 3 };

/* Where experts may lie. They are looked for in the order of the list. */
typedef struct hd_fetch_source {
    const char *name;      /* "peer" or "host" */
    const hd_weights *has; /* which must keep them at their addresses */
    /* Reads experts of a rank on another host, of whose files `has` is mapped; NULL: they are copied. Not
     * where operators are queued. */
    hd_piece_reader *reader;
    hd_extent held; /* only these experts are read there; of none: all that it has */
} hd_fetch_source;

typedef struct hd_expert_fetch_options {
    const hd_fetch_source *sources;  /* [n_sources] */
    int32_t n_sources, first_source; /* first_source: where this rank begins to fetch */
    int32_t depth;                   /* 1 .. HD_MAX_FETCH_DEPTH */
    /* Device memory for staging sets and for experts that are resident besides those that w holds;
     * 0: for all that a layer lacks in every set, and no more. */
    size_t bytes;
    size_t slice_bytes; /* 0: 2 MiB */
    hd_device *device;
    hd_stream *stream, *copy_stream; /* copies fail through `stream` */
    /* Operators run later than they are queued: the host must not read what they write. A set must
     * hold all that a layer lacks. */
    bool queued;
    bool timed; /* one layer is fetched when it is opened, for fetch_ns of the statistics */
} hd_expert_fetch_options;

/* Finds an array of an expert for others, which read it (a hd_piece_find_fn). weights: hd_weights in host
 * memory. */
const void *hd_expert_fetch_find(void *weights, int32_t layer, int32_t expert, int32_t array,
                                 size_t *bytes);

/* w: the weights of this rank, uploaded. Everything must outlive the stage. HD_EINVAL names an
 * expert that no source has, or says how many bytes are too few. */
hd_status hd_expert_fetch_open(hd_expert_stage **out, const hd_model_spec *spec,
                               const hd_weights *w, const hd_expert_fetch_options *o,
                               hd_err *err);

#endif
