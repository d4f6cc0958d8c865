/* cmd_logits.c - the exact forward pass over given tokens, written as a NumPy file.
 *
 * Sequences run side by side in steps of chunks and single tokens; by design D8 the result is
 * the same bits however they are cut, which is what this command is for showing. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/progress.h"
#include "cli/commands.h"
#include "cli/npy.h"
#include "cli/options.h"
#include "cli/token_lists.h"
#include "kv/cache.h"
#include "model/model.h"

enum {
    MAX_SEQS = 64,        /* sequences in one step; more run in groups */
    DEFAULT_CHUNK = 256,  /* rows of one sequence in one step */
    MAX_STEP_ROWS = 2048, /* rows of one step, unless --chunk asks for more */
};

typedef struct settings {
    const char *model_dir, *tokens, *out;
    int64_t chunk, decode_from, threads, micro_batches;
    int backend;
    bool mtp, pin, quiet;
} settings;

typedef struct run {
    settings set;
    hd_model_spec *spec;
    hd_weights *weights;
    hd_ops ops;
    hd_device *device;
    hd_stream *stream;
    hd_model *model;
    hd_kv *kv;
    hd_cache *cache;
    hd_batch batch[HD_MAX_MICRO];
    token_lists lists;
    hd_npy main_out, draft_out;
    char *draft_path;
    int64_t done[MAX_SEQS]; /* tokens computed of each sequence of the group */
} run;

/* ---- opening ---- */

static hd_status open_model(run *r, hd_err *err) {
    const settings *set = &r->set;
    HD_TRY(hd_model_spec_open(&r->spec, set->model_dir, err));
    HD_TRY(hd_weights_open(&r->weights, set->model_dir, r->spec, err));
    if (set->mtp && hd_weights_n_mtp(r->weights) == 0) {
        return HD_FAIL(err, HD_EINVAL, "%s: --mtp needs an MTP layer; this checkpoint has none",
                       set->model_dir);
    }
    const hd_cpu_options cpu = {.n_threads = set->backend == 0 ? 1 : (int32_t)set->threads,
                                .pin = set->pin};
    HD_TRY(hd_device_open_cpu(&r->device, &cpu, err));
    HD_TRY(hd_stream_open(&r->stream, r->device, err));
    if (set->backend == 0) {
        hd_ops_init_ref(&r->ops);
    } else {
        hd_ops_init_cpu(&r->ops, hd_cpu_features());
    }
    return token_lists_load(&r->lists, set->tokens, r->spec->vocab, r->spec->max_positions,
                            err);
}

static int32_t group_size(const run *r) {
    return hd_min_i32(r->lists.n, MAX_SEQS);
}

static int32_t chunk_rows(const run *r) {
    if (r->set.chunk > 0) return (int32_t)r->set.chunk;
    return hd_max_i32(1, hd_min_i32(DEFAULT_CHUNK, MAX_STEP_ROWS / group_size(r)));
}

static int32_t sequence_pages(const run *r) {
    return (int32_t)hd_ceil_div(r->lists.longest, hd_kv_shape_of(r->spec).page_tokens);
}

/* Pages for whole sequences, and for as much of the window as a chunk can need. */
static hd_status open_pages(run *r, int32_t n_layers, hd_err *err) {
    const hd_kv_shape shape = hd_kv_shape_of(r->spec);
    const int32_t all = sequence_pages(r), chunk = hd_min_i32(chunk_rows(r), r->lists.longest);
    const int32_t near = 2 + (int32_t)hd_ceil_div(shape.reach + chunk, shape.page_tokens);
    const hd_kv_options kv = {
        .n_pages = {group_size(r) * all,
                    shape.reach ? group_size(r) * hd_min_i32(near, all) : 0},
        .act_bytes = r->ops.act_bytes
    };
    const hd_cache_options cache = {
        .page_tokens = shape.page_tokens,
        .reach = shape.reach,
        .n_pages = {kv.n_pages[0], kv.n_pages[1]},
        .n_leases = group_size(r),
        .lease_pages = all
    };
    HD_TRY(hd_kv_open(&r->kv, r->spec, n_layers, r->device, &kv, err));
    return hd_cache_open(&r->cache, &cache, err);
}

