/* config_view.c - typed, range-checked reading of one JSON object. */
#include "weights/config/config_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"

const json_t *weights_find(const weights_view *v, const char *key) {
    if (v->seen) json_object_set_new(v->seen, key, json_true());
    const json_t *value = json_object_get(v->object, key);
    return json_is_null(value) ? NULL : value;
}

hd_status weights_refuse(const weights_view *v, hd_status code, const char *key,
                         const json_t *value, const char *why) {
    if (!value) {
        return HD_FAIL(v->err, code, "%s: key \"%s%s\" is missing: %s", v->file, v->section,
                       key, why);
    }
    char *text = hd_json_write(value, JSON_ENCODE_ANY | JSON_COMPACT);
    hd_status st =
        HD_FAIL(v->err, code, "%s: key \"%s%s\" is %.80s%s: %s", v->file, v->section, key,
                text ? text : "unprintable", text && strlen(text) > 80 ? "..." : "", why);
    free(text);
    return st;
}

hd_status weights_int_or(const weights_view *v, const char *key, int64_t lo, int64_t hi,
                         int32_t fallback, int32_t *out) {
    if (!weights_find(v, key)) {
        *out = fallback;
        return HD_OK;
    }
    return weights_int(v, key, lo, hi, out);
}

hd_status weights_int(const weights_view *v, const char *key, int64_t lo, int64_t hi,
                      int32_t *out) {
    const json_t *value = weights_find(v, key);
    int64_t n = json_integer_value(value);
    if (!json_is_integer(value) || n < lo || n > hi) {
        char why[96];
        snprintf(why, sizeof why, "must be an integer in %lld..%lld", (long long)lo,
                 (long long)hi);
        return weights_refuse(v, HD_EFORMAT, key, value, why);
    }
    *out = (int32_t)n;
    return HD_OK;
}

hd_status weights_real_or(const weights_view *v, const char *key, double lo, double hi,
                          double fallback, double *out) {
    if (!weights_find(v, key)) {
        *out = fallback;
        return HD_OK;
    }
    return weights_real(v, key, lo, hi, out);
}

hd_status weights_real(const weights_view *v, const char *key, double lo, double hi,
                       double *out) {
    const json_t *value = weights_find(v, key);
    double x = json_number_value(value);
    if (!json_is_number(value) || !isfinite(x) || x < lo || x > hi) {
        char why[96];
        snprintf(why, sizeof why, "must be a number in %g..%g", lo, hi);
        return weights_refuse(v, HD_EFORMAT, key, value, why);
    }
    *out = x;
    return HD_OK;
}

hd_status weights_bool_or(const weights_view *v, const char *key, bool fallback, bool *out) {
    const json_t *value = weights_find(v, key);
    if (value && !json_is_boolean(value)) {
        return weights_refuse(v, HD_EFORMAT, key, value, "must be true or false");
    }
    *out = value ? json_is_true(value) : fallback;
    return HD_OK;
}

hd_status weights_text(const weights_view *v, const char *key, const char **out) {
    const json_t *value = weights_find(v, key);
    if (value && !json_is_string(value)) {
        return weights_refuse(v, HD_EFORMAT, key, value, "must be a string");
    }
    *out = json_string_value(value);
    return HD_OK;
}

hd_status weights_section(const weights_view *v, const char *key, const char *section,
                          weights_view *out) {
    const json_t *value = weights_find(v, key);
    *out = (weights_view){.file = v->file, .section = section, .object = value, .err = v->err};
    if (value && !json_is_object(value)) {
        return weights_refuse(v, HD_EFORMAT, key, value, "must be an object");
    }
    return HD_OK;
}

hd_status weights_only_text(const weights_view *v, const char *key, const char *only) {
    const char *text = NULL;
    HD_TRY(weights_text(v, key, &text));
    if (!text || strcmp(text, only) == 0) return HD_OK;
    char why[96];
    snprintf(why, sizeof why, "only \"%s\" is supported", only);
    return weights_refuse(v, HD_EUNSUPPORTED, key, weights_find(v, key), why);
}

hd_status weights_only_bool(const weights_view *v, const char *key, bool only) {
    bool b = only;
    HD_TRY(weights_bool_or(v, key, only, &b));
    if (b == only) return HD_OK;
    return weights_refuse(v, HD_EUNSUPPORTED, key, weights_find(v, key),
                          only ? "only true is supported" : "only false is supported");
}

hd_status weights_array(const weights_view *v, const char *key, const json_t **out) {
    const json_t *value = weights_find(v, key);
    if (value && !json_is_array(value)) {
        return weights_refuse(v, HD_EFORMAT, key, value, "must be an array");
    }
    *out = value;
    return HD_OK;
}

void weights_notice(hd_model_spec *s, const char *fmt, ...) {
    if (s->n_notices == (int32_t)HD_LEN(s->notices)) return;
    va_list args;
    va_start(args, fmt);
    vsnprintf(s->notices[s->n_notices++], sizeof s->notices[0], fmt, args);
    va_end(args);
}
