/* json.c - jansson with one set of flags, one form of error, and a guard against failed
 * allocations.
 *
 * If the library's lexer gets no memory for the text it collects, it goes on without, and
 * may then read past the end of its buffer. Every read therefore reserves, beforehand, all
 * memory that a lexer could still request. The first request that the system refuses, and
 * later ones, are served from this reserve. The input ends at once, and nothing of the
 * document is returned. A writer whose allocation failed can return incomplete text, so such
 * text is not returned either. */
#include "base/json.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"

/* After a failed allocation the library still parses the last input piece, which may contain
 * that many values. The text collected so far is at most the input. Its buffer is at most
 * twice as large and doubles when full, and a string is copied out of it. */
enum { GIVEN_BYTES = 256, VALUE_BYTES = 512, SPARE_BYTES = GIVEN_BYTES * VALUE_BYTES };
enum { ALIGNMENT = 16, TEXTS = 5 };

typedef struct reading {
    const char *text;
    size_t n, at;
    char *spare; /* [n_spare], used up to n_used; NULL: not reading */
    size_t n_spare, n_used;
    bool failed;
} reading;

static _Thread_local reading *current;
static json_malloc_t outer_malloc;
static json_free_t outer_free;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void *guarded_malloc(size_t n) {
    reading *r = current;
    void *p = outer_malloc(n);
    if (p || !r) return p;
    r->failed = true;
    const size_t rounded = (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (rounded < n || rounded > r->n_spare - r->n_used) return NULL;
    p = r->spare + r->n_used;
    r->n_used += rounded;
    return p;
}

/* Memory served from the reserve is freed with it. */
static void guarded_free(void *p) {
    const reading *r = current;
    const uintptr_t at = (uintptr_t)p, first = r ? (uintptr_t)r->spare : 0;
    if (r && at >= first && at < first + r->n_spare) return;
    outer_free(p);
}

static void install(void) {
    json_get_alloc_funcs(&outer_malloc, &outer_free);
    json_set_alloc_funcs(guarded_malloc, guarded_free);
}

static size_t give(void *buffer, size_t n, void *user) {
    reading *r = user;
    size_t given = r->n - r->at < n ? r->n - r->at : n;
    if (given > GIVEN_BYTES) given = GIVEN_BYTES;
    if (r->failed) return (size_t)-1;
    if (!given) return 0; /* an empty text may be NULL */
    memcpy(buffer, r->text + r->at, given);
    r->at += given;
    return given;
}

json_t *hd_json_read(const char *text, size_t n, size_t flags, json_error_t *why) {
    reading r = {.text = text, .n = n, .n_spare = TEXTS * n + SPARE_BYTES};
    pthread_once(&once, install);
    r.spare = malloc(r.n_spare);
    json_t *value = NULL;
    if (r.spare) {
        current = &r;
        value = json_load_callback(give, &r, flags, why);
        if (r.failed) {
            json_decref(value);
            value = NULL;
        }
        current = NULL;
    }
    if (why && (r.failed || !r.spare)) *why = (json_error_t){.line = 0};
    free(r.spare);
    return value;
}

/* Writing reserves nothing: it only detects a failed allocation. */
char *hd_json_write(const json_t *value, size_t flags) {
    reading r = {0};
    pthread_once(&once, install);
    current = &r;
    char *text = json_dumps(value, flags);
    current = NULL;
    if (r.failed) {
        free(text);
        text = NULL;
    }
    return text;
}

hd_status hd_json_parse(json_t **out, const char *text, size_t n, const char *what,
                        hd_err *err) {
    json_error_t why;
    *out = hd_json_read(text, n, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &why);
    if (*out) return HD_OK;
    if (json_error_code(&why) == json_error_out_of_memory ||
        !why.text[0]) { /* or the error is empty */
        return HD_FAIL(err, HD_ENOMEM, "%s: no memory to parse it", what);
    }
    HD_TRY(hd_refuse_lfs_pointer(text, n, what, err));
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
