/* groups.c - what the front has of every attention group: mailboxes, and what is read of all of
 * them together. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "engine/engine_internal.h"

bool engine_mail_open(engine_mail *m, int32_t max_living) {
    const size_t n = (size_t)max_living;
    m->submitted = calloc(n, sizeof *m->submitted);
    m->cancelled = calloc(2 * n, sizeof *m->cancelled);
    return m->submitted && m->cancelled;
}

void engine_mail_close(engine_mail *m) {
    free(m->submitted);
    free(m->cancelled);
}

static hd_status count_loads(hd_engine *e, hd_err *err) {
    const int64_t n = (int64_t)e->spec->n_layers * e->spec->route.n_experts;
    if (!e->has_model) return HD_OK;
    if (n > INT32_MAX) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "loads of %lld experts", (long long)n);
    }
    e->n_experts = e->spec->route.n_experts;
    e->n_loads = (int32_t)n;
    return HD_OK;
}

static bool open_group(const hd_engine *e, engine_group *group, int32_t running) {
    group->idle = true;
    group->places = calloc((size_t)running, sizeof *group->places);
    group->loads = calloc((size_t)e->n_loads + 1, sizeof *group->loads);
    return group->places && group->loads && engine_mail_open(&group->mail, e->max_living);
}

hd_status engine_groups_open(hd_engine *e, int32_t running, hd_err *err) {
    const int32_t n = e->parallel.dp;
    HD_TRY(count_loads(e, err));
    e->groups = calloc((size_t)n, sizeof *e->groups);
    if (!e->groups) return HD_FAIL(err, HD_ENOMEM, "no memory for %d attention groups", n);
    e->n_groups = e->n_present = n;
    for (int32_t i = 0; i < n; i++) {
        if (open_group(e, &e->groups[i], running)) continue;
        return HD_FAIL(err, HD_ENOMEM, "no memory for the mail of %d requests", e->max_living);
    }
    return HD_OK;
}

void engine_groups_close(hd_engine *e) {
    for (int32_t i = 0; i < e->n_groups; i++) {
        free(e->groups[i].places);
        free(e->groups[i].loads);
        engine_mail_close(&e->groups[i].mail);
    }
    free(e->groups);
}

/* ---- reading ---- */

static void add_all(int64_t *to, const int64_t *from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] += from[i];
}

static void add_pages(hd_engine_stats *to, const hd_engine_stats *x) {
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        to->pages[l] += x->pages[l];
        to->pages_free[l] += x->pages_free[l];
        to->pages_cached[l] += x->pages_cached[l];
        to->host_pages[l] += x->host_pages[l];
        to->host_free[l] += x->host_free[l];
        to->host_saved[l] += x->host_saved[l];
        to->host_loaded[l] += x->host_loaded[l];
    }
}

static void add_kv_disk(hd_kv_disk_figures *to, const hd_kv_disk_figures *x) {
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        to->extents[g] += x->extents[g];
        to->pages[g] += x->pages[g];
        to->replaced[g] += x->replaced[g];
        to->written[g] += x->written[g];
        to->read[g] += x->read[g];
    }
    to->bytes += x->bytes;
    to->tokens += x->tokens;
    to->read_bytes += x->read_bytes;
    to->read_ns += x->read_ns;
    to->write_failed += x->write_failed;
    to->read_failed += x->read_failed;
    to->late += x->late;
    to->declined += x->declined;
}

static void add_experts(hd_expert_figures *to, const hd_expert_figures *x) {
    to->slots += x->slots;
    to->elsewhere += x->elsewhere;
    to->used += x->used;
    to->staged += x->staged;
    to->fetched += x->fetched;
    to->failed += x->failed;
    to->predicted += x->predicted;
    to->right += x->right;
    to->ahead += x->ahead;
    to->moved += x->moved;
    to->fetched_bytes += x->fetched_bytes;
    to->network_bytes += x->network_bytes;
    to->file_bytes += x->file_bytes;
    to->refused += x->refused;
    to->wait_ns += x->wait_ns;
    to->fetch_steps += x->fetch_steps;
    to->fetch_from = hd_max_i64(to->fetch_from, x->fetch_from);
    to->sent += x->sent;
    to->sent_rows += x->sent_rows;
    to->sent_ns += x->sent_ns;
    to->split_ns += x->split_ns;
    to->split_predicted_ns += x->split_predicted_ns;
}

