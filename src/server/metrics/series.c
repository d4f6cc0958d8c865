/* series.c - single values of /metrics: one table of series with their names under each
 * prefix, and how each value is read. */
#include "base/log.h"
#include "base/progress.h"
#include "server/metrics/metrics_internal.h"

double metrics_seconds(int64_t ns) {
    return (double)ns * 1e-9;
}

static int64_t page_tokens_of(const metrics_view *v, int pool, const int32_t *pages) {
    return (int64_t)pages[pool] * v->e.page_tokens;
}

int64_t metrics_used_pages(const metrics_view *v, int pool) {
    return v->e.pages[pool] - v->e.pages_free[pool] - v->e.pages_cached[pool];
}

static double running(const metrics_view *v) {
    return v->e.running;
}
static double waiting(const metrics_view *v) {
    return v->e.waiting;
}
static double living(const metrics_view *v) {
    return v->e.living;
}
static double living_requests(const metrics_view *v) {
    return v->from->living_requests;
}
static double audits(const metrics_view *v) {
    return (double)v->e.audits;
}
static double audits_failed(const metrics_view *v) {
    return (double)v->e.audits_failed;
}
static double rank_failures(const metrics_view *v) {
    return (double)v->e.rank_failures;
}
static double ranks_lost(const metrics_view *v) {
    return v->e.ranks_lost;
}
static double rebalance_plans(const metrics_view *v) {
    return (double)v->e.rebalance.plans;
}
static double rebalance_interrupted(const metrics_view *v) {
    return (double)v->e.rebalance.interrupted;
}
static double expert_moves(const metrics_view *v) {
    return (double)v->e.rebalance.moves;
}
static double expert_move_bytes(const metrics_view *v) {
    return v->e.rebalance.bytes;
}
static double rank_balancedness(const metrics_view *v) {
    return v->e.rebalance.on ? v->e.rebalance.balancedness : 1;
}
static double rank_balancedness_at_start(const metrics_view *v) {
    return v->e.rebalance.on ? v->e.rebalance.at_start : 1;
}
static double rebalance_looks(const metrics_view *v) {
    return (double)v->e.rebalance.looks;
}
static double rank_balancedness_bound(const metrics_view *v) {
    return v->e.rebalance.on ? v->e.rebalance.bound : 1;
}
static double single_copies(const metrics_view *v) {
    return v->e.rebalance.single_copies;
}
static double expert_slots(const metrics_view *v) {
    return v->e.experts.slots;
}
static double experts_elsewhere(const metrics_view *v) {
    return v->e.experts.elsewhere;
}
static double experts_used(const metrics_view *v) {
    return (double)v->e.experts.used;
}
static double experts_staged(const metrics_view *v) {
    return (double)v->e.experts.staged;
}
static double experts_fetched(const metrics_view *v) {
    return (double)v->e.experts.fetched;
}
static double expert_fetch_bytes(const metrics_view *v) {
    return (double)v->e.experts.fetched_bytes;
}
static double experts_predicted(const metrics_view *v) {
    return (double)v->e.experts.predicted;
}
static double experts_predicted_right(const metrics_view *v) {
    return (double)v->e.experts.right;
}
static double experts_fetched_ahead(const metrics_view *v) {
    return (double)v->e.experts.ahead;
}
static double expert_moves_to_device(const metrics_view *v) {
    return (double)v->e.experts.moved;
}
static double expert_fetches_failed(const metrics_view *v) {
    return (double)v->e.experts.failed;
}
static double expert_fetch_steps(const metrics_view *v) {
    return (double)v->e.experts.fetch_steps;
}
static double expert_fetch_from(const metrics_view *v) {
    return (double)v->e.experts.fetch_from;
}
static double experts_sent(const metrics_view *v) {
    return (double)v->e.experts.sent;
}
static double expert_rows_sent(const metrics_view *v) {
    return (double)v->e.experts.sent_rows;
}
static double expert_sent_seconds(const metrics_view *v) {
    return (double)v->e.experts.sent_ns * 1e-9;
}
static double expert_split_seconds(const metrics_view *v) {
    return (double)v->e.experts.split_ns * 1e-9;
}
static double expert_split_predicted(const metrics_view *v) {
    return (double)v->e.experts.split_predicted_ns * 1e-9;
}
static double expert_network_bytes(const metrics_view *v) {
    return (double)v->e.experts.network_bytes;
}
static double expert_file_bytes(const metrics_view *v) {
    return (double)v->e.experts.file_bytes;
}
static double expert_readers_refused(const metrics_view *v) {
    return (double)v->e.experts.refused;
}
static double expert_wait_seconds(const metrics_view *v) {
    return (double)v->e.experts.wait_ns * 1e-9;
}
static double hisparse_rows(const metrics_view *v) {
    return v->e.hisparse.rows;
}
static double hisparse_bytes(const metrics_view *v) {
    return (double)v->e.hisparse.host_bytes;
}
static double hisparse_selected(const metrics_view *v) {
    return (double)v->e.hisparse.selected;
}
static double hisparse_fetched(const metrics_view *v) {
    return (double)v->e.hisparse.fetched;
}
static double engram_pieces(const metrics_view *v) {
    return (double)v->e.engram.pieces;
}
static double engram_resident(const metrics_view *v) {
    return (double)v->e.engram.resident;
}
static double engram_read_bytes(const metrics_view *v) {
    return (double)v->e.engram.read_bytes;
}
static double engram_skipped(const metrics_view *v) {
    return (double)v->e.engram.skipped;
}
static double paused(const metrics_view *v) {
    return v->e.paused;
}

