/* pickle.c - the stack machine: a stack of values, a memo, and cells that chain the items of
 * tuples, lists and dictionaries. All are arrays that grow with the pickle's own length, since
 * every instruction adds at most a few. */
#include "weights/torch/pickle.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

enum { MAX_VALUES = 1 << 24, NAME_BYTES = 256 };

/* One item: the index of its value, and of the next cell. */
typedef struct cell {
    int32_t value, next;
} cell;

typedef struct indices {
    int32_t *at;
    size_t n, cap;
} indices;

struct hd_pickle {
    hd_pickle_value *values;
    size_t n_values, cap_values;
    cell *cells;
    size_t n_cells, cap_cells;
    char **names; /* "module name", owned */
    size_t n_names, cap_names;
    indices stack, memo;
    const uint8_t *data;
    size_t at, bytes;
    int32_t root;
    bool ended;
    hd_err *err;
};

enum { MARK = -1, UNSET = -2 };

/* ---- growing ---- */

static hd_status refuse(hd_pickle *p, const char *why) {
    return HD_FAIL(p->err, HD_EFORMAT, "pickle: byte %zu: %s", p->at, why);
}

static hd_status grow(hd_pickle *p, void **array, size_t *cap, size_t n, size_t size) {
    if (n < *cap) return HD_OK;
    if (n >= MAX_VALUES) return refuse(p, "too many values");
    const size_t more = *cap ? 2 * *cap : 64;
    void *next = realloc(*array, more * size);
    if (!next)
        return HD_FAIL(p->err, HD_ENOMEM, "no memory for a pickle of %zu bytes", p->bytes);
    *array = next;
    *cap = more;
    return HD_OK;
}

/* Puts a new pointer back where its type is known. */
#define GROW(p, array, cap, n)                                   \
    do {                                                         \
        void *grown = (array);                                   \
        HD_TRY(grow((p), &grown, &(cap), (n), sizeof *(array))); \
        (array) = grown;                                         \
    } while (0)

static hd_status push_index(hd_pickle *p, int32_t i) {
    GROW(p, p->stack.at, p->stack.cap, p->stack.n);
    p->stack.at[p->stack.n++] = i;
    return HD_OK;
}

static hd_status push(hd_pickle *p, hd_pickle_value v) {
    GROW(p, p->values, p->cap_values, p->n_values);
    if (v.kind < HD_PICKLE_TUPLE || v.kind == HD_PICKLE_NAME) v.first = v.last = -1;
    p->values[p->n_values] = v;
    return push_index(p, (int32_t)p->n_values++);
}

static hd_status pop(hd_pickle *p, int32_t *out) {
    if (p->stack.n == 0 || p->stack.at[p->stack.n - 1] == MARK) {
        return refuse(p, "the stack is empty");
    }
    *out = p->stack.at[--p->stack.n];
    return HD_OK;
}

static hd_status append(hd_pickle *p, hd_pickle_value *to, int32_t value) {
    const size_t v = (size_t)(to - p->values);
    GROW(p, p->cells, p->cap_cells, p->n_cells);
    to = &p->values[v];
    const int32_t c = (int32_t)p->n_cells++;
    p->cells[c] = (cell){value, -1};
    if (to->last >= 0) p->cells[to->last].next = c;
    if (to->first < 0) to->first = c;
    to->last = c;
    to->n++;
    return HD_OK;
}

/* ---- reading ---- */

static hd_status take(hd_pickle *p, size_t n, const uint8_t **out) {
    if (n > p->bytes - p->at) return refuse(p, "ends early");
    *out = p->data + p->at;
    p->at += n;
    return HD_OK;
}

static hd_status take_number(hd_pickle *p, size_t bytes, uint64_t *out) {
    const uint8_t *b;
    HD_TRY(take(p, bytes, &b));
    *out = 0;
    for (size_t i = 0; i < bytes; i++) *out |= (uint64_t)b[i] << (8 * i);
    return HD_OK;
}

static hd_status push_bytes(hd_pickle *p, hd_pickle_kind kind, size_t width) {
    const uint8_t *b;
    uint64_t n;
    HD_TRY(take_number(p, width, &n));
    if (n > p->bytes - p->at) return refuse(p, "ends early");
    HD_TRY(take(p, (size_t)n, &b));
    return push(p, (hd_pickle_value){.kind = kind, .text = (const char *)b, .n = (size_t)n});
}

static hd_status push_int(hd_pickle *p, size_t width) {
    uint64_t n;
    HD_TRY(take_number(p, width, &n));
    const int64_t v = width == 4 ? (int64_t)(int32_t)(uint32_t)n : (int64_t)n;
    return push(p, (hd_pickle_value){.kind = HD_PICKLE_INT, .number = v});
}

