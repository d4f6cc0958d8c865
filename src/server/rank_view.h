/* rank_view.h - what the ranks of the engine do: exchanges, waiting, imbalance. */
#ifndef HD_SERVER_RANK_VIEW_H
#define HD_SERVER_RANK_VIEW_H

#include <jansson.h>
#include <stdio.h>

#include "hadal.h"

typedef struct rank_view rank_view;

rank_view *rank_view_new(void); /* NULL: no memory */
void rank_view_free(rank_view *v);

/* Recent figures are those since the mark before the last. One thread marks, any thread reads. */
void rank_view_mark(rank_view *v, hd_engine *e);

/* A new reference; NULL without ranks that exchange something. */
json_t *rank_view_json(rank_view *v, hd_engine *e);

/* Prometheus text; nothing without such ranks. label: of every series. */
void rank_view_put_metrics(FILE *out, const char *label, rank_view *v, hd_engine *e);

#endif
