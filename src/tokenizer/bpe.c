/* bpe.c - see bpe_internal.h: a plain loop for short pieces, a queue for long ones, and a
 * cache before both. The loop is quadratic in the piece, and fastest up to SHORT bytes; the
 * queue is O(n log n). An entry of the queue is (rank, position). It is stale if the pair at
 * that position no longer has that rank. */
#include "tokenizer/bpe_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "tokenizer/merge_queue_internal.h"

#define NO_RANK UINT32_MAX

enum {
    SHORT = 64,
    CACHE_KEY_BYTES = 24, /* longer words are not cached */
    CACHE_IDS = 8,
    CACHE_MAX_WORDS = 1 << 14,
    CACHE_MIN_TEXT = 1 << 10, /* a cache costs more than it saves in a shorter text */
};

typedef struct cached_word {
    uint64_t key[CACHE_KEY_BYTES / 8];
    uint8_t n_bytes, n_ids; /* n_bytes 0: empty */
    int32_t ids[CACHE_IDS];
} cached_word;

/* A token of a long piece, in a list linked by positions. */
typedef struct symbol {
    int32_t id;
    uint32_t rank; /* of the merge with the next symbol, NO_RANK for none */
    uint32_t previous, next;
} symbol;

struct text_bpe_scratch {
    cached_word *cache;
    uint32_t cache_mask;
    symbol *symbols;
    size_t symbols_cap;
    text_merge_queue queue;
};

static inline uint32_t pair_hash(int32_t left, int32_t right) {
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    return (uint32_t)((key * 0x9e3779b97f4a7c15u) >> 32);
}

/* Returns the slot that holds the pair, or the empty slot for it. */
static inline uint32_t find_slot(const text_bpe *b, int32_t left, int32_t right) {
    uint32_t i = pair_hash(left, right) & b->mask;
    while (b->slots[i].left != TEXT_NO_ID &&
           !(b->slots[i].left == left && b->slots[i].right == right)) {
        i = (i + 1) & b->mask;
    }
    return i;
}

static inline uint32_t pair_rank(const text_bpe *b, int32_t left, int32_t right) {
    const text_merge *m = &b->slots[find_slot(b, left, right)];
    return m->left == TEXT_NO_ID ? NO_RANK : m->rank;
}

hd_status text_bpe_open(text_bpe *b, int32_t n_merges, int32_t n_ids, hd_err *err) {
    uint32_t n_slots = 16;
    while (n_slots < 2 * (uint32_t)n_merges) n_slots *= 2;
    b->mask = n_slots - 1;
    b->n_ids = n_ids;
    b->n_merges = 0;
    b->slots = malloc(n_slots * sizeof *b->slots);
    b->result = malloc(((size_t)n_merges + 1) * sizeof *b->result);
    b->made_by = malloc(((size_t)n_ids + 1) * sizeof *b->made_by);
    b->byte_pair_rank = malloc(65536 * sizeof *b->byte_pair_rank);
    if (!b->slots || !b->result || !b->made_by || !b->byte_pair_rank) {
        text_bpe_close(b);
        return HD_FAIL(err, HD_ENOMEM, "no memory for %d merges", (int)n_merges);
    }
    for (uint32_t i = 0; i < n_slots; i++) b->slots[i] = (text_merge){.left = TEXT_NO_ID};
    for (int32_t i = 0; i < n_ids; i++) b->made_by[i] = -1;
    return HD_OK;
}

void text_bpe_close(text_bpe *b) {
    free(b->slots);
    free(b->result);
    free(b->made_by);
    free(b->byte_pair_rank);
    *b = (text_bpe){0};
}

bool text_bpe_add(text_bpe *b, int32_t left, int32_t right, int32_t result) {
    uint32_t slot = find_slot(b, left, right);
    if (b->slots[slot].left != TEXT_NO_ID) return false;
    b->slots[slot] = (text_merge){left, right, (uint32_t)b->n_merges};
    b->result[b->n_merges] = result;
    if (b->made_by[result] < 0) b->made_by[result] = (int32_t)slot;
    b->n_merges++;
    return true;
}

void text_bpe_finish(text_bpe *b) {
    for (int32_t i = 0; i < 65536; i++) {
        b->byte_pair_rank[i] = pair_rank(b, b->byte_id[i >> 8], b->byte_id[i & 255]);
    }
}

hd_status text_bpe_scratch_open(text_bpe_scratch **out, size_t text_bytes, hd_err *err) {
    text_bpe_scratch *s = calloc(1, sizeof *s);
    *out = s;
    if (!s) return HD_FAIL(err, HD_ENOMEM, "no memory to merge tokens");
    if (text_bytes < CACHE_MIN_TEXT) return HD_OK;
    uint32_t words = 64;
    while (words < CACHE_MAX_WORDS && words < text_bytes / 8) words *= 2;
    s->cache = calloc(
        words, sizeof *s->cache); /* without memory for it, words are merged every time */
    s->cache_mask = words - 1;
    return HD_OK;
}

void text_bpe_scratch_close(text_bpe_scratch *s) {
    if (!s) return;
    free(s->cache);
    free(s->symbols);
    text_merge_queue_deinit(&s->queue);
    free(s);
}

