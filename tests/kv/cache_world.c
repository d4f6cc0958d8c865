/* cache_world.c - see cache_world.h. */
#include "kv/cache_world.h"

#include "base/checked.h"
#include "base/philox.h"
#include "kv/cache_disk.h"

uint32_t cache_world_draw(world *w, uint32_t below) {
    return hd_philox_at(w->seed, 0, w->draws++).v[0] % below;
}

static uint64_t chain(uint64_t before, int32_t token) {
    return (before ^ (uint64_t)(token + 1)) * 0x9E3779B97F4A7C15u + 1;
}

static void move_page(world *w, const hd_page_copy *copy) {
    int32_t page_at = copy->device.n, host_at = copy->host.n;
    if (w->mover == MOVER_MIXES_NUMBERS) {
        page_at = copy->host.n % w->o.n_pages[copy->group];
        host_at = copy->device.n % w->o.n_host[copy->group];
    }
    content *page = &w->pages[copy->group][page_at], *host = &w->host[copy->group][host_at];
    if (copy->save) {
        *host = *page;
    } else {
        *page = *host;
    }
}

/* The late mover's copies of the turn before. */
static void move_late(world *w) {
    for (int32_t i = 0; i < w->n_late; i++) move_page(w, &w->late[i]);
    w->n_late = 0;
}

void cache_world_run_copies(world *w) {
    int32_t n;
    const hd_page_copy *copies = hd_cache_copies(w->cache, &n);
    for (int32_t i = 0; i < n; i++) {
        if (copies[i].save && w->mover == MOVER_SAVES_NOTHING) continue;
        if (copies[i].save && w->mover == MOVER_SAVES_LATE && w->n_late < MAX_PAGES) {
            w->late[w->n_late++] = copies[i];
        } else {
            move_page(w, &copies[i]);
        }
    }
    hd_cache_copied(w->cache);
}

/* A page that is not what a sequence would read. Of an honest mover there is none. */
static void notice(world *w) {
    if (w->mover == MOVER_HONEST) fail();
    w->wrong_reads++;
}

void cache_world_assert_readable(world *w, int32_t l) {
    uint64_t hash = w->salt[l] + (w->weights << 32);
    const int32_t n = w->done[l], size = w->o.page_tokens;
    const int32_t rebuilt = hd_cache_ends(w->cache, l).rebuilt;
    const int32_t first = rebuilt ? hd_cache_first(w->cache, l) : 0;
    for (int32_t p = 0; p < n; p++) {
        hash = chain(hash, w->tokens[l][p]);
        int32_t page = hd_cache_block_table(w->cache, l, HD_KV_FULL)[p / size];
        if (w->pages[HD_KV_FULL][page].token[p % size] != hash) notice(w);
        if (p < n - w->o.lookback || p < first || !w->o.lookback) continue;
        page = hd_cache_block_table(w->cache, l, HD_KV_WINDOW)[p / size];
        if (page < 0 || w->pages[HD_KV_WINDOW][page].token[p % size] != hash) notice(w);
    }
}

static content *window_at(world *w, int32_t l, int32_t pos) {
    const int32_t *table = hd_cache_block_table(w->cache, l, HD_KV_WINDOW);
    assert_true(table[pos / w->o.page_tokens] >= 0);
    return &w->pages[HD_KV_WINDOW][table[pos / w->o.page_tokens]];
}

/* Every layer with a tail that computes a position finds its own vectors in the window. Its result
 * is for the positions that the next layer computes, or that have an output. */
static void compute_tails(world *w, int32_t l, int32_t pos) {
    const hd_kv_ends ends = hd_cache_ends(w->cache, l);
    const hd_kv_tail *tail = &w->shape.tail;
    const int32_t size = w->o.page_tokens;
    uint8_t *layers = &window_at(w, l, pos)->layers[pos % size];
    *layers = 0;
    for (int32_t i = 0; i < tail->n; i++) {
        const bool last = i + 1 == tail->n;
        if (!hd_kv_is_needed(&w->shape, i, &ends, pos)) continue;
        *layers |= (uint8_t)(1 << i);
        if (last ? pos < hd_max_i32(ends.outputs, ends.rebuilt)
                 : !hd_kv_is_needed(&w->shape, i + 1, &ends, pos))
            continue;
        for (int32_t q = hd_max_i32(0, pos - tail->step); q < pos; q++) {
            if (!(window_at(w, l, q)->layers[q % size] >> i & 1)) notice(w);
        }
        w->tail_rows++;
    }
}