static double paused_seconds(const metrics_view *v) {
    return v->e.paused ? metrics_seconds(hd_now_ns() - v->e.paused_ns) : 0;
}
static double throughput(const metrics_view *v) {
    return v->from->tokens_per_s;
}
static double prompt_tokens(const metrics_view *v) {
    return (double)v->e.prompt_tokens;
}
static double output_tokens(const metrics_view *v) {
    return (double)v->e.output_tokens;
}
static double cached_tokens(const metrics_view *v) {
    return (double)v->e.cached_tokens;
}
static double hit_rate(const metrics_view *v) {
    return v->e.prompt_tokens ? (double)v->e.cached_tokens / (double)v->e.prompt_tokens : 0;
}
static double requests(const metrics_view *v) {
    return (double)atomic_load(&v->m->requests);
}
static double aborted(const metrics_view *v) {
    return (double)atomic_load(&v->m->aborted);
}
static double retracted(const metrics_view *v) {
    return (double)v->e.retracted;
}
static double micro_steps(const metrics_view *v) {
    return (double)v->e.micro_steps;
}

static double steps(const metrics_view *v) {
    return (double)v->e.steps;
}
static double rows(const metrics_view *v) {
    return (double)v->e.rows;
}
static double kv_total(const metrics_view *v) {
    return (double)page_tokens_of(v, HD_KV_FULL, v->e.pages);
}
static double kv_used(const metrics_view *v) {
    return (double)metrics_used_pages(v, HD_KV_FULL) * v->e.page_tokens;
}
static double kv_free(const metrics_view *v) {
    return (double)page_tokens_of(v, HD_KV_FULL, v->e.pages_free);
}
static double kv_evictable(const metrics_view *v) {
    return (double)page_tokens_of(v, HD_KV_FULL, v->e.pages_cached);
}
static double usage(const metrics_view *v) {
    const int32_t all = v->e.pages[HD_KV_FULL];
    return all ? (double)metrics_used_pages(v, HD_KV_FULL) / all : 0;
}
static double window_usage(const metrics_view *v) {
    const int32_t all = v->e.pages[HD_KV_WINDOW];
    return all ? (double)metrics_used_pages(v, HD_KV_WINDOW) / all : 0;
}
static double drafts(const metrics_view *v) {
    return (double)v->e.drafted_at[0];
}
static int64_t sum_places(const int64_t *at) {
    int64_t n = 0;
    for (int32_t i = 0; i < HD_MAX_DRAFTS; i++) n += at[i];
    return n;
}
static double draft_tokens(const metrics_view *v) {
    return (double)sum_places(v->e.drafted_at);
}
static double accepted_tokens(const metrics_view *v) {
    return (double)sum_places(v->e.accepted_at);
}
static double accept_length(const metrics_view *v) {
    return drafts(v) > 0 ? 1 + accepted_tokens(v) / drafts(v) : 1;
}
static double accept_rate(const metrics_view *v) {
    return draft_tokens(v) > 0 ? accepted_tokens(v) / draft_tokens(v) : 0;
}
static double balancedness(const metrics_view *v) {
    return metrics_balancedness(v->load, v->n_load, v->n_experts);
}
static double page_size(const metrics_view *v) {
    return v->e.page_tokens;
}
static double context_length(const metrics_view *v) {
    return v->e.max_context;
}
static double max_running(const metrics_view *v) {
    return v->e.max_running;
}
static double weight_bytes(const metrics_view *v) {
    return (double)v->e.weight_bytes;
}
static double kv_bytes(const metrics_view *v) {
    return (double)v->e.kv_bytes;
}
static double weight_gb(const metrics_view *v) {
    return (double)v->e.weight_bytes / 1e9;
}
static double kv_gb(const metrics_view *v) {
    return (double)v->e.kv_bytes / 1e9;
}
static double load_seconds(const metrics_view *v) {
    return v->from->load_seconds;
}
static double connections(const metrics_view *v) {
    return v->h.connections;
}
static double calls(const metrics_view *v) {
    return v->h.calls;
}
static double held_bytes(const metrics_view *v) {
    return (double)v->h.held_bytes;
}
static double streams(const metrics_view *v) {
    return v->h.streams;
}
static double cut_off(const metrics_view *v) {
    return (double)v->h.cut_off;
}
static double gone(const metrics_view *v) {
    return (double)v->h.gone;
}
static double handshakes_failed(const metrics_view *v) {
    return (double)v->h.handshakes_failed;
}

