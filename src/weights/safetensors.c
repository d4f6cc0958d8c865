/* safetensors.c - parses the header of a safetensors file and checks it completely before
 * use.
 *
 * The file is a little-endian u64 N, N bytes of JSON, then the data area. The rules are
 * those of the format's reference implementation: a header of at most 100,000,000 bytes,
 * tensors that fill the data area without hole or overlap, spans equal to shape times
 * element size. Every tensor offset is relative to the data area. */
#include "weights/safetensors.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/file.h"
#include "base/json.h"

enum {
    MAX_HEADER_BYTES = 100000000,
    MAX_TENSORS = 1000000,
    MAX_COMMAS = 16 * MAX_TENSORS, /* rank 8 needs 12 per tensor */
    MAX_NAME = 1024
};

/* Legal types of the format that no model uses; hd_dtypes has the others. */
static const struct {
    const char *name;
    uint32_t bits;
} unused_types[] = {
    {"BOOL",    8 },
    {"F6_E2M3", 6 },
    {"F6_E3M2", 6 },
    {"F8_E5M2", 8 },
    {"I16",     16},
    {"U16",     16},
    {"U32",     32},
    {"U64",     64},
    {"F64",     64},
    {"C64",     64},
};

/* The file while its header is read. */
typedef struct header {
    const char *path;
    const uint8_t *data; /* the data area */
    size_t data_bytes;
    bool reals; /* the header was parsed again with every number as a real */
    hd_err *err;
} header;

static hd_status refuse(const header *h, const char *name, const char *why) {
    return HD_FAIL(h->err, HD_EFORMAT, "%s: tensor %.200s: %s", h->path, name, why);
}

/* Reads a non-negative integer. Values above 64 bits saturate. */
static bool read_count(const header *h, const json_t *value, int64_t *out) {
    if (json_is_integer(value)) {
        *out = json_integer_value(value);
    } else if (h->reals && json_is_real(value)) {
        double v = json_real_value(value);
        if (v != floor(v)) return false;
        *out = v >= 0x1p53 ? INT64_MAX : v < 0 ? -1 : (int64_t)v;
    } else {
        return false;
    }
    return *out >= 0;
}

static hd_status read_dtype(const header *h, hd_tensor *t, const json_t *value,
                            uint32_t *bits) {
    const char *text = json_string_value(value);
    if (!text) return refuse(h, t->name, "bad entry: dtype is missing or not a string");
    for (int i = 0; i < HD_N_DTYPES; i++) {
        const hd_dtype_row *row = &hd_dtypes[i];
        if (!row->file_name || strcmp(text, row->file_name) != 0) continue;
        t->dtype_name = row->file_name;
        t->dtype = (hd_dtype)i;
        *bits = (uint32_t)row->bits;
        return HD_OK;
    }
    for (size_t i = 0; i < HD_LEN(unused_types); i++) {
        if (strcmp(text, unused_types[i].name) != 0) continue;
        t->dtype_name = unused_types[i].name;
        t->dtype = HD_NONE;
        *bits = unused_types[i].bits;
        return HD_OK;
    }
    return HD_FAIL(h->err, HD_EFORMAT, "%s: tensor %.200s: unknown dtype \"%.40s\"", h->path,
                   t->name, text);
}

/* Reads the shape and computes its bytes. */
static hd_status read_shape(const header *h, hd_tensor *t, const json_t *value, uint32_t bits,
                            size_t *bytes) {
    if (!json_is_array(value)) {
        return refuse(h, t->name, "bad entry: shape is missing or not an array");
    }
    size_t rank = json_array_size(value), total = bits;
    if (rank > HD_MAX_RANK) {
        return HD_FAIL(h->err, HD_EFORMAT, "%s: tensor %.200s: rank %zu is above %d", h->path,
                       t->name, rank, HD_MAX_RANK);
    }
    t->rank = (int32_t)rank;
    bool empty = false, fits = true;
    for (size_t i = 0; i < rank; i++) {
        if (!read_count(h, json_array_get(value, i), &t->shape[i])) {
            return refuse(h, t->name, "bad shape: a dimension is no whole number from 0 up");
        }
        empty = empty || t->shape[i] == 0;
        fits = fits && hd_mul_size(total, (size_t)t->shape[i], &total);
    }
    if (!fits && !empty) return refuse(h, t->name, "shape overflow: more bytes than exist");
    if (empty) total = 0;
    if (total % 8) return refuse(h, t->name, "misaligned: does not end on a whole byte");
    *bytes = total / 8;
    return HD_OK;
}