static hd_status open_memory(run *r, hd_err *err) {
    const int32_t n_seqs = group_size(r), n_micro = (int32_t)r->set.micro_batches;
    const int64_t rows = (int64_t)n_seqs * hd_min_i32(chunk_rows(r), r->lists.longest);
    if (rows > INT32_MAX)
        return HD_FAIL(err, HD_EINVAL, "--chunk: %lld rows in one step", (long long)rows);
    const hd_model_env env = {r->spec, r->weights, &r->ops, r->device, r->stream};
    const hd_model_limits limits = {
        .rows = (int32_t)rows, .logits = (int32_t)rows, .positions = r->lists.longest};
    const int32_t n_layers = r->spec->n_layers + hd_weights_n_mtp(r->weights);
    HD_TRY(hd_model_open(&r->model, &env, &limits, n_micro, err));
    HD_TRY(open_pages(r, n_layers, err));
    const hd_batch_limits batch = {(int32_t)rows, n_seqs, sequence_pages(r)};
    for (int32_t i = 0; i < n_micro; i++) {
        HD_TRY(hd_batch_open(&r->batch[i], &batch, r->device, err));
    }
    return HD_OK;
}

/* OUT.npy becomes OUT.mtp.npy; any other name gets .mtp.npy appended. */
static char *draft_name(const char *out) {
    size_t n = strlen(out);
    if (n > 4 && strcmp(out + n - 4, ".npy") == 0) n -= 4;
    char *name = malloc(n + sizeof ".mtp.npy");
    if (!name) return NULL;
    memcpy(name, out, n);
    memcpy(name + n, ".mtp.npy", sizeof ".mtp.npy");
    return name;
}

static hd_status open_output(run *r, hd_err *err) {
    HD_TRY(hd_npy_create(&r->main_out, r->set.out, r->lists.total, r->spec->vocab, err));
    if (!r->set.mtp) return HD_OK;
    r->draft_path = draft_name(r->set.out);
    if (!r->draft_path) return HD_FAIL(err, HD_ENOMEM, "no memory for a file name");
    /* close_all() frees the name, further away than the analyzer looks: NOLINTNEXTLINE */
    return hd_npy_create(&r->draft_out, r->draft_path, r->lists.total, r->spec->vocab, err);
}

static hd_status close_all(run *r, hd_err *err) {
    hd_status st = hd_npy_close(&r->main_out, err);
    hd_status st_draft = hd_npy_close(&r->draft_out, err);
    for (int32_t i = 0; i < HD_MAX_MICRO; i++) hd_batch_close(&r->batch[i]);
    hd_cache_close(r->cache);
    hd_kv_close(r->kv);
    hd_model_close(r->model);
    hd_stream_close(r->stream);
    hd_device_close(r->device);
    hd_weights_close(r->weights);
    hd_model_spec_close(r->spec);
    token_lists_free(&r->lists);
    free(r->draft_path);
    return st != HD_OK ? st : st_draft;
}

/* ---- running ---- */

/* Rows of the next step of a sequence with `done` of n tokens computed. */
static int32_t next_rows(const run *r, int64_t done, int64_t n) {
    int64_t end = done + chunk_rows(r);
    if (r->set.decode_from >= 0) {
        if (done >= r->set.decode_from) {
            end = done + 1;
        } else if (end > r->set.decode_from) {
            end = r->set.decode_from;
        }
    }
    return (int32_t)((end < n ? end : n) - done);
}

/* Fills the micro-batches with the next rows of every unfinished sequence of the group that
 * starts at sequence `first`; gives the number of rows. */