static double timed_out(const metrics_view *v) {
    return (double)v->h.timed_out;
}
static double refused(const metrics_view *v) {
    return (double)v->h.refused;
}
static double log_dropped(const metrics_view *v) {
    (void)v;
    return (double)hd_log_dropped();
}
static double accepted(const metrics_view *v) {
    return (double)v->h.accepted;
}
static double refused_connections(const metrics_view *v) {
    return (double)v->h.refused_connections;
}
static double received_bytes(const metrics_view *v) {
    return (double)v->h.body_bytes;
}
static double sent_bytes(const metrics_view *v) {
    return (double)v->h.sent_bytes;
}
static double resident(const metrics_view *v) {
    return (double)v->resident_bytes;
}
static double files(const metrics_view *v) {
    return v->open_files;
}
static double weight_updates(const metrics_view *v) {
    return (double)v->e.weight_updates;
}

static double released_bytes(const metrics_view *v) {
    return (double)v->e.released_bytes;
}

static double weights_lost(const metrics_view *v) {
    return v->e.weights_lost;
}

static double route_rows(const metrics_view *v) {
    return (double)v->e.replay_rows[HD_REPLAY_EXPERTS];
}

static double route_bytes(const metrics_view *v) {
    return (double)v->e.replay_bytes[HD_REPLAY_EXPERTS];
}

static double indexer_rows(const metrics_view *v) {
    return (double)v->e.replay_rows[HD_REPLAY_KEYS];
}

static double indexer_bytes(const metrics_view *v) {
    return (double)v->e.replay_bytes[HD_REPLAY_KEYS];
}

static double weight_update_begun(const metrics_view *v) {
    return v->from->update_begun;
}
static double weight_update_seconds(const metrics_view *v) {
    return metrics_seconds(v->e.weight_updates_ns);
}

static double started(const metrics_view *v) {
    return v->m->start_time;
}

typedef struct series {
    const char *own, *sglang, *vllm; /* names without prefix; NULL: not under this prefix */
    const char *type, *help;
    double (*value)(const metrics_view *v);
} series;

