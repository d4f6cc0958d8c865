/* grammar_schema_internal.h - shared by the walk over a schema and the types of values. */
#ifndef HD_GRAMMAR_GRAMMAR_SCHEMA_INTERNAL_H
#define HD_GRAMMAR_GRAMMAR_SCHEMA_INTERNAL_H

#include <stdio.h>

#include "base/json.h"
#include "grammar/grammar_internal.h"

typedef struct gram_task {
    json_t *schema;
    gram_spelling spelling;
    uint32_t from, to;
    int32_t depth;
    char path[100]; /* path in the schema, for errors */
} gram_task;

typedef struct gram_ref {
    const json_t *target;
    gram_spelling spelling;
    int32_t rule;
} gram_ref;

/* The rule of strings of one range of lengths; shared, so that masks of its states are
 * shared too. */
typedef struct gram_sized {
    uint32_t min, max;
    bool plain;
    int32_t rule;
} gram_sized;

typedef struct gram_walk {
    gram_builder *b;
    json_t *root;
    json_t *owned; /* schemas created by this walk */
    gram_task *tasks;
    gram_ref *refs;
    gram_sized *sized;
    uint32_t n_tasks, n_refs, n_sized;
    size_t cap_tasks, cap_refs, cap_sized;
} gram_walk;

hd_status gram_schema_invalid(gram_walk *w, const gram_task *t, const char *what);
hd_status gram_schema_refuse(gram_walk *w, const gram_task *t, const char *what);

/* Adds a task for a schema inside parent's. */
void gram_push(gram_walk *w, const gram_task *parent, const char *key, json_t *schema,
               gram_spelling spelling, uint32_t from, uint32_t to);

/* Returns the compact text of a value, which the caller frees; NULL after a failure. */
char *gram_schema_dump(gram_walk *w, const json_t *value);

/* Refuses a type that does not exist. */
bool gram_schema_check_type(gram_walk *w, const gram_task *t);

/* Draws a schema of types, without $ref, enum and the like. */
void gram_schema_types(gram_walk *w, const gram_task *t);

/* Draws any value that the task's spelling can express. */
void gram_schema_any(gram_walk *w, const gram_task *t);

/* Members of an object: its properties, and required names without one. */
typedef struct gram_members {
    json_t *properties, *required; /* or NULL */
    json_t *others;                /* schema of other names; NULL: they are not allowed */
} gram_members;

/* False after a failure. */
bool gram_schema_members(gram_walk *w, const gram_task *t, gram_members *m);

/* Calls draw for each name, in order. */
typedef void gram_member_fn(gram_walk *w, const gram_task *t, void *at, const char *key,
                            json_t *schema, bool required);
void gram_schema_each(gram_walk *w, const gram_task *t, const gram_members *m,
                      gram_member_fn *draw, void *at);

/* grammar_parameters.c: an object as the parameters of a call. */
void gram_schema_parameters(gram_walk *w, const gram_task *t);

/* Returns the pattern of a format; NULL: unknown. */
const char *gram_format_pattern(const char *format);

#endif
