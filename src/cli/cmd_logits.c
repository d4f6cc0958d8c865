/* cmd_logits.c - `hadal logits`: runs the exact forward pass over given tokens and writes
 * the logits as a NumPy file. Sequences run in one batch, in prefill chunks and single
 * tokens. The bits do not depend on the chunks, which this command can show. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/progress.h"
#include "cli/commands.h"
#include "cli/draft_blocks.h"
#include "cli/engine_options.h"
#include "cli/npy.h"
#include "cli/token_lists.h"
#include "cli/terminal/upload_bar.h"
#include "kv/cache.h"
#include "model/model.h"
#include "tokenizer/tokenizer.h"
#include "weights/config/drafter_folder.h"
#include "weights/manifest.h"

enum {
    MAX_SEQS = 64,        /* sequences in one step; more run in groups */
    DEFAULT_CHUNK = 256,  /* rows of one sequence in one step */
    MAX_STEP_ROWS = 2048, /* rows of one step, without --chunk */
    READ_ROWS = 64,       /* logits copied to the host at once */
};

typedef struct settings {
    engine_settings engine;
    const char *tokens, *out;
    int64_t decode_from, micro_batches;
    bool mtp, quiet, replay[HD_N_REPLAYS];
} settings;

typedef struct run {
    settings set;
    hd_model_spec *spec;
    hd_weights *weights;
    hd_ops ops;
    hd_device *device;
    hd_stream *stream;
    hd_mla_form mla;
    hd_model *model;
    hd_kv *kv;
    hd_cache *cache;
    hd_batch batch;
    float *rows; /* [READ_ROWS, vocab] host memory */
    token_lists lists;
    draft_blocks blocks;
    hd_npy main_out, draft_out, confidence_out, replay_out[HD_N_REPLAYS];
    /* names of the files beside OUT */
    hd_bytes draft_path, confidence_path, replay_path[HD_N_REPLAYS];
    int64_t done[MAX_SEQS]; /* computed tokens of each sequence of the group */
} run;

/* ---- opening ---- */

static int32_t block_of(const run *r) {
    return r->set.mtp ? r->spec->dspark.block : 0;
}

static hd_status check_drafter(const run *r, hd_err *err) {
    const hd_engine_options *o = &r->set.engine.options;
    const char *asked = o->drafter ? o->drafter : "auto";
    const bool any = strcmp(asked, "auto") == 0, has = hd_weights_n_mtp(r->weights) > 0;
    const char *own = hd_drafter_name(has ? r->spec->drafter : HD_DRAFTER_NONE);
    if (!any && !r->set.mtp) {
        return HD_FAIL(err, HD_EINVAL, "--drafter %s: nothing is drafted without --mtp", asked);
    }
    if (!any && strcmp(asked, own) != 0) {
        return HD_FAIL(err, HD_EINVAL, "--drafter %s: that of %s is %s", asked, o->model_dir,
                       own);
    }
    if (r->set.mtp && !has) {
        return HD_FAIL(err, HD_EINVAL,
                       "%s: --mtp needs an MTP layer or DSpark stages; this "
                       "checkpoint has neither",
                       o->model_dir);
    }
    if (block_of(r) == 0 || o->chunk_tokens <= 1) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "--chunk %d: with DSpark --mtp computes one token a step",
                   o->chunk_tokens);
}

static hd_status open_model(run *r, hd_err *err) {
    const settings *set = &r->set;
    const hd_engine_options *o = &set->engine.options;
    if (o->manifest) HD_TRY(hd_manifest_check(o->manifest, o->model_dir, err));
    HD_TRY(hd_model_spec_open_drafter(&r->spec, o->model_dir, o->drafter, err));
    HD_TRY(hd_weights_open(&r->weights, o->model_dir, r->spec, err));
    HD_TRY(check_drafter(r, err));
    hd_ops_options ops;
    HD_TRY(engine_settings_ops(&set->engine, &ops, &r->mla, err));
    HD_TRY(hd_ops_open(&r->ops, &r->device, o->backend, &ops, err));
    hd_device_bind_thread(r->device);
    HD_TRY(hd_stream_open(&r->stream, r->device, err));
    upload_bar bar = {.quiet = set->quiet};
    const hd_upload_watch watch = {upload_bar_draw, &bar};
    HD_TRY(hd_weights_upload(r->weights, r->device, r->stream, &watch, err));
    return token_lists_load(&r->lists, set->tokens, r->spec->vocab, r->spec->max_positions,
                            err);
}