/* clang-format off */
static const series all_series[] = {
    {"num_running_reqs", "num_running_reqs", "num_requests_running", "gauge", "choices being computed", running},
    {"num_queue_reqs", "num_queue_reqs", "num_requests_waiting", "gauge", "choices that wait", waiting},
    {"living_answers", NULL, NULL, "gauge", "unfinished choices, also while a step is stuck", living},
    {"living_requests", NULL, NULL, "gauge", "requests with unfinished choices", living_requests},
    {"max_running_reqs", NULL, NULL, "gauge", "most choices computed at once", max_running},
    {"paused", NULL, "engine_sleep_state", "gauge", "1 while generation is paused", paused},
    {"paused_seconds", NULL, NULL, "gauge", "how long the pause lasts that nobody has ended; 0: there is none", paused_seconds},
    {"released_bytes", NULL, NULL, "gauge", "memory that was given back to the system", released_bytes},
    {"weights_lost", NULL, NULL, "gauge", "tensors to be updated before any request can run", weights_lost},
    {"route_rows_total", NULL, NULL, "counter", "positions whose experts were given to requests", route_rows},
    {"route_bytes", NULL, NULL, "gauge", "host memory that keeps the experts of positions", route_bytes},
    {"indexer_rows_total", NULL, NULL, "counter", "positions whose indexer choices were given to requests", indexer_rows},
    {"indexer_bytes", NULL, NULL, "gauge", "host memory that keeps the indexer choices of positions", indexer_bytes},
    {"weight_updates_total", NULL, NULL, "counter", "how often weights were replaced", weight_updates},
    {"weight_update_begun", NULL, NULL, "gauge", "1 while an update in parts waits for its end", weight_update_begun},
    {"weight_update_seconds_total", NULL, NULL, "counter", "time without steps in which weights were copied", weight_update_seconds},
    {"gen_throughput", "gen_throughput", NULL, "gauge", "output tokens per second, lately", throughput},
    {"prompt_tokens_total", "prompt_tokens_total", "prompt_tokens_total", "counter", "prompt tokens of admitted requests", prompt_tokens},
    {"generation_tokens_total", "generation_tokens_total", "generation_tokens_total", "counter", "tokens generated", output_tokens},
    {"cached_tokens_total", "cached_tokens_total", "prefix_cache_hits_total", "counter", "prompt tokens found in the prefix cache", cached_tokens},
    {"prefix_cache_queries_total", NULL, "prefix_cache_queries_total", "counter", "prompt tokens looked up in the prefix cache", prompt_tokens},
    {"cache_hit_rate", "cache_hit_rate", NULL, "gauge", "cached share of all prompt tokens so far", hit_rate},
    {"num_requests_total", "num_requests_total", NULL, "counter", "requests that ended", requests},
    {"num_aborted_requests_total", "num_aborted_requests_total", NULL, "counter", "requests that were aborted", aborted},
    {"num_retracted_requests_total", "num_retracted_requests_total", "num_preemptions_total", "counter", "times a request lost its place for others", retracted},
    {"steps_total", NULL, NULL, "counter", "forward passes", steps},
    {"micro_batch_steps_total", NULL, NULL, "counter", "of them in several micro-batches, which overlap exchanges", micro_steps},
    {"step_rows_total", NULL, NULL, "counter", "rows in them", rows},
    {"max_total_num_tokens", "max_total_num_tokens", NULL, "gauge", "tokens the KV pools hold", kv_total},
    {"kv_used_tokens", "kv_used_tokens", NULL, "gauge", "tokens held by living requests", kv_used},
    {NULL, "num_used_tokens", NULL, "gauge", "tokens held by living requests", kv_used},
    {"kv_available_tokens", "kv_available_tokens", NULL, "gauge", "tokens free", kv_free},
    {"kv_evictable_tokens", "kv_evictable_tokens", NULL, "gauge", "tokens cached and given up on demand", kv_evictable},
    {"token_usage", "token_usage", "kv_cache_usage_perc", "gauge", "used share of the KV pool, 0 to 1", usage},
    {"window_usage", "swa_token_usage", NULL, "gauge", "used share of the window pool, 0 to 1", window_usage},
    {"spec_decode_num_drafts_total", "spec_verify_calls_total", "spec_decode_num_drafts_total", "counter", "steps of a choice with drafts", drafts},
    {"spec_decode_num_draft_tokens_total", NULL, "spec_decode_num_draft_tokens_total", "counter", "draft tokens", draft_tokens},
    {"spec_decode_num_accepted_tokens_total", NULL, "spec_decode_num_accepted_tokens_total", "counter", "draft tokens that stood", accepted_tokens},
    {"spec_accept_length", "spec_accept_length", NULL, "gauge", "tokens per step of a choice with drafts", accept_length},
    {"spec_accept_rate", "spec_accept_rate", NULL, "gauge", "share of draft tokens that were accepted", accept_rate},
    {"expert_balancedness", "eplb_balancedness", NULL, "gauge", "mean load of experts over the largest, averaged over layers", balancedness},
    {"page_size", "page_size", NULL, "gauge", "tokens of a page", page_size},
    {"context_len", "context_len", NULL, "gauge", "most tokens of one choice, prompt and output", context_length},
    {"weight_memory_usage_bytes", NULL, NULL, "gauge", "memory of weights", weight_bytes},
    {"kv_cache_memory_usage_bytes", NULL, NULL, "gauge", "memory of KV pools", kv_bytes},
    {NULL, "weight_memory_usage_gb", NULL, "gauge", "10^9 bytes of weights", weight_gb},
    {NULL, "kv_cache_memory_usage_gb", NULL, "gauge", "10^9 bytes of KV pools", kv_gb},
    {"audits_total", NULL, NULL, "counter", "looks at an idle engine: is every page and slot back", audits},
    {"audits_failed_total", NULL, NULL, "counter", "audits that missed some, and took all back", audits_failed},
    {"rank_failures_total", NULL, NULL, "counter", "steps given up because a rank failed", rank_failures},
    {"ranks_lost", NULL, NULL, "gauge", "1 if restarts of failed ranks were of no use", ranks_lost},
    {"rebalance_plans_total", NULL, NULL, "counter", "plans of experts' places that were carried out", rebalance_plans},
    {"rebalance_interrupted_total", NULL, NULL, "counter", "plans given up; the places before stayed in force", rebalance_interrupted},
    {"expert_moves_total", NULL, NULL, "counter", "experts copied to another rank", expert_moves},
    {"expert_move_bytes_total", NULL, NULL, "counter", "bytes of them", expert_move_bytes},
    {"rank_balancedness", NULL, NULL, "gauge", "mean rows of ranks over the most, averaged over MoE layers; 1: not watched", rank_balancedness},
    {"rank_balancedness_bound", NULL, NULL, "gauge", "no places of experts give more", rank_balancedness_bound},
    {"rank_balancedness_at_start", NULL, NULL, "gauge", "the places of experts at the start would have given this for the same rows", rank_balancedness_at_start},
    {"rebalance_looks_total", NULL, NULL, "counter", "looks at the ranks' rows", rebalance_looks},
    {"experts_with_one_copy", NULL, NULL, "gauge", "experts of all layers that one slot holds; 0: not watched", single_copies},
    {"experts_elsewhere", NULL, NULL, "gauge", "experts that ranks do not hold: they are in files or other ranks", experts_elsewhere},
    {"expert_slots", NULL, NULL, "gauge", "how many of them can be staged at once", expert_slots},
    {"experts_used_total", NULL, NULL, "counter", "such experts that layers computed with", experts_used},
    {"experts_staged_total", NULL, NULL, "counter", "those of them that were staged, or on their way, already", experts_staged},
    {"experts_fetched_total", NULL, NULL, "counter", "experts read from files or copied from other ranks", experts_fetched},
    {"expert_fetch_bytes_total", NULL, NULL, "counter", "bytes of them", expert_fetch_bytes},
    {"expert_network_bytes_total", NULL, NULL, "counter", "bytes of them that ranks of other hosts sent", expert_network_bytes},
    {"expert_file_bytes_total", NULL, NULL, "counter", "bytes of them read from files since a rank of another host did not send them", expert_file_bytes},
    {"expert_readers_refused_total", NULL, NULL, "counter", "connections of other hosts that sent what is no request for experts", expert_readers_refused},
    {"expert_fetches_failed_total", NULL, NULL, "counter", "experts that could not be fetched", expert_fetches_failed},
    {"experts_predicted_total", NULL, NULL, "counter", "experts in files that were predicted for the next layer", experts_predicted},
    {"experts_predicted_right_total", NULL, NULL, "counter", "those of them that it used", experts_predicted_right},
    {"experts_fetched_ahead_total", NULL, NULL, "counter", "experts read by a prediction", experts_fetched_ahead},
    {"experts_moved_to_device_total", NULL, NULL, "counter", "experts that became resident because they were used most", expert_moves_to_device},
    {"expert_fetch_steps_total", NULL, NULL, "counter", "steps in which ranks fetched experts rather than exchange rows (--dwdp-from), of all ranks", expert_fetch_steps},
    {"expert_fetch_from_rows", NULL, NULL, "gauge", "rows of a rank from which on steps do so; 0: not measured yet", expert_fetch_from},
    {"experts_on_host_total", NULL, NULL, "counter", "experts whose rows the host computed instead", experts_sent},
    {"expert_rows_on_host_total", NULL, NULL, "counter", "their rows", expert_rows_sent},
    {"expert_host_seconds_total", NULL, NULL, "counter", "time in which the host computed them", expert_sent_seconds},
    {"expert_split_seconds_total", NULL, NULL, "counter", "time of layers that host and device shared, until both had ended", expert_split_seconds},
    {"expert_split_predicted_seconds_total", NULL, NULL, "counter", "the same as it was predicted", expert_split_predicted},
    {"expert_wait_seconds_total", NULL, NULL, "counter", "time in steps that waited for experts", expert_wait_seconds},
    {"hisparse_rows", NULL, NULL, "gauge", "entries of each layer's buffer on the device; 0: all lie there", hisparse_rows},
    {"hisparse_host_bytes", NULL, NULL, "gauge", "entries in host memory that attention chooses among", hisparse_bytes},
    {"hisparse_selected_total", NULL, NULL, "counter", "such entries that attention selected", hisparse_selected},
    {"hisparse_fetched_total", NULL, NULL, "counter", "those of them that the buffers lacked", hisparse_fetched},
    {"engram_pieces_total", NULL, NULL, "counter", "rows of Engram tables, and rows of their scales, that steps asked for", engram_pieces},
    {"engram_resident_total", NULL, NULL, "counter", "those of them that were in memory", engram_resident},
    {"engram_read_bytes_total", NULL, NULL, "counter", "bytes of pages that were read for the others", engram_read_bytes},
    {"engram_skipped_total", NULL, NULL, "counter", "rows that steps did not ask for ahead, because earlier ones were not done", engram_skipped},
    {"load_seconds", "weight_load_duration_seconds", NULL, "gauge", "time to load the model", load_seconds},
    {"http_connections", NULL, NULL, "gauge", "open connections", connections},
    {"http_calls", NULL, NULL, "gauge", "requests being handled or answered", calls},
    {"http_held_body_bytes", NULL, NULL, "gauge", "bytes of request bodies and unread responses in memory", held_bytes},
    {"http_streams", NULL, NULL, "gauge", "open event streams", streams},
    {"http_accepted_connections_total", NULL, NULL, "counter", "connections accepted", accepted},
    {"http_refused_connections_total", NULL, NULL, "counter", "connections closed because there were too many", refused_connections},
    {"http_slow_readers_total", NULL, NULL, "counter", "streams cut off because their reader fell behind", cut_off},
    {"http_clients_gone_total", NULL, NULL, "counter", "clients that left before the response's end", gone},
    {"tls_handshakes_failed_total", NULL, NULL, "counter", "connections that ended before TLS was agreed upon", handshakes_failed},
    {"http_timeouts_total", NULL, NULL, "counter", "requests that did not arrive in time, connections that idled", timed_out},
    {"http_refused_total", NULL, NULL, "counter", "requests refused before a handler saw them", refused},
    {"log_lines_dropped_total", NULL, NULL, "counter", "lines of the log that a full pipe did not take", log_dropped},
    {"http_request_body_bytes_total", NULL, NULL, "counter", "bytes of request bodies", received_bytes},
    {"http_response_body_bytes_total", NULL, NULL, "counter", "bytes of responses", sent_bytes},
};

