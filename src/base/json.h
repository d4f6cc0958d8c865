/* json.h - JSON documents from files, with the checks this house wants on all of them.
 *
 * Parsing is jansson's: strict UTF-8, no duplicate keys, no NUL in strings, depth at most
 * 2048, integers within 64 bits. Documents are read once at start, never in a step. */
#ifndef HD_BASE_JSON_H
#define HD_BASE_JSON_H

#include <jansson.h>
#include <stddef.h>

#include "base/status.h"

/* The library's json_loadb, by its flags, but out of memory it does no harm: NULL, and *why says
 * nothing. why may be NULL. */
json_t *hd_json_read(const char *text, size_t n, size_t flags, json_error_t *why);

/* The library's json_dumps, by its flags; NULL where memory was short for any part of it. The
 * result is the caller's (free). */
char *hd_json_write(const json_t *value, size_t flags);

/* Parses text[n]; what names it in the error, which gives line and column. *out is the
 * caller's (json_decref). */
hd_status hd_json_parse(json_t **out, const char *text, size_t n, const char *what,
                        hd_err *err);

/* Reads and parses a file of at most max_bytes. */
hd_status hd_json_load(json_t **out, const char *path, size_t max_bytes, hd_err *err);

#endif