static int32_t fill_step(run *r, int32_t first) {
    const int32_t n_micro = (int32_t)r->set.micro_batches;
    int32_t rows = 0;
    for (int32_t i = 0; i < n_micro; i++) hd_batch_reset(&r->batch[i]);
    for (int32_t i = 0; i < group_size(r) && first + i < r->lists.n; i++) {
        const int32_t *tokens = r->lists.tokens + r->lists.first[first + i];
        const int64_t n = r->lists.first[first + i + 1] - r->lists.first[first + i];
        const int64_t done = r->done[i];
        if (done == n) continue;
        int32_t take = next_rows(r, done, n);
        const hd_batch_seq seq = {
            .tokens = tokens + done,
            .n = take,
            .start = (int32_t)done,
            .after = done + take < n ? tokens[done + take] : -1,
            .n_logits = take,
            .pages = {hd_cache_table(r->cache, i, HD_LIFE_ENTRIES),
                      hd_cache_table(r->cache, i, HD_LIFE_WINDOW)},
            .n_pages = sequence_pages(r)
        };
        hd_status st = hd_cache_extend(r->cache, i, (int32_t)done + take);
        assert(st == HD_OK); /* open_pages counted them */
        (void)st;
        hd_batch_add(&r->batch[i % n_micro], &seq);
        rows += take;
    }
    return rows;
}

/* Writes every sequence's rows of this step's logits to its place in the file. */
static hd_status write_step(run *r, int32_t first, hd_npy *out, hd_err *err) {
    const int32_t n_micro = (int32_t)r->set.micro_batches;
    int32_t seq_of_micro[HD_MAX_MICRO] = {0};
    for (int32_t i = 0; i < group_size(r) && first + i < r->lists.n; i++) {
        const int64_t base = r->lists.first[first + i];
        const int64_t n = r->lists.first[first + i + 1] - base;
        if (r->done[i] == n) continue;
        const int32_t micro = i % n_micro, seq = seq_of_micro[micro]++;
        const hd_batch *b = &r->batch[micro];
        const int32_t row = b->host.first_row[seq], rows = b->host.first_row[seq + 1] - row;
        const float *logits = hd_model_logits(r->model, micro) + (int64_t)row * r->spec->vocab;
        HD_TRY(hd_npy_write(out, base + r->done[i], logits, rows, err));
    }
    return HD_OK;
}

static int32_t argmax(const float *x, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++) {
        if (x[i] > x[best]) best = i;
    }
    return best;
}

/* A sequence's last row has no next token: it drafts from the model's own greedy choice. */
static void complete_next_tokens(run *r) {
    for (int32_t i = 0; i < (int32_t)r->set.micro_batches; i++) {
        hd_batch *b = &r->batch[i];
        for (int32_t row = 0; row < b->n_rows; row++) {
            if (b->host.next_tokens[row] >= 0) continue;
            const float *logits = hd_model_logits(r->model, i) + (int64_t)row * r->spec->vocab;
            b->host.next_tokens[row] = argmax(logits, r->spec->vocab);
        }
        hd_batch_upload(b, r->stream);
    }
}

static hd_status run_step(run *r, int32_t first, hd_err *err) {
    hd_batch *batches[HD_MAX_MICRO];
    int32_t n = 0;
    for (int32_t i = 0; i < (int32_t)r->set.micro_batches; i++) {
        hd_batch_upload(&r->batch[i], r->stream);
        batches[n++] = &r->batch[i];
    }
    hd_model_step(r->model, r->kv, batches, n);
    HD_TRY(hd_stream_sync(r->stream, err));
    HD_TRY(write_step(r, first, &r->main_out, err));
    if (!r->set.mtp) return HD_OK;
    complete_next_tokens(r);
    hd_model_draft(r->model, r->kv, batches, n, false);
    HD_TRY(hd_stream_sync(r->stream, err));
    return write_step(r, first, &r->draft_out, err);
}

static void advance(run *r, int32_t first) {
    for (int32_t i = 0; i < group_size(r) && first + i < r->lists.n; i++) {
        const int64_t n = r->lists.first[first + i + 1] - r->lists.first[first + i];
        if (r->done[i] == n) continue;
        r->done[i] += next_rows(r, r->done[i], n);
        hd_cache_commit(r->cache, i, r->lists.tokens + r->lists.first[first + i],
                        (int32_t)r->done[i]);
    }
}