/* LONG1: up to eight bytes in two's complement. */
static hd_status push_long(hd_pickle *p) {
    uint64_t n, v = 0;
    HD_TRY(take_number(p, 1, &n));
    if (n > sizeof v) return refuse(p, "a whole number of more than 64 bits");
    HD_TRY(take_number(p, (size_t)n, &v));
    const unsigned unused = n ? 64 - 8 * (unsigned)n : 0;
    if (n && unused && v >> (8 * n - 1)) v |= ~0ull << (8 * n);
    int64_t number;
    memcpy(&number, &v, sizeof number);
    return push(p, (hd_pickle_value){.kind = HD_PICKLE_INT, .number = number});
}

/* ---- names ---- */

static hd_status push_name(hd_pickle *p, const char *module, size_t m, const char *name,
                           size_t n) {
    if (m + n + 2 > NAME_BYTES) return refuse(p, "a name that is too long");
    GROW(p, p->names, p->cap_names, p->n_names);
    char *text = malloc(m + n + 2);
    if (!text) return HD_FAIL(p->err, HD_ENOMEM, "no memory for a name in a pickle");
    memcpy(text, module, m);
    text[m] = ' ';
    memcpy(text + m + 1, name, n);
    text[m + n + 1] = '\0';
    p->names[p->n_names++] = text;
    return push(p, (hd_pickle_value){.kind = HD_PICKLE_NAME, .text = text, .n = m + n + 1});
}

static hd_status take_line(hd_pickle *p, const char **line, size_t *n) {
    const uint8_t *end = memchr(p->data + p->at, '\n', p->bytes - p->at);
    if (!end) return refuse(p, "ends early");
    *line = (const char *)p->data + p->at;
    *n = (size_t)(end - p->data) - p->at;
    p->at += *n + 1;
    return HD_OK;
}

static hd_status global(hd_pickle *p) {
    const char *module, *name;
    size_t m, n;
    HD_TRY(take_line(p, &module, &m));
    HD_TRY(take_line(p, &name, &n));
    return push_name(p, module, m, name, n);
}

static hd_status stack_global(hd_pickle *p) {
    int32_t module, name;
    HD_TRY(pop(p, &name));
    HD_TRY(pop(p, &module));
    const hd_pickle_value *a = &p->values[module], *b = &p->values[name];
    if (a->kind != HD_PICKLE_TEXT || b->kind != HD_PICKLE_TEXT) {
        return refuse(p, "a name that is no text");
    }
    return push_name(p, a->text, a->n, b->text, b->n);
}

/* ---- containers ---- */

static const hd_pickle_value empty_tuple = {.kind = HD_PICKLE_TUPLE, .first = -1, .last = -1};

/* The last n values of the stack become the items of a new one. */
static hd_status push_items(hd_pickle *p, hd_pickle_kind kind, size_t n) {
    const size_t from = p->stack.n - n;
    hd_pickle_value v = empty_tuple;
    v.kind = kind;
    if (n > p->stack.n) return refuse(p, "the stack is empty");
    HD_TRY(push(p, v));
    const int32_t made = p->stack.at[--p->stack.n];
    for (size_t i = from; i < from + n; i++) {
        if (p->stack.at[i] == MARK) return refuse(p, "the stack is empty");
        HD_TRY(append(p, &p->values[made], p->stack.at[i]));
    }
    p->stack.n = from;
    return push_index(p, made);
}

/* Finds how many values lie above the last mark, which stays. */
static hd_status above_mark(hd_pickle *p, size_t *n) {
    for (*n = 0; *n < p->stack.n; ++*n) {
        if (p->stack.at[p->stack.n - 1 - *n] == MARK) return HD_OK;
    }
    return refuse(p, "no mark");
}

static hd_status tuple_from_mark(hd_pickle *p) {
    size_t n;
    HD_TRY(above_mark(p, &n));
    HD_TRY(push_items(p, HD_PICKLE_TUPLE, n));
    p->stack.at[p->stack.n - 2] = p->stack.at[p->stack.n - 1];
    p->stack.n--;
    return HD_OK;
}

/* Appends what is above the mark, or one or two values, to the container below. */
static hd_status extend(hd_pickle *p, hd_pickle_kind kind, size_t n, bool marked) {
    const size_t below = n + marked;
    if (marked) {
        HD_TRY(above_mark(p, &n));
    }
    const size_t need = marked ? n + 1 : below;
    if (need >= p->stack.n) return refuse(p, "the stack is empty");
    const size_t at = p->stack.n - need - 1;
    const int32_t to = p->stack.at[at];
    if (to == MARK || p->values[to].kind != kind) return refuse(p, "no container to add to");
    if (kind == HD_PICKLE_DICT && n % 2) return refuse(p, "a key without a value");
    for (size_t i = p->stack.n - n; i < p->stack.n; i++) {
        if (p->stack.at[i] == MARK) return refuse(p, "the stack is empty");
        HD_TRY(append(p, &p->values[to], p->stack.at[i]));
    }
    p->stack.n = at + 1;
    return HD_OK;
}