static int32_t group_size(const run *r) {
    return hd_min_i32(r->lists.n, MAX_SEQS);
}

static int32_t chunk_rows(const run *r) {
    const int32_t asked = r->set.engine.options.chunk_tokens;
    if (block_of(r) > 0) return 1; /* a block follows what is computed */
    if (asked > 0) return asked;
    return hd_max_i32(1, hd_min_i32(DEFAULT_CHUNK, MAX_STEP_ROWS / group_size(r)));
}

static int32_t sequence_pages(const run *r) {
    return (int32_t)hd_ceil_div(r->lists.longest + block_of(r),
                                hd_kv_shape_of(r->spec).page_tokens);
}

/* Allocates FULL pages for complete sequences, and WINDOW pages for what one chunk can need. */
static hd_status open_pages(run *r, int32_t n_layers, hd_err *err) {
    const hd_kv_shape shape = hd_kv_shape_of(r->spec);
    const int32_t all = sequence_pages(r);
    const int32_t chunk = hd_min_i32(chunk_rows(r), r->lists.longest) + block_of(r);
    const int32_t near = 2 + (int32_t)hd_ceil_div(shape.lookback + chunk, shape.page_tokens);
    const hd_kv_options kv = {
        .n_pages = {group_size(r) * all,
                    shape.lookback ? group_size(r) * hd_min_i32(near, all) : 0},
        .entry_type = r->ops.kv_type,
        .rounds = r->ops.precision == HD_OFFICIAL,
        .replay = {r->set.replay[0],                   r->set.replay[1]                              }
    };
    const hd_cache_options cache = {
        .page_tokens = shape.page_tokens,
        .lookback = shape.lookback,
        .n_pages = {kv.n_pages[0], kv.n_pages[1]},
        .max_seqs = group_size(r),
        .seq_pages = all
    };
    HD_TRY(hd_kv_open(&r->kv, r->spec, n_layers, r->device, &kv, err));
    return hd_cache_open(&r->cache, &cache, err);
}

static hd_status open_memory(run *r, hd_err *err) {
    const int32_t n_seqs = group_size(r);
    const int64_t rows = (int64_t)n_seqs * hd_min_i32(chunk_rows(r), r->lists.longest);
    const int32_t block = block_of(r), drafted = n_seqs * block;
    if (rows > INT32_MAX)
        return HD_FAIL(err, HD_EINVAL, "--chunk: %lld rows in one step", (long long)rows);
    const hd_model_env env = {.spec = r->spec,
                              .weights = r->weights,
                              .ops = &r->ops,
                              .device = r->device,
                              .stream = r->stream,
                              .mla = r->mla};
    const int32_t most = hd_max_i32((int32_t)rows, drafted);
    const hd_model_limits limits = {.rows = most,
                                    .logits = most,
                                    .positions = r->lists.longest + block,
                                    .n_micro = (int32_t)r->set.micro_batches};
    const int32_t n_layers = r->spec->n_layers + hd_weights_n_mtp(r->weights);
    HD_TRY(hd_model_open(&r->model, &env, &limits, err));
    HD_TRY(open_pages(r, n_layers, err));
    const size_t read = (size_t)READ_ROWS * (size_t)r->spec->vocab * sizeof *r->rows;
    void *host;
    HD_TRY(hd_device_alloc_host(r->device, &host, read, "logits", err));
    r->rows = host;
    const hd_batch_limits batch = {(int32_t)rows, n_seqs, sequence_pages(r)};
    HD_TRY(hd_batch_open(&r->batch, &batch, r->device, err));
    if (block == 0) return HD_OK;
    r->blocks = (draft_blocks){.spec = r->spec,
                               .device = r->device,
                               .stream = r->stream,
                               .model = r->model,
                               .kv = r->kv,
                               .rows = r->rows,
                               .logits = &r->draft_out,
                               .confidence = &r->confidence_out};
    return draft_blocks_open(&r->blocks, n_seqs, sequence_pages(r), err);
}

/* OUT.npy becomes OUT with the ending; any other name gets it appended. */
static hd_status name_beside(const run *r, hd_bytes *path, const char *ending, hd_err *err) {
    size_t n = strlen(r->set.out);
    if (n > 4 && strcmp(r->set.out + n - 4, ".npy") == 0) n -= 4;
    HD_TRY(hd_bytes_append(path, r->set.out, n, err));
    return hd_bytes_append(path, ending, strlen(ending) + 1, err);
}