/* Every sequence has a salt of its own: all of it is computed, whatever is cached. */
static void open_leases(run *r, int32_t first) {
    memset(r->done, 0, sizeof r->done);
    hd_cache_flush(r->cache);
    for (int32_t i = 0; i < group_size(r) && first + i < r->lists.n; i++) {
        int32_t hit;
        hd_status st = hd_cache_acquire(r->cache, i, (uint64_t)first + (uint64_t)i,
                                        r->lists.tokens, 1, &hit);
        assert(st == HD_OK && hit == 0);
        (void)st;
    }
}

static void close_leases(run *r, int32_t first) {
    for (int32_t i = 0; i < group_size(r) && first + i < r->lists.n; i++) {
        hd_cache_release(r->cache, i, false);
    }
}

static hd_status run_all(run *r, hd_err *err) {
    hd_progress progress;
    hd_status st = HD_OK;
    hd_progress_init(&progress, "logits", "tokens", r->lists.total, r->set.quiet);
    for (int32_t first = 0; st == HD_OK && first < r->lists.n; first += group_size(r)) {
        open_leases(r, first);
        for (int32_t rows; st == HD_OK && (rows = fill_step(r, first)) > 0;) {
            st = run_step(r, first, err);
            advance(r, first);
            hd_progress_add(&progress, rows);
        }
        close_leases(r, first);
    }
    hd_progress_end(&progress);
    return st;
}

int cmd_logits(int argc, char **argv) {
    static const char *const backends[] = {"ref", "cpu", NULL};
    run r = {
        .set = {.decode_from = -1, .backend = 1, .micro_batches = 1},
        .main_out.fd = -1,
        .draft_out.fd = -1
    };
    settings *set = &r.set;
    const option options[] = {
        option_text("tokens", &set->tokens, "FILE",
                    "JSON list of ids, or of such lists (required)"),
        option_text("out", &set->out, "FILE", "NumPy file, float32 [tokens, vocab] (required)"),
        option_int("chunk", &set->chunk, 0, 1 << 20,
                   "prefill in chunks of N tokens; 0 chooses"),
        option_int("decode-from", &set->decode_from, 0, INT32_MAX,
                   "one token a step from position N"),
        option_choice("backend", &set->backend, backends,
                      "the plain reference, or the fast one"),
        option_int("threads", &set->threads, 0, 1024,
                   "of the cpu backend; 0: one per processor"),
        option_flag("pin", &set->pin, "bind threads to processors"),
        option_flag("mtp", &set->mtp, "also the MTP layer's logits, in OUT with .mtp.npy"),
        option_int("micro-batches", &set->micro_batches, 1, HD_MAX_MICRO, "interleave so many"),
        with_letter(option_flag("quiet", &set->quiet, "no progress on standard error"), 'q'),
    };
    const positional model = {"MODEL_DIR", &set->model_dir, false};
    const command_line line = {
        .command = "logits",
        .summary = "Computes the logits after every token of the given sequences.",
        .details = "With --mtp, row t holds the draft for token t + 2, given token t + 1; a\n"
                   "sequence's last row takes the greedy choice of its main logits as t + 1.",
        .positionals = &model,
        .n_positionals = 1,
        .options = options,
        .n_options = (int)HD_LEN(options)};
    int code;
    hd_err err = {0};
    if (!options_parse(&line, argc, argv, &code)) return code;
    hd_status st = HD_OK;
    if (!set->tokens) st = HD_FAIL(&err, HD_EINVAL, "hadal logits needs --tokens FILE");
    if (!set->out) st = HD_FAIL(&err, HD_EINVAL, "hadal logits needs --out FILE");
    if (st == HD_OK) st = open_model(&r, &err);
    if (st == HD_OK) st = open_memory(&r, &err);
    if (st == HD_OK) st = open_output(&r, &err);
    if (st == HD_OK) st = run_all(&r, &err);
    hd_status closed = close_all(&r, &err);
    return st != HD_OK || closed != HD_OK ? report_error(&err) : 0;
}