/* A call's state: what BUILD would give to the object. */
static hd_status build(hd_pickle *p) {
    int32_t state;
    HD_TRY(pop(p, &state));
    if (p->stack.n == 0 || p->stack.at[p->stack.n - 1] == MARK) {
        return refuse(p, "the stack is empty");
    }
    hd_pickle_value *v = &p->values[p->stack.at[p->stack.n - 1]];
    if (v->kind != HD_PICKLE_CALL || v->n != 2) return refuse(p, "a state without an object");
    return append(p, v, state);
}

/* ---- memo ---- */

static hd_status remember(hd_pickle *p, uint64_t i) {
    if (i > p->memo.n + MAX_VALUES || i >= MAX_VALUES) return refuse(p, "a memo too far away");
    if (p->stack.n == 0 || p->stack.at[p->stack.n - 1] == MARK) {
        return refuse(p, "the stack is empty");
    }
    if (i > p->bytes) return refuse(p, "a memo too far away"); /* more than instructions */
    while (p->memo.n <= i) {
        GROW(p, p->memo.at, p->memo.cap, p->memo.n);
        p->memo.at[p->memo.n++] = UNSET;
    }
    p->memo.at[i] = p->stack.at[p->stack.n - 1];
    return HD_OK;
}

static hd_status put(hd_pickle *p, size_t width) {
    uint64_t i;
    HD_TRY(take_number(p, width, &i));
    return remember(p, i);
}

static hd_status get(hd_pickle *p, size_t width) {
    uint64_t i;
    HD_TRY(take_number(p, width, &i));
    if (i >= p->memo.n || p->memo.at[i] == UNSET) return refuse(p, "nothing was remembered so");
    return push_index(p, p->memo.at[i]);
}

/* ---- the machine ---- */

static hd_status push_simple(hd_pickle *p, hd_pickle_kind kind, int64_t number) {
    hd_pickle_value v = empty_tuple;
    v.kind = kind;
    v.number = number;
    return push(p, v);
}

static hd_status refuse_opcode(hd_pickle *p, uint8_t op) {
    return HD_FAIL(p->err, HD_EFORMAT,
                   "pickle: byte %zu: instruction 0x%02x is not read here: it builds no plain "
                   "data",
                   p->at - 1, op);
}

static hd_status skip(hd_pickle *p, size_t n) {
    const uint8_t *ignored;
    return take(p, n, &ignored);
}

/* Instructions with the names and codes of Python's pickletools. */
static hd_status run_one(hd_pickle *p, uint8_t op) {
    switch (op) {
    case 0x80:
        return skip(p, 1); /* PROTO */
    case 0x95:
        return skip(p, 8); /* FRAME */
    case 'N':
        return push_simple(p, HD_PICKLE_NONE, 0); /* NONE */
    case 0x88:
        return push_simple(p, HD_PICKLE_BOOL, 1); /* NEWTRUE */
    case 0x89:
        return push_simple(p, HD_PICKLE_BOOL, 0); /* NEWFALSE */
    case 'J':
        return push_int(p, 4); /* BININT */
    case 'K':
        return push_int(p, 1); /* BININT1 */
    case 'M':
        return push_int(p, 2); /* BININT2 */
    case 0x8a:
        return push_long(p); /* LONG1 */
    case 0x8c:
        return push_bytes(p, HD_PICKLE_TEXT, 1); /* SHORT_BINUNICODE */
    case 'X':
        return push_bytes(p, HD_PICKLE_TEXT, 4); /* BINUNICODE */
    case 0x8d:
        return push_bytes(p, HD_PICKLE_TEXT, 8); /* BINUNICODE8 */
    case 'C':
        return push_bytes(p, HD_PICKLE_BYTES, 1); /* SHORT_BINBYTES */
    case 'B':
        return push_bytes(p, HD_PICKLE_BYTES, 4); /* BINBYTES */
    case 0x8e:
        return push_bytes(p, HD_PICKLE_BYTES, 8); /* BINBYTES8 */
    case 'c':
        return global(p); /* GLOBAL */
    case 0x93:
        return stack_global(p); /* STACK_GLOBAL */
    case '(':
        return push_index(p, MARK); /* MARK */
    case ')':
        return push_simple(p, HD_PICKLE_TUPLE, 0); /* EMPTY_TUPLE */
    case ']':
        return push_simple(p, HD_PICKLE_LIST, 0); /* EMPTY_LIST */
    case '}':
        return push_simple(p, HD_PICKLE_DICT, 0); /* EMPTY_DICT */
    case 't':
        return tuple_from_mark(p); /* TUPLE */
    case 0x85:
        return push_items(p, HD_PICKLE_TUPLE, 1); /* TUPLE1 */
    case 0x86:
        return push_items(p, HD_PICKLE_TUPLE, 2); /* TUPLE2 */
    case 0x87:
        return push_items(p, HD_PICKLE_TUPLE, 3); /* TUPLE3 */
    case 'a':
        return extend(p, HD_PICKLE_LIST, 1, false); /* APPEND */
    case 'e':
        return extend(p, HD_PICKLE_LIST, 0, true); /* APPENDS */
    case 's':
        return extend(p, HD_PICKLE_DICT, 2, false); /* SETITEM */
    case 'u':
        return extend(p, HD_PICKLE_DICT, 0, true); /* SETITEMS */
    case 'R':                                      /* REDUCE */
    case 0x81:
        return push_items(p, HD_PICKLE_CALL, 2); /* NEWOBJ */
    case 'b':
        return build(p); /* BUILD */
    case 0x94:
        return remember(p, p->memo.n); /* MEMOIZE */
    case 'q':
        return put(p, 1); /* BINPUT */
    case 'r':
        return put(p, 4); /* LONG_BINPUT */
    case 'h':
        return get(p, 1); /* BINGET */
    case 'j':
        return get(p, 4); /* LONG_BINGET */
    case '.':
        p->ended = true;
        return pop(p, &p->root); /* STOP */
    default:
        return refuse_opcode(p, op);
    }
}

