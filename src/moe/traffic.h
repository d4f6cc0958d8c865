/* traffic.h - how many rows each expert gets in a sequence of passes: read from an expert record,
 * or generated. */
#ifndef HD_MOE_TRAFFIC_H
#define HD_MOE_TRAFFIC_H

#include "moe/record.h"

typedef struct hd_traffic {
    int32_t passes, layers, experts, top_k; /* layers: those with experts */
    int32_t *layer;                         /* [layers] number of each in the model */
    int32_t *tokens;                        /* [passes] */
    int64_t *rows;                          /* [passes][layers][experts] */
} hd_traffic;

static inline const int64_t *hd_traffic_rows(const hd_traffic *t, int32_t pass, int32_t layer) {
    return t->rows + ((int64_t)pass * t->layers + layer) * t->experts;
}

/* Phases, as bits 1 << hd_record_phase. DRAFT has other layers than the others. */
enum { HD_TRAFFIC_STEPS = (1 << HD_RECORD_DRAFT) - 1, HD_TRAFFIC_DRAFT = 1 << HD_RECORD_DRAFT };

/* The choices of a command line, "all" and each phase; ends with NULL. */
extern const char *const hd_traffic_phase_names[];
/* The phases of a choice; all: but drafts. */
unsigned hd_traffic_phases(int choice);

/* Reads the passes of some phases. A record of counts is one pass. head gets the record's head, of
 * which the caller frees slot_expert, also after a failure; *cut tells whether its last row was
 * incomplete. */
hd_status hd_traffic_read(hd_traffic *out, hd_record_head *head, bool *cut, FILE *in,
                          const char *name, unsigned phases, hd_err *err);

/* Joins n recordings of one model: `every` passes of the first, as many of the next, and so on in turn; each goes on
 * where it was left. It ends with the last turn for which all have passes. HD_EINVAL: a part has fewer passes than one
 * turn, or other layers or experts than the first. */
hd_status hd_traffic_switch(hd_traffic *out, const hd_traffic *parts, int32_t n, int32_t every,
                            hd_err *err);

/* Traffic whose tokens are independent, but for what changes the experts' shares. */
typedef struct hd_traffic_spec {
    int32_t passes, layers, experts, top_k;
    int32_t tokens; /* of a pass */
    uint64_t seed;
    double zipf;          /* shares 1 / rank^zipf, or */
    double lognormal;     /* e^(lognormal * N(0, 1)) */
    double jitter;        /* each pass times e^(jitter * N(0, 1)) */
    double drift;         /* from pass to pass times e^(drift * N(0, 1)), which stays */
    int32_t switch_every; /* passes after which all shares are drawn anew; 0: never */
} hd_traffic_spec;

hd_status hd_traffic_generate(hd_traffic *out, const hd_traffic_spec *spec, hd_err *err);

void hd_traffic_close(hd_traffic *t);

#endif
