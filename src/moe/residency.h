/* residency.h - which experts should be resident when there is room for some of each layer: those
 * that were used most, lately. It decides, and moves nothing.
 *
 * Rows are counted in looks: a look halves what was counted before and adds the rows since. A
 * swap gives the slot of the least used resident expert to the most used other one of its layer,
 * if that has clearly more rows, so that two experts of about the same use stay. */
#ifndef HD_MOE_RESIDENCY_H
#define HD_MOE_RESIDENCY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

enum { HD_NOT_RESIDENT = -1 };

typedef struct hd_residency hd_residency;

/* Opens with no expert resident. */
hd_status hd_residency_open(hd_residency **out, int32_t n_layers, int32_t n_experts,
                            hd_err *err);
void hd_residency_close(hd_residency *r); /* NULL is fine */

/* slot: HD_NOT_RESIDENT, or where an expert is. */
void hd_residency_set(hd_residency *r, int32_t layer, int32_t expert, int32_t slot);
int32_t hd_residency_slot(const hd_residency *r, int32_t layer, int32_t expert);

/* A look. rows [n_layers, n_experts]: of each expert since the start. */
void hd_residency_look(hd_residency *r, const int64_t *rows);

typedef struct hd_residency_swap {
    int32_t layer, in, out; /* experts */
} hd_residency_swap;

/* Returns whether a swap pays, and the one that gains most rows. */
bool hd_residency_next(const hd_residency *r, hd_residency_swap *out);

#endif