static hd_status read_span(const header *h, hd_tensor *t, const json_t *value, size_t wanted) {
    int64_t begin, end;
    if (!json_is_array(value) || json_array_size(value) != 2 ||
        !read_count(h, json_array_get(value, 0), &begin) ||
        !read_count(h, json_array_get(value, 1), &end)) {
        return refuse(h, t->name,
                      "bad offsets: data_offsets must be two whole numbers from 0 up");
    }
    if (begin > end) {
        return HD_FAIL(h->err, HD_EFORMAT,
                       "%s: tensor %.200s: bad offsets: begin %lld is after end %lld", h->path,
                       t->name, (long long)begin, (long long)end);
    }
    if ((uint64_t)end > h->data_bytes) {
        return HD_FAIL(h->err, HD_EFORMAT,
                       "%s: tensor %.200s: data past end: ends at %lld of %zu data bytes; the "
                       "file may be cut short",
                       h->path, t->name, (long long)end, h->data_bytes);
    }
    t->data = h->data + begin;
    t->bytes = (size_t)(end - begin);
    if (t->bytes == wanted) return HD_OK;
    return HD_FAIL(h->err, HD_EFORMAT,
                   "%s: tensor %.200s: span mismatch: %zu bytes where dtype and shape need %zu",
                   h->path, t->name, t->bytes, wanted);
}

static hd_status read_entry(const header *h, hd_tensor *t, const json_t *entry) {
    uint32_t bits = 0;
    size_t bytes = 0;
    if (!json_is_object(entry)) return refuse(h, t->name, "bad entry: not an object");
    HD_TRY(read_dtype(h, t, json_object_get(entry, "dtype"), &bits));
    HD_TRY(read_shape(h, t, json_object_get(entry, "shape"), bits, &bytes));
    return read_span(h, t, json_object_get(entry, "data_offsets"), bytes);
}

static hd_status check_name(const header *h, const char *name) {
    size_t n = strlen(name);
    bool plain = n > 0 && n <= MAX_NAME;
    for (size_t i = 0; plain && i < n; i++) {
        uint8_t b = (uint8_t)name[i];
        bool c1 = b == 0xc2 && (uint8_t)name[i + 1] < 0xa0; /* U+0080 to U+009F */
        plain = b >= 0x20 && b != 0x7f && !c1;
    }
    if (plain) return HD_OK;
    return HD_FAIL(h->err, HD_EFORMAT,
                   "%s: tensor %.60s: bad name: %zu bytes, must be 1 to %d without control "
                   "characters",
                   h->path, name, n, MAX_NAME);
}

static hd_status check_metadata(const header *h, json_t *metadata) {
    const char *key;
    json_t *value;
    bool good = json_is_object(metadata);
    if (good) {
        json_object_foreach(metadata, key, value) good = good && json_is_string(value);
    }
    if (good) return HD_OK;
    return HD_FAIL(h->err, HD_EFORMAT,
                   "%s: bad metadata: __metadata__ must map strings to strings", h->path);
}

static hd_status read_tensors(const header *h, hd_safetensors *out, json_t *root) {
    const char *key;
    json_t *entry;
    size_t name_bytes = 0, used = 0;
    if (json_object_size(root) > MAX_TENSORS) {
        return HD_FAIL(h->err, HD_EFORMAT, "%s: too many tensors: %zu, at most %d", h->path,
                       json_object_size(root), MAX_TENSORS);
    }
    json_object_foreach(root, key, entry) {
        HD_TRY(check_name(h, key));
        name_bytes += strlen(key) + 1;
    }
    out->tensors = calloc(json_object_size(root) + 1, sizeof *out->tensors);
    out->names = malloc(name_bytes + 1);
    if (!out->tensors || !out->names) {
        return HD_FAIL(h->err, HD_ENOMEM, "%s: no memory for its tensor list", h->path);
    }
    json_object_foreach(root, key, entry) {
        if (strcmp(key, "__metadata__") == 0) {
            HD_TRY(check_metadata(h, entry));
            continue;
        }
        hd_tensor *t = &out->tensors[out->n];
        size_t n = strlen(key) + 1;
        t->name = memcpy(out->names + used, key, n);
        used += n;
        HD_TRY(read_entry(h, t, entry));
        out->n++;
    }
    return HD_OK;
}