/* Merges ids of a piece of n <= SHORT bytes in place. Returns how many tokens remain. */
static int32_t merge_short(const text_bpe *b, const uint8_t *piece, int32_t n, int32_t *ids) {
    uint32_t rank[SHORT]; /* of the pair (i, i + 1); the last has none */
    for (int32_t i = 0; i < n; i++) ids[i] = b->byte_id[piece[i]];
    for (int32_t i = 0; i + 1 < n; i++) {
        rank[i] = b->byte_pair_rank[piece[i] << 8 | piece[i + 1]];
    }
    while (n > 1) {
        int32_t best = 0;
        for (int32_t i = 1; i + 1 < n; i++) {
            if (rank[i] < rank[best]) best = i;
        }
        if (rank[best] == NO_RANK) break;
        ids[best] = b->result[rank[best]];
        n--;
        for (int32_t i = best + 1; i < n; i++) ids[i] = ids[i + 1];
        for (int32_t i = best; i + 1 < n; i++) rank[i] = rank[i + 1];
        if (best + 1 < n) rank[best] = pair_rank(b, ids[best], ids[best + 1]);
        if (best > 0) rank[best - 1] = pair_rank(b, ids[best - 1], ids[best]);
    }
    return n;
}

static bool reserve_symbols(text_bpe_scratch *s, size_t n) {
    if (n <= s->symbols_cap) return true;
    size_t bytes;
    if (!hd_mul_size(n, sizeof *s->symbols, &bytes)) return false;
    free(s->symbols);
    s->symbols = malloc(bytes);
    s->symbols_cap = s->symbols ? n : 0;
    return s->symbols != NULL;
}

/* Sets the rank of the pair that starts at position `at`, and queues it if it can be merged. */
static bool queue_pair(const text_bpe *b, text_bpe_scratch *s, uint32_t at, uint32_t end) {
    symbol *now = &s->symbols[at];
    now->rank = now->next < end ? pair_rank(b, now->id, s->symbols[now->next].id) : NO_RANK;
    return now->rank == NO_RANK || text_merge_queue_push(&s->queue, now->rank, at);
}

static bool merge_symbols(const text_bpe *b, text_bpe_scratch *s, uint32_t end) {
    uint32_t rank, at;
    while (text_merge_queue_pop(&s->queue, &rank, &at)) {
        symbol *now = &s->symbols[at];
        if (now->rank != rank) continue; /* stale; NO_RANK is never queued */
        symbol *gone = &s->symbols[now->next];
        now->id = b->result[now->rank];
        now->next = gone->next;
        gone->rank = NO_RANK;
        if (now->next < end) s->symbols[now->next].previous = at;
        if (!queue_pair(b, s, at, end)) return false;
        if (at > 0 && !queue_pair(b, s, now->previous, end)) return false;
    }
    return true;
}

static hd_status encode_long(const text_bpe *b, text_bpe_scratch *s, const uint8_t *piece,
                             size_t n, hd_ids *out, hd_err *err) {
    assert(n < UINT32_MAX);
    bool fine =
        reserve_symbols(s, n) && text_merge_queue_start(&s->queue, n, (size_t)b->n_merges);
    for (uint32_t i = 0; fine && i < n; i++) {
        s->symbols[i] = (symbol){b->byte_id[piece[i]], NO_RANK, i - 1, i + 1};
        if (i + 1 == n) break;
        s->symbols[i].rank = b->byte_pair_rank[piece[i] << 8 | piece[i + 1]];
        if (s->symbols[i].rank == NO_RANK) continue;
        fine = text_merge_queue_push(&s->queue, s->symbols[i].rank, i);
    }
    if (!fine || !merge_symbols(b, s, (uint32_t)n)) {
        return HD_FAIL(err, HD_ENOMEM, "no memory to merge a piece of %zu bytes", n);
    }
    for (uint32_t i = 0; i < n; i = s->symbols[i].next) {
        HD_TRY(hd_ids_push(out, s->symbols[i].id, err));
    }
    return HD_OK;
}

static uint32_t word_hash(const uint64_t *key, size_t n) {
    uint64_t h = (key[0] ^ n) * 0x9e3779b97f4a7c15u;
    h = (h ^ h >> 32 ^ key[1]) * 0xc2b2ae3d27d4eb4fu;
    h = (h ^ h >> 29 ^ key[2]) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(h >> 32);
}

hd_status text_bpe_encode(const text_bpe *b, text_bpe_scratch *s, const uint8_t *piece,
                          size_t n, hd_ids *out, hd_err *err) {
    if (n > SHORT) return encode_long(b, s, piece, n, out, err);
    int32_t ids[SHORT];
    if (n == 1) return hd_ids_push(out, b->byte_id[piece[0]], err);
    if (!s->cache || n > CACHE_KEY_BYTES) {
        int32_t count = merge_short(b, piece, (int32_t)n, ids);
        return hd_ids_append(out, ids, (size_t)count, err);
    }
    uint64_t key[CACHE_KEY_BYTES / 8] = {0};
    memcpy(key, piece, n);
    cached_word *word = &s->cache[word_hash(key, n) & s->cache_mask];
    if (word->n_bytes == n && memcmp(word->key, key, sizeof key) == 0) {
        return hd_ids_append(out, word->ids, word->n_ids, err);
    }
    int32_t count = merge_short(b, piece, (int32_t)n, ids);
    if (count <= CACHE_IDS) {
        memcpy(word->key, key, sizeof key);
        memcpy(word->ids, ids, (size_t)count * sizeof *ids);
        word->n_bytes = (uint8_t)n;
        word->n_ids = (uint8_t)count;
    }
    return hd_ids_append(out, ids, (size_t)count, err);
}