static hd_status open_replay(run *r, hd_replay kind, hd_err *err) {
    static const struct {
        const char *option, *needs, *ending;
    } kinds[HD_N_REPLAYS] = {
        [HD_REPLAY_EXPERTS] = {"--routes",  "experts",    ".routes.npy" },
        [HD_REPLAY_KEYS] = {"--indexer", "an indexer", ".indexer.npy"},
    };
    const hd_replay_shape shape = hd_replay_shape_of(r->spec, kind);
    if (shape.row_bytes == 0) {
        return HD_FAIL(err, HD_EINVAL, "%s: %s needs a model with %s",
                       r->set.engine.options.model_dir, kinds[kind].option, kinds[kind].needs);
    }
    HD_TRY(name_beside(r, &r->replay_path[kind], kinds[kind].ending, err));
    return hd_npy_create(&r->replay_out[kind], (const char *)r->replay_path[kind].data,
                         r->lists.total, (int64_t)shape.layers * shape.top_k, err);
}

static hd_status open_output(run *r, hd_err *err) {
    HD_TRY(hd_npy_create(&r->main_out, r->set.out, r->lists.total, r->spec->vocab, err));
    for (int k = 0; k < HD_N_REPLAYS; k++) {
        if (r->set.replay[k]) HD_TRY(open_replay(r, (hd_replay)k, err));
    }
    if (!r->set.mtp) return HD_OK;
    HD_TRY(name_beside(r, &r->draft_path, ".mtp.npy", err));
    if (block_of(r) > 0) {
        HD_TRY(name_beside(r, &r->confidence_path, ".confidence.npy", err));
        HD_TRY(hd_npy_create_blocks(&r->draft_out, (const char *)r->draft_path.data,
                                    r->lists.total, block_of(r), r->spec->vocab, err));
        return hd_npy_create(&r->confidence_out, (const char *)r->confidence_path.data,
                             r->lists.total, block_of(r), err);
    }
    return hd_npy_create(&r->draft_out, (const char *)r->draft_path.data, r->lists.total,
                         r->spec->vocab, err);
}

static hd_status close_all(run *r, hd_err *err) {
    hd_npy *const files[] = {&r->main_out, &r->draft_out, &r->confidence_out,
                             &r->replay_out[HD_REPLAY_EXPERTS], &r->replay_out[HD_REPLAY_KEYS]};
    hd_status st = HD_OK;
    for (size_t i = 0; i < HD_LEN(files); i++) {
        const hd_status closed = hd_npy_close(files[i], err);
        if (st == HD_OK) st = closed;
    }
    hd_bytes_deinit(&r->draft_path);
    hd_bytes_deinit(&r->confidence_path);
    for (int k = 0; k < HD_N_REPLAYS; k++) hd_bytes_deinit(&r->replay_path[k]);
    hd_batch_close(&r->batch);
    draft_blocks_close(&r->blocks);
    if (r->device) hd_device_release(r->device, r->rows);
    hd_cache_close(r->cache);
    hd_kv_close(r->kv);
    hd_model_close(r->model);
    hd_stream_close(r->stream);
    hd_device_close(r->device);
    hd_weights_close(r->weights);
    hd_model_spec_close(r->spec);
    token_lists_free(&r->lists);
    return st;
}

/* ---- running ---- */

/* Returns the rows of the next step of a sequence of n tokens, `done` of them computed. */
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

/* Fills the batch with the next rows of every unfinished sequence of the group that
 * starts at sequence `first`; returns the number of rows. */
static int32_t fill_step(run *r, int32_t first) {
    int32_t rows = 0;
    hd_batch_reset(&r->batch);
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
            .pages = {hd_cache_block_table(r->cache, i, HD_KV_FULL),
                      hd_cache_block_table(r->cache, i, HD_KV_WINDOW)},
            .n_pages = sequence_pages(r)
        };
        hd_status st = hd_cache_extend(r->cache, i, (int32_t)done + take + block_of(r));
        assert(st == HD_OK); /* open_pages has counted them */
        (void)st;
        hd_batch_add(&r->batch, &seq);
        rows += take;
    }
    return rows;
}