static int by_place(const void *a, const void *b) {
    const hd_tensor *x = *(const hd_tensor *const *)a, *y = *(const hd_tensor *const *)b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* The tensors must tile the data area: an unclaimed byte could hide another file. */
static hd_status check_tiling(const header *h, const hd_safetensors *s) {
    const hd_tensor **order = malloc(((size_t)s->n + 1) * sizeof *order);
    if (!order) return HD_FAIL(h->err, HD_ENOMEM, "%s: no memory to sort tensors", h->path);
    for (int32_t i = 0; i < s->n; i++) order[i] = &s->tensors[i];
    qsort(order, (size_t)s->n, sizeof *order, by_place);
    const uint8_t *at = h->data;
    hd_status st = HD_OK;
    for (int32_t i = 0; i < s->n && st == HD_OK; i++) {
        const hd_tensor *t = order[i];
        if (t->data < at) {
            st = HD_FAIL(h->err, HD_EFORMAT,
                         "%s: tensor %.200s: overlap: shares %zu bytes with tensor %.200s",
                         h->path, t->name, (size_t)(at - t->data), order[i - 1]->name);
        } else if (t->data > at) {
            st = HD_FAIL(h->err, HD_EFORMAT,
                         "%s: tensor %.200s: hole: %zu bytes before it belong to no tensor",
                         h->path, t->name, (size_t)(t->data - at));
        }
        at = t->data + t->bytes;
    }
    if (st == HD_OK && at != h->data + h->data_bytes) {
        st = HD_FAIL(h->err, HD_EFORMAT, "%s: trailing data: %zu bytes after the last tensor",
                     h->path, h->data_bytes - (size_t)(at - h->data));
    }
    free(order);
    return st;
}

static hd_status refuse_json(const header *h, const json_error_t *why) {
    switch (json_error_code(why)) {
    case json_error_out_of_memory:
        return HD_FAIL(h->err, HD_ENOMEM, "%s: no memory to parse the header", h->path);
    case json_error_stack_overflow:
        return HD_FAIL(h->err, HD_EFORMAT, "%s: header nesting is too deep", h->path);
    case json_error_duplicate_key:
        return HD_FAIL(h->err, HD_EFORMAT, "%s: duplicate tensor in the header: %s", h->path,
                       why->text);
    case json_error_null_character:
    case json_error_null_byte_in_key:
        return HD_FAIL(h->err, HD_EFORMAT, "%s: bad name in the header: %s", h->path,
                       why->text);
    default: /* jansson may have more codes than are handled here */
        return HD_FAIL(h->err, HD_EFORMAT, "%s: header not JSON: line %d column %d: %s",
                       h->path, why->line, why->column, why->text);
    }
}

/* Limits the memory that the parser can be made to allocate. */
static hd_status check_size(const header *h, const char *text, size_t n) {
    size_t braces = 0, commas = 0;
    for (size_t i = 0; i < n; i++) {
        braces += text[i] == '{';
        commas += text[i] == ',';
    }
    if (braces <= MAX_TENSORS + 2 && commas <= MAX_COMMAS) return HD_OK;
    return HD_FAIL(h->err, HD_EFORMAT,
                   "%s: too many tensors: %zu objects and %zu commas in the header, at most %d "
                   "tensors are read",
                   h->path, braces, commas, MAX_TENSORS);
}

/* file[8..] starts with a brace, so whatever parses is an object. */
static hd_status parse_header(header *h, hd_safetensors *out, const char *text, size_t n) {
    json_error_t why;
    HD_TRY(check_size(h, text, n));
    json_t *root = hd_json_read(text, n, JSON_REJECT_DUPLICATES, &why);
    h->reals = !root && json_error_code(&why) == json_error_numeric_overflow;
    if (h->reals) { /* parse again, to name the tensor in the error */
        json_error_t ignored;
        root =
            hd_json_read(text, n, JSON_REJECT_DUPLICATES | JSON_DECODE_INT_AS_REAL, &ignored);
    }
    if (!root) return refuse_json(h, &why);
    hd_status st = read_tensors(h, out, root);
    json_decref(root);
    if (st == HD_OK && h->reals) return refuse_json(h, &why);
    return st == HD_OK ? check_tiling(h, out) : st;
}

hd_status hd_safetensors_init(hd_safetensors *out, const uint8_t *file, size_t bytes,
                              const char *path, hd_err *err) {
    *out = (hd_safetensors){0};
    if (bytes < 8) {
        return HD_FAIL(err, HD_EFORMAT, "%s: file too short: %zu bytes, a header needs 8", path,
                       bytes);
    }
    HD_TRY(hd_refuse_lfs_pointer(file, bytes, path, err));
    uint64_t n = 0;
    for (int i = 0; i < 8; i++) n |= (uint64_t)file[i] << (8 * i);
    if (n < 2) {
        return HD_FAIL(err, HD_EFORMAT, "%s: header empty: its length is %llu", path,
                       (unsigned long long)n);
    }
    if (n > bytes - 8) {
        return HD_FAIL(err, HD_EFORMAT,
                       "%s: header past end: its length is %llu in a file of %zu bytes%s", path,
                       (unsigned long long)n, bytes,
                       n > MAX_HEADER_BYTES ? ", and header over 100000000 bytes" : "");
    }
    if (n > MAX_HEADER_BYTES) {
        return HD_FAIL(err, HD_EFORMAT, "%s: header over 100000000 bytes: its length is %llu",
                       path, (unsigned long long)n);
    }
    if (file[8] != '{') {
        return HD_FAIL(err, HD_EFORMAT, "%s: header not an object: it starts with byte 0x%02x",
                       path, file[8]);
    }
    header h = {.path = path,
                .data = file + 8 + (size_t)n,
                .data_bytes = bytes - 8 - (size_t)n,
                .err = err};
    return parse_header(&h, out, (const char *)file + 8, (size_t)n);
}

void hd_safetensors_deinit(hd_safetensors *s) {
    free(s->tensors);
    free(s->names);
    *s = (hd_safetensors){0};
}
