/* pickle.h - reads Python pickles as plain data, and runs nothing.
 *
 * A pickle is a program for a small stack machine. This reader knows the instructions of
 * protocols 3 to 5 that build data: numbers, texts, bytes, tuples, lists, dictionaries, names
 * of classes, and calls, of which it only records what is called with what. Every other
 * instruction is refused, and nothing is ever called. What a recorded call means is up to the
 * reader of the tree (torch_tensors.h), which must know its name. */
#ifndef HD_WEIGHTS_PICKLE_H
#define HD_WEIGHTS_PICKLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef enum hd_pickle_kind {
    HD_PICKLE_NONE,
    HD_PICKLE_BOOL,
    HD_PICKLE_INT,
    HD_PICKLE_TEXT,  /* [n] UTF-8 */
    HD_PICKLE_BYTES, /* [n] */
    HD_PICKLE_TUPLE,
    HD_PICKLE_LIST,
    HD_PICKLE_DICT, /* items: keys and values in turn */
    HD_PICKLE_NAME, /* [n] "module name" */
    HD_PICKLE_CALL  /* items: what is called, its arguments, and its state if it has one */
} hd_pickle_kind;

typedef struct hd_pickle_value {
    hd_pickle_kind kind;
    int64_t number;
    const char *text; /* in the pickle, or the reader's own */
    size_t n;         /* bytes, or items */
    int32_t first;    /* index of the first item's cell, -1: none */
    int32_t last;
} hd_pickle_value;

typedef struct hd_pickle hd_pickle;

/* Reads pickle[n], which must outlive *out. HD_EFORMAT: an instruction that is not known, data
 * that ends early, a stack that runs empty, or too much. Depth costs no stack here: items are
 * indices. */
hd_status hd_pickle_open(hd_pickle **out, const uint8_t *pickle, size_t n, hd_err *err);
void hd_pickle_close(hd_pickle *p); /* NULL is fine */

const hd_pickle_value *hd_pickle_root(const hd_pickle *p);

/* A walk over the items of a value: cell is its first, or what the last call left in it.
 * Returns NULL at the end. */
const hd_pickle_value *hd_pickle_next(const hd_pickle *p, int32_t *cell);

/* Item i of a value, or NULL. */
const hd_pickle_value *hd_pickle_item(const hd_pickle *p, const hd_pickle_value *v, size_t i);

/* The value of a key of a dictionary, or NULL. */
const hd_pickle_value *hd_pickle_get(const hd_pickle *p, const hd_pickle_value *dict,
                                     const char *key);

bool hd_pickle_is_text(const hd_pickle_value *v, const char *text);
bool hd_pickle_is_name(const hd_pickle_value *v, const char *module, const char *name);

#endif
