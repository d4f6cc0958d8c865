/* json.h - reads and writes JSON documents with jansson, with the checks this project needs.
 *
 * Parsing is strict: UTF-8, no duplicate keys, no NUL in strings, depth at most 2048,
 * integers within 64 bits. Documents are read once at start, never in a step. */
#ifndef HD_BASE_JSON_H
#define HD_BASE_JSON_H

#include <jansson.h>
#include <stddef.h>

#include "base/status.h"

/* json_loadb with flags, safe when memory runs out: it returns NULL, and *why is empty. why
 * may be NULL. */
json_t *hd_json_read(const char *text, size_t n, size_t flags, json_error_t *why);

/* json_dumps with flags; NULL if memory was short for any part. The caller frees the result. */
char *hd_json_write(const json_t *value, size_t flags);

/* Parses text[n]. `what` names it in the error, which contains line and column. The caller
 * owns *out (json_decref). */
hd_status hd_json_parse(json_t **out, const char *text, size_t n, const char *what,
                        hd_err *err);

/* Reads and parses a file of at most max_bytes. */
hd_status hd_json_load(json_t **out, const char *path, size_t max_bytes, hd_err *err);

#endif