void cache_world_compute(world *w, int32_t l, int32_t end) {
    const int32_t size = w->o.page_tokens, rebuilt = hd_cache_ends(w->cache, l).rebuilt;
    uint64_t hash = w->salt[l] + (w->weights << 32);
    cache_world_run_copies(w);
    cache_world_assert_readable(w, l);
    for (int32_t p = 0; p < end; p++) {
        hash = chain(hash, w->tokens[l][p]);
        if (p < w->done[l]) continue;
        for (int group = 0; group < (w->o.lookback ? 2 : 1); group++) {
            int32_t page = hd_cache_block_table(w->cache, l, (hd_kv_group)group)[p / size];
            uint64_t *token = &w->pages[group][page].token[p % size];
            if (group == HD_KV_FULL && p < rebuilt && *token != hash) notice(w);
            *token = hash;
        }
        if (w->shape.tail.n) compute_tails(w, l, p);
    }
    w->done[l] = end;
    move_late(w);
    hd_cache_commit(w->cache, l, w->tokens[l], end);
}

void cache_world_open(world *w, const hd_cache_options *o, uint64_t seed) {
    memset(w, 0, sizeof *w);
    w->o = *o;
    w->seed = seed;
    assert_int_equal(hd_cache_open(&w->cache, o, NULL), HD_OK);
}

void cache_world_close(world *w) {
    for (int32_t l = 0; l < N_SEQS; l++) {
        if (w->open[l]) hd_cache_release(w->cache, l, false);
    }
    hd_cache_flush(w->cache);
    hd_cache_stats s = hd_cache_read_stats(w->cache);
    for (int group = 0; group < HD_N_KV_GROUPS; group++)
        assert_int_equal(s.free[group], s.pages[group]);
    assert_int_equal(s.nodes, 0);
    assert_int_equal(s.host[HD_KV_FULL] + s.host[HD_KV_WINDOW], 0);
    hd_cache_close(w->cache);
}

void cache_world_begin(world *w, int32_t l, int32_t hit) {
    assert_true(hit < w->n_tokens[l] && hit % w->o.page_tokens == 0);
    w->open[l] = true;
    w->done[l] = hd_cache_first(w->cache, l);
    w->rebuilds += w->done[l] < hit;
    assert_int_equal(hd_cache_ends(w->cache, l).rebuilt, w->done[l] < hit ? hit : 0);
    assert_int_equal(w->done[l], hit - (w->done[l] < hit ? w->o.rebuild : 0));
}

void cache_world_choose_text(world *w, int32_t l) {
    w->salt[l] = 1 + cache_world_draw(w, 2);
    w->n_tokens[l] = 1 + (int32_t)cache_world_draw(w, LONG - 1);
    /* Few first tokens and few changes make long common prefixes of all lengths. */
    for (int32_t i = 0; i < w->n_tokens[l]; i++) {
        w->tokens[l][i] =
            cache_world_draw(w, 40) == 0 ? (int32_t)cache_world_draw(w, 3) : i % 5;
    }
}

static void start(world *w, int32_t l) {
    int32_t hit;
    cache_world_choose_text(w, l);
    if (hd_cache_acquire(w->cache, l, w->salt[l], w->tokens[l], w->n_tokens[l], &hit) !=
        HD_OK) {
        return;
    }
    cache_world_begin(w, l, hit);
}

void cache_world_step(world *w) {
    const int32_t l = (int32_t)cache_world_draw(w, N_SEQS);
    if (!w->open[l]) {
        start(w, l);
    } else if (w->done[l] < w->n_tokens[l]) {
        int32_t end = w->done[l] + 1 + (int32_t)cache_world_draw(w, 30);
        if (end > w->n_tokens[l]) end = w->n_tokens[l];
        if (hd_cache_extend(w->cache, l, end) == HD_OK)
            cache_world_compute(w, l, end);
        else if (cache_world_draw(w, 3) == 0) {
            hd_cache_release(w->cache, l, false);
            w->open[l] = false;
        }
    } else if (w->n_tokens[l] < LONG && cache_world_draw(w, 3)) {
        w->tokens[l][w->n_tokens[l]++] = (int32_t)cache_world_draw(w, 3); /* it decodes */
    } else {
        hd_cache_release(w->cache, l, cache_world_draw(w, 2));
        w->open[l] = false;
    }
    if (cache_world_draw(w, 500) == 0) hd_cache_flush(w->cache);
    if (w->o.write_through) {
        for (int g = 0; g < HD_N_KV_GROUPS; g++) {
            hd_cache_save_unwritten(w->cache, (hd_kv_group)g, 3);
        }
    }
    if (cache_world_draw(w, 50) == 0) {
        hd_cache_set_costs(
            w->cache,
            &(hd_cache_costs){
                .token = 1, .page = {cache_world_draw(w, 3) * PAGE, cache_world_draw(w, 40)}
        });
    }
}