static hd_status run(hd_pickle *p) {
    while (!p->ended) {
        if (p->at == p->bytes) return refuse(p, "ends early");
        const uint8_t op = p->data[p->at++];
        HD_TRY(run_one(p, op));
    }
    if (p->at != p->bytes) return refuse(p, "bytes after its end");
    return p->stack.n ? refuse(p, "values are left on the stack") : HD_OK;
}

hd_status hd_pickle_open(hd_pickle **out, const uint8_t *pickle, size_t n, hd_err *err) {
    *out = NULL;
    hd_pickle *p = calloc(1, sizeof *p);
    if (!p) return HD_FAIL(err, HD_ENOMEM, "no memory for a pickle");
    p->data = pickle;
    p->bytes = n;
    p->err = err;
    const hd_status st = run(p);
    if (st == HD_OK) {
        *out = p;
    } else {
        hd_pickle_close(p);
    }
    return st;
}

void hd_pickle_close(hd_pickle *p) {
    if (!p) return;
    for (size_t i = 0; i < p->n_names; i++) free(p->names[i]);
    free(p->names);
    free(p->values);
    free(p->cells);
    free(p->stack.at);
    free(p->memo.at);
    free(p);
}

/* ---- the tree ---- */

const hd_pickle_value *hd_pickle_root(const hd_pickle *p) {
    return &p->values[p->root];
}

const hd_pickle_value *hd_pickle_next(const hd_pickle *p, int32_t *cell_at) {
    if (*cell_at < 0) return NULL;
    const cell *c = &p->cells[*cell_at];
    *cell_at = c->next;
    return &p->values[c->value];
}

const hd_pickle_value *hd_pickle_item(const hd_pickle *p, const hd_pickle_value *v, size_t i) {
    int32_t at = v->kind >= HD_PICKLE_TUPLE && v->kind != HD_PICKLE_NAME ? v->first : -1;
    const hd_pickle_value *item = hd_pickle_next(p, &at);
    while (item && i-- > 0) item = hd_pickle_next(p, &at);
    return item;
}

const hd_pickle_value *hd_pickle_get(const hd_pickle *p, const hd_pickle_value *dict,
                                     const char *key) {
    int32_t at = dict->kind == HD_PICKLE_DICT ? dict->first : -1;
    for (;;) {
        const hd_pickle_value *k = hd_pickle_next(p, &at);
        const hd_pickle_value *v = hd_pickle_next(p, &at);
        if (!v || hd_pickle_is_text(k, key)) return v;
    }
}

bool hd_pickle_is_text(const hd_pickle_value *v, const char *text) {
    return v->kind == HD_PICKLE_TEXT && v->n == strlen(text) &&
           memcmp(v->text, text, v->n) == 0;
}

bool hd_pickle_is_name(const hd_pickle_value *v, const char *module, const char *name) {
    const size_t m = strlen(module), n = strlen(name);
    return v->kind == HD_PICKLE_NAME && v->n == m + 1 + n && memcmp(v->text, module, m) == 0 &&
           v->text[m] == ' ' && memcmp(v->text + m + 1, name, n) == 0;
}