static const series process_series[] = {
    {"process_resident_memory_bytes", NULL, NULL, "gauge", "resident memory", resident},
    {"process_open_fds", NULL, NULL, "gauge", "open files", files},
    {"process_start_time_seconds", NULL, NULL, "gauge", "start, Unix time", started},
};
/* clang-format on */

static void put_one(FILE *out, const metrics_view *v, const metrics_dialect *d,
                    const series *s) {
    const char *const names[] = {s->own, s->sglang, s->vllm};
    const char *name = names[d->at];
    if (!name) return;
    metrics_put_head(out, d->prefix, name, s->type, s->help);
    fprintf(out, "%s%s{%s%s} %.17g\n", d->prefix, name, v->m->label, d->labels, s->value(v));
}

void metrics_put_series(FILE *out, const metrics_view *v, const metrics_dialect *d) {
    for (size_t i = 0; i < HD_LEN(all_series); i++) put_one(out, v, d, &all_series[i]);
}

void metrics_put_process(FILE *out, const metrics_view *v) {
    for (size_t i = 0; i < HD_LEN(process_series); i++) {
        const series *s = &process_series[i];
        metrics_put_head(out, "", s->own, s->type, s->help);
        fprintf(out, "%s %.17g\n", s->own, s->value(v));
    }
}