/* Adds the counters of another group to those of the first. */
static void add_stats(hd_engine_stats *to, const hd_engine_stats *x) {
    to->waiting += x->waiting;
    to->running += x->running;
    to->max_running += x->max_running;
    to->steps += x->steps;
    to->rows += x->rows;
    to->finished += x->finished;
    to->retracted += x->retracted;
    add_all(to->drafted_at, x->drafted_at, HD_LEN(to->drafted_at));
    add_all(to->accepted_at, x->accepted_at, HD_LEN(to->accepted_at));
    to->prompt_tokens += x->prompt_tokens;
    to->cached_tokens += x->cached_tokens;
    to->host_cached_tokens += x->host_cached_tokens;
    to->rebuilt_windows += x->rebuilt_windows;
    to->rebuilt_rows += x->rebuilt_rows;
    to->output_tokens += x->output_tokens;
    add_pages(to, x);
    add_kv_disk(&to->kv_disk, &x->kv_disk);
    add_experts(&to->experts, &x->experts);
    to->step_ns += x->step_ns;
    to->host_ns += x->host_ns;
    to->micro_steps += x->micro_steps;
    if (to->last_step_ns < x->last_step_ns) to->last_step_ns = x->last_step_ns;
    to->kv_bytes += x->kv_bytes;
    to->hisparse.host_bytes += x->hisparse.host_bytes;
    to->hisparse.selected += x->hisparse.selected;
    to->hisparse.fetched += x->hisparse.fetched;
    to->activation_bytes += x->activation_bytes;
    to->audits += x->audits;
    if (to->audits_failed == 0)
        memcpy(to->audit_missed, x->audit_missed, sizeof to->audit_missed);
    to->audits_failed += x->audits_failed;
}

void hd_engine_read_stats(hd_engine *e, hd_engine_stats *out) {
    pthread_mutex_lock(&e->lock);
    *out = e->groups[0].stats;
    out->pauses = e->groups[0].rested_pauses;
    for (int32_t g = 1; g < e->n_groups; g++) {
        add_stats(out, &e->groups[g].stats);
        if (g < e->n_present && e->groups[g].rested_pauses < out->pauses)
            out->pauses = e->groups[g].rested_pauses;
    }
    out->living = e->n_living;
    out->fetching = e->n_fetching;
    out->paused = e->paused && out->pauses == e->pauses;
    out->paused_ns = out->paused ? e->paused_ns : 0;
    out->draining = e->draining;
    pthread_mutex_unlock(&e->lock);
}

int32_t hd_engine_read_group(hd_engine *e, int32_t group, hd_engine_stats *out) {
    if (group < 0 || group >= e->n_groups) return e->n_groups;
    pthread_mutex_lock(&e->lock);
    const engine_group *g = &e->groups[group];
    *out = g->stats;
    out->living = g->n_living;
    out->pauses = g->rested_pauses;
    out->paused = e->paused && out->pauses == e->pauses;
    out->draining = e->draining;
    pthread_mutex_unlock(&e->lock);
    return e->n_groups;
}

/* Every row was computed by the etp ranks of its experts. */
size_t hd_engine_read_experts(hd_engine *e, int64_t *load, size_t max, int32_t *n_experts) {
    const size_t n = (size_t)e->n_loads;
    if (n_experts) *n_experts = e->n_experts;
    if (n == 0 || max < n) return n;
    pthread_mutex_lock(&e->lock);
    memcpy(load, e->groups[0].loads, n * sizeof *load);
    for (int32_t g = 1; g < e->n_groups; g++) add_all(load, e->groups[g].loads, n);
    pthread_mutex_unlock(&e->lock);
    for (size_t i = 0; i < n; i++) load[i] /= e->parallel.etp;
    return n;
}