/* Copies logits of rows [row, row + n), n <= READ_ROWS, to r->rows. */
static hd_status read_logits(run *r, int32_t row, int32_t n, hd_err *err) {
    const size_t vocab = (size_t)r->spec->vocab;
    const float *logits = hd_model_logits(r->model) + (size_t)row * vocab;
    hd_stream_download(r->stream, r->rows, logits, (size_t)n * vocab * sizeof *logits);
    return hd_stream_sync(r->stream, err);
}

/* Writes the logits of this step to each sequence's place in the file. */
static hd_status write_step(run *r, int32_t first, hd_npy *out, hd_err *err) {
    const hd_batch *b = &r->batch;
    int32_t seq = 0;
    for (int32_t i = 0; i < group_size(r) && first + i < r->lists.n; i++) {
        const int64_t base = r->lists.first[first + i];
        const int64_t n = r->lists.first[first + i + 1] - base;
        if (r->done[i] == n) continue;
        const int32_t row = b->host.first_row[seq], end = b->host.first_row[++seq];
        for (int32_t at = row; at < end; at += READ_ROWS) {
            const int32_t some = hd_min_i32(end - at, READ_ROWS);
            HD_TRY(read_logits(r, at, some, err));
            HD_TRY(hd_npy_write(out, base + r->done[i] + at - row, r->rows, some, err));
        }
    }
    return HD_OK;
}

/* The last row of a sequence has no next token: its draft follows the model's own greedy
 * token. */
static hd_status complete_next_tokens(run *r, hd_err *err) {
    hd_batch *b = &r->batch;
    for (int32_t row = 0; row < b->n_rows; row++) {
        if (b->host.next_tokens[row] >= 0) continue;
        HD_TRY(read_logits(r, row, 1, err));
        b->host.next_tokens[row] = draft_argmax(r->rows, r->spec->vocab);
    }
    hd_batch_upload(b, r->stream);
    return HD_OK;
}

/* Blocks after the one row of every sequence. */
static hd_status run_blocks(run *r, int32_t first, hd_err *err) {
    int64_t at[MAX_SEQS];
    int32_t n = 0;
    for (int32_t i = 0; i < group_size(r) && first + i < r->lists.n; i++) {
        const int64_t base = r->lists.first[first + i];
        if (r->done[i] < r->lists.first[first + i + 1] - base) at[n++] = base + r->done[i];
    }
    return draft_blocks_run(&r->blocks, &r->batch, at, err);
}

