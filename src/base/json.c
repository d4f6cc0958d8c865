/* json.c - jansson behind one set of flags and one form of error. */
#include "base/json.h"

#include <stdlib.h>

#include "base/file.h"

hd_status hd_json_parse(json_t **out, const char *text, size_t n, const char *what,
                        hd_err *err) {
    json_error_t why;
    *out = json_loadb(text, n, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &why);
    if (*out) return HD_OK;
    if (json_error_code(&why) == json_error_out_of_memory ||
        !why.text[0]) { /* or says nothing */
        return HD_FAIL(err, HD_ENOMEM, "%s: no memory to parse it", what);
    }
    return HD_FAIL(err, HD_EFORMAT, "%s: not valid JSON: line %d column %d: %s", what, why.line,
                   why.column, why.text);
}

hd_status hd_json_load(json_t **out, const char *path, size_t max_bytes, hd_err *err) {
    char *text;
    size_t n;
    *out = NULL;
    HD_TRY(hd_file_read(&text, &n, path, max_bytes, err));
    hd_status st = hd_json_parse(out, text, n, path, err);
    free(text);
    return st;
}
