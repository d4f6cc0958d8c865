/* config_internal.h - typed, range-checked reading of a config.json object, shared by
 * config*.c.
 *
 * Every getter names file, key, value and range in its error. A key with the value null
 * counts as absent everywhere, as in the library that writes these files. */
#ifndef HD_WEIGHTS_CONFIG_INTERNAL_H
#define HD_WEIGHTS_CONFIG_INTERNAL_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "weights/spec.h"

typedef struct weights_view {
    const char *file;
    const char *section; /* "" at the top, or "rope_scaling." with its dot */
    const json_t *object;
    json_t *seen; /* collects the keys that were read; NULL: not collected */
    hd_err *err;
} weights_view;

/* Returns the value, or NULL if absent or null. */
const json_t *weights_find(const weights_view *v, const char *key);

/* Fails with "file: key "section.key" " and the rest of the sentence, with value as JSON. */
hd_status weights_refuse(const weights_view *v, hd_status code, const char *key,
                         const json_t *value, const char *why);

/* Required, and optional with a fallback. Ranges are inclusive. */
hd_status weights_int(const weights_view *v, const char *key, int64_t lo, int64_t hi,
                      int32_t *out);
hd_status weights_int_or(const weights_view *v, const char *key, int64_t lo, int64_t hi,
                         int32_t fallback, int32_t *out);
hd_status weights_real(const weights_view *v, const char *key, double lo, double hi,
                       double *out);
hd_status weights_real_or(const weights_view *v, const char *key, double lo, double hi,
                          double fallback, double *out);
hd_status weights_bool_or(const weights_view *v, const char *key, bool fallback, bool *out);

/* *out is NULL when absent; otherwise it lives as long as the document. */
hd_status weights_text(const weights_view *v, const char *key, const char **out);

/* The object, or a view with object NULL when absent. section is key with a dot. */
hd_status weights_section(const weights_view *v, const char *key, const char *section,
                          weights_view *out);

/* Refuses a key that is present with a value other than the only supported one. */
hd_status weights_only_text(const weights_view *v, const char *key, const char *only);
hd_status weights_only_bool(const weights_view *v, const char *key, bool only);

/* *out is NULL when absent. */
hd_status weights_array(const weights_view *v, const char *key, const json_t **out);

/* Adds one notice for the user; drops it if all places are used. */
void weights_notice(hd_model_spec *s, const char *fmt, ...) HD_PRINTF(2, 3);

/* Readers of config.json by subject; each fills its fields of s. */
hd_status weights_config_mla(hd_model_spec *s, const weights_view *v); /* V2, V3, V3.2 */
hd_status weights_config_v4(hd_model_spec *s, const weights_view *v);  /* V4 */
hd_status weights_config_v41(hd_model_spec *s, const weights_view *v); /* V4.1 */
/* config_v4.c: what V4.1 has in common with V4 */
hd_status weights_config_heads(hd_model_spec *s, const weights_view *v);
hd_status weights_config_route(hd_model_spec *s, const weights_view *v);
hd_status weights_config_streams(hd_model_spec *s, const weights_view *v);
/* V4's and V4.1's drafter: the number of layers, and DSpark's sizes; before the layers */
hd_status weights_config_dspark(hd_model_spec *s, const weights_view *v);
hd_status weights_config_rope(hd_model_spec *s, const weights_view *v); /* after the sizes */
hd_status weights_config_quant(hd_model_spec *s, const weights_view *v);

#endif