static hd_status run_step(run *r, int32_t first, hd_err *err) {
    r->batch.n_micro = hd_model_n_micro(r->model, &r->batch);
    hd_batch_upload(&r->batch, r->stream);
    hd_model_step(r->model, r->kv, &r->batch);
    HD_TRY(hd_stream_sync(r->stream, err));
    HD_TRY(write_step(r, first, &r->main_out, err));
    if (!r->set.mtp) return HD_OK;
    HD_TRY(complete_next_tokens(r, err));
    if (block_of(r) > 0) return run_blocks(r, first, err);
    hd_model_draft(r->model, r->kv, &r->batch, false);
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

/* Every sequence has its own salt, so that nothing comes from the prefix cache. */
static void open_seqs(run *r, int32_t first) {
    memset(r->done, 0, sizeof r->done);
    hd_cache_flush(r->cache);
    for (int32_t i = 0; i < group_size(r) && first + i < r->lists.n; i++) {
        int32_t hit;
        hd_status st =
            hd_cache_acquire(r->cache, i, (uint64_t)(first + i), r->lists.tokens, 1, &hit);
        assert(st == HD_OK && hit == 0);
        (void)st;
    }
}

/* Returns number i of a row; -1 has all bits set, as no key and no expert of a layer with any. */
static float number_of(const run *r, hd_replay kind, const hd_replay_shape *shape,
                       const uint8_t *row, int32_t i) {
    uint32_t value = 0;
    const bool dense =
        kind == HD_REPLAY_EXPERTS && hd_replay_layer(r->spec, kind, i / shape->top_k) < 0;
    for (int32_t b = 0; b < shape->number_bytes; b++) {
        value |= (uint32_t)row[i * shape->number_bytes + b] << (8 * b);
    }
    const uint32_t none = shape->number_bytes == 2 ? UINT16_MAX : UINT32_MAX;
    return dense || value == none ? -1.0f : (float)value;
}

/* Writes the choices for all tokens of the group's sequences, as numbers. */
static hd_status write_replay(run *r, int32_t first, hd_replay kind, hd_err *err) {
    const hd_replay_shape shape = hd_replay_shape_of(r->spec, kind);
    const int32_t cols = shape.layers * shape.top_k;
    uint8_t *row = malloc((size_t)shape.row_bytes);
    float *numbers = malloc((size_t)cols * sizeof *numbers);
    hd_status st =
        row && numbers ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for a row of choices");
    for (int32_t i = 0; i < group_size(r) && first + i < r->lists.n; i++) {
        const int64_t base = r->lists.first[first + i];
        const int32_t *pages = hd_cache_block_table(r->cache, i, HD_KV_FULL);
        for (int32_t t = 0; t < r->done[i] && st == HD_OK; t++) {
            hd_replay_read(hd_kv_replay(r->kv, kind), pages, t, 1, row);
            for (int32_t k = 0; k < cols; k++) {
                numbers[k] = number_of(r, kind, &shape, row, k);
            }
            st = hd_npy_write(&r->replay_out[kind], base + t, numbers, 1, err);
        }
    }
    free(row);
    free(numbers);
    return st;
}

static void close_seqs(run *r, int32_t first) {
    for (int32_t i = 0; i < group_size(r) && first + i < r->lists.n; i++) {
        hd_cache_release(r->cache, i, false);
    }
}

static hd_status run_all(run *r, hd_err *err) {
    hd_progress progress;
    hd_status st = HD_OK;
    hd_progress_init(&progress, "logits", "tokens", r->lists.total, r->set.quiet);
    for (int32_t first = 0; st == HD_OK && first < r->lists.n; first += group_size(r)) {
        open_seqs(r, first);
        for (int32_t rows; st == HD_OK && (rows = fill_step(r, first)) > 0;) {
            st = run_step(r, first, err);
            advance(r, first);
            hd_progress_add(&progress, rows);
        }
        for (int k = 0; k < HD_N_REPLAYS && st == HD_OK; k++) {
            if (r->set.replay[k]) st = write_replay(r, first, (hd_replay)k, err);
        }
        close_seqs(r, first);
    }
    hd_progress_end(&progress);
    return st;
}

int cmd_logits(int argc, char **argv) {
    run r = {
        .set = {.engine = engine_settings_default(), .decode_from = -1, .micro_batches = 1},
        .main_out.fd = -1,
        .draft_out.fd = -1,
        .confidence_out.fd = -1,
        .replay_out = {{.fd = -1},                                   {.fd = -1}                                          }
    };
    settings *set = &r.set;
    const option options[] = {
        option_text("tokens", &set->tokens, "FILE",
                    "JSON list of ids, or of such lists (required)"),
        option_text("out", &set->out, "FILE", "NumPy file, float32 [tokens, vocab] (required)"),
        option_int("decode-from", &set->decode_from, 0, INT32_MAX,
                   "one token a step from position N"),
        option_flag("mtp", &set->mtp, "also the drafter's logits, in OUT with .mtp.npy"),
        option_flag("routes", &set->replay[HD_REPLAY_EXPERTS],
                    "also the experts of every token, in OUT with .routes.npy, as float32"),
        option_flag("indexer", &set->replay[HD_REPLAY_KEYS],
                    "also the keys that indexers select, in OUT with .indexer.npy"),
        option_int("micro-batches", &set->micro_batches, 1, HD_MAX_MICRO, "interleave so many"),
        with_letter(option_flag("quiet", &set->quiet, "no progress on standard error"), 'q'),
    };
    const positional model = {"MODEL_DIR", &set->engine.options.model_dir, false,
                              POSITIONAL_MODEL};
    const command_line line = {
        .command = "logits",
        .summary = "Computes the logits after every token of the given sequences.",
        .details =
            "With --mtp, row t holds the draft for token t + 2, given token t + 1; a\n"
            "sequence's last row takes the greedy choice of its main logits as t + 1.\n"
            "DSpark drafts a block, [tokens, block, vocab]: each draft follows the greedy\n"
            "choice of the one before. Log-odds that they are accepted: .confidence.npy.",
        .positionals = &model,
        .n_positionals = 1,
        .options = options,
        .n_options = (int)HD_LEN(options)};
    int code;
    hd_err err = {0};
    if (!engine_options_parse(&line, ENGINE_LOGITS, &set->engine, argc, argv, &code))
        return code;
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
