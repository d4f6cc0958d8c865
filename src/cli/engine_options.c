/* engine_options.c - the table of engine options; see engine_options.h. */
#include "cli/engine_options.h"

#include <assert.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "cli/terminal/upload_bar.h"
#include "comm/local.h"

enum {
    BENCH = ENGINE_THROUGHPUT | ENGINE_LATENCY,
    CONVERSATIONS = ENGINE_SERVE | ENGINE_CHAT | ENGINE_EVAL | ENGINE_REPLAY,
    ENGINES = CONVERSATIONS | ENGINE_GENERATE | BENCH,
    STEPS = ENGINE_LOGITS | ENGINE_OPS | ENGINE_RANK, /* without a scheduler */
    ALL = ENGINES | STEPS
};

static const char *const backends[] = {"auto", "cpu", "cuda", "ref", "null", NULL};
static const char *const step_backends[] = {"auto", "cpu", "cuda", "ref", NULL};
static const char *const mla_forms[] = {"absorbed", "naive", NULL};
static const char *const drafters[] = {"auto", "mtp", "dspark", "none", NULL};
static const char *const prompt_decoders[] = {"tail", "whole", "replay", NULL};
static const char *const computers[] = {"device", "auto", "host", NULL};
static const char *const layouts[] = {"auto", NULL};
static const char *const dispatch_dtypes[] = {"float32", "fp8", NULL};
static const char *const on_off[] = {"on", "off", NULL};
static const char *const back_through[] = {"back", "through", NULL};

/* Which formats --precision means here; no GPU is looked for. */
static void tell_formats(char *out, size_t size) {
    const char *gpu = hd_ops_activations("cuda", HD_FAST);
    const int n = snprintf(out, size, "; here fast is %s", hd_ops_activations("cpu", HD_FAST));
    if (n < 0 || (size_t)n >= size) return;
    if (gpu) {
        snprintf(out + n, size - (size_t)n, " on the CPU and %s on a GPU, official %s", gpu,
                 hd_ops_activations("cuda", HD_OFFICIAL));
    } else {
        snprintf(out + n, size - (size_t)n, ", and official needs a build with CUDA");
    }
}

/* What a row begins with: the name, the field it sets, its range or its words. */
/* clang-format off */
#define SETS(title, field)                                        \
    .option.name = title, .at = offsetof(engine_settings, field), \
    .option.bytes = sizeof(((engine_settings *)NULL)->field)
#define FLAG(title, field) SETS(title, field), .option.kind = OPTION_FLAG
#define TEXT(title, field, value) \
    SETS(title, field), .option.kind = OPTION_TEXT, .option.metavar = value
#define INT(title, field, least, most)                                      \
    SETS(title, field), .option.kind = OPTION_INT, .option.metavar = "N",   \
    .option.min = least, .option.max = most
#define REAL(title, field, least, most)                                     \
    SETS(title, field), .option.kind = OPTION_REAL, .option.metavar = "X",  \
    .option.real_min = least, .option.real_max = most
#define GIGABYTES(title, field)                                             \
    SETS(title, field), .option.kind = OPTION_REAL, .option.metavar = "GB", \
    .option.real_min = 0, .option.real_max = 1e6
#define WORD(title, field, words)                                             \
    SETS(title, field), .option.kind = OPTION_WORD, .option.metavar = "NAME", \
    .option.choices = words
#define CHOICE(title, field, words)                                             \
    SETS(title, field), .option.kind = OPTION_CHOICE, .option.metavar = "NAME", \
    .option.choices = words
#define HELP(text) .option.help = text

static const engine_option rows[] = {
    {WORD("backend", options.backend, backends),
     HELP("auto: a GPU if one can be used, else the CPU; ref: the plain reference; null: "
          "tokens without a model"),
     .offered = ENGINES},
    {WORD("backend", options.backend, step_backends),
     HELP("auto: a GPU if one can be used, else the CPU; ref: the plain reference"),
     .offered = ENGINE_LOGITS | ENGINE_RANK},
    {WORD("backend", options.backend, step_backends),
     HELP("auto: a GPU for operators alone, if one can be used"), .offered = ENGINE_OPS},
    {INT("gpu", options.gpu, 0, 1023), HELP("which GPU, as CUDA numbers them; default 0"),
     .offered = ALL},
    {WORD("cuda-path", options.cuda_path, hd_cuda_path_names),
     HELP("kernels of a GPU: sm90: for Hopper; generic: for compute capability 8.0 and more; auto: "
          "what the GPU is"),
     .offered = ALL},
    {INT("tp", options.tp, 1, HD_LOCAL_MAX_RANKS),
     HELP("ranks that share every matrix, as threads of this process; default 1"),
     .offered = ENGINES, .why = "it runs one rank"},
    {INT("ep", options.ep, 1, HD_LOCAL_MAX_RANKS),
     HELP("ranks that share the routed experts; with --tp a multiple or a divisor of it; "
          "default 1"),
     .offered = ENGINES, .why = "it runs one rank"},
    {INT("dp", options.dp, 1, HD_LOCAL_MAX_RANKS),
     HELP("attention groups of --tp ranks, each with its own requests and KV pools; default: one, "
          "or as many as the processes of a launcher make"),
     .offered = ENGINES, .why = "it runs one rank"},
    {INT("cp", options.cp, HD_CP_AUTO, HD_LOCAL_MAX_RANKS), .option.min_word = "auto",
     HELP("times as many ranks in a group, which divide the rows of prompts in attention; auto or "
          "-1: all ranks with the same heads, of prompts so long that it pays; default 1"),
     .offered = ENGINES, .why = "it runs one rank"},
    {INT("dwdp", options.dwdp, 1, HD_LOCAL_MAX_RANKS),
     HELP("instead of --tp and --dp: attention groups that divide the memory of the experts "
          "and fetch the others' ahead of use; with --ep: so many in each of its parts; default 1"),
     .offered = ENGINES, .why = "it runs one rank"},
    {TEXT("dwdp-from", options.dwdp_from, "auto|ROWS"),
     HELP("with --dwdp: in steps in which no rank has so many rows, ranks exchange rows, as with "
          "--ep; auto: as many as hide the copies, by measured times; default: never"),
     .offered = ENGINES, .why = "it runs one rank"},
    {INT("prefetch-depth", options.prefetch_depth, 0, 3),
     HELP("with --dwdp: how many layers ahead experts are fetched; 0: 1"),
     .offered = ENGINES, .why = "it runs one rank"},
    {INT("redundant", options.redundant, 0, 4096),
     HELP("with --ep: spare slots of all ranks together, for copies of experts; with --dwdp: "
          "experts that a second rank has; default 0"),
     .offered = ENGINES, .why = "it runs one rank"},
    {TEXT("rebalance", options.rebalance, "off|auto|N"),
     HELP("with --ep: move experts between ranks where that makes steps faster (auto), or every "
          "N steps; default off"),
     .offered = ENGINES, .why = "it runs one rank"},
    {WORD("expert-split", options.expert_split, hd_expert_split_names),
     HELP("with --redundant: how rows go to the copies of an expert; turns: one after the other; "
          "local: each rank evens out its own; flow: all ranks together"),
     .offered = ENGINES, .why = "it runs one rank"},
    {WORD("layout", options.layout, layouts),
     HELP("auto: chooses --tp, --dp and --ep for --ranks by the model and the memory"),
     .offered = ENGINES, .why = "it runs one rank"},
    {INT("ranks", options.ranks, 0, HD_LOCAL_MAX_RANKS),
     HELP("with --layout auto: how many threads; 0: as many ranks as processes, else 1"),
     .offered = ENGINES, .why = "it runs one rank"},
    {INT("rank-memory", options.rank_memory, 0, INT64_MAX),
     HELP("with --layout auto: bytes of memory for each rank; 0: its part of what is free"),
     .offered = ENGINES, .why = "it runs one rank"},
    {TEXT("experts-disk", options.experts_disk, "off|auto|GB"),
     HELP("CPU: leave routed experts in the model's files and stage them in so many gigabytes of "
          "memory; auto: most of what is free; default off"),
     .offered = ENGINES,
     .why = "its operators read all weights where they are loaded"},
    {TEXT("experts-host", options.experts_host, "off|auto|GB"),
     HELP("leave routed experts in host memory, and those that were used last in so many gigabytes "
          "of device memory; auto: most of what is free; default off"),
     .offered = ENGINES,
     .why = "its operators read all weights where they are loaded"},
    {WORD("experts-host-compute", options.experts_host_compute, computers),
     HELP("with --experts-host: what computes experts that are not in device memory: the device, which copies "
          "them; the host's processors; or auto: both, whatever is sooner, which on a GPU rounds otherwise; "
          "default device"),
     .offered = ENGINES,
     .why = "its operators read all weights where they are loaded"},
    {GIGABYTES("device-memory", options.device_memory_gb),
     HELP("take no more than so much of a GPU's memory; 0: what is free"), .offered = ENGINES,
     .why = "its memory is just what its steps need"},
    {GIGABYTES("host-memory", options.host_memory_gb),
     HELP("with --experts-host: host memory that experts may take; layers that have no room there are "
          "on the device only; 0: 0.9 of what is free"),
     .offered = ENGINES,
     .why = "its operators read all weights where they are loaded"},
    {FLAG("sum-in-ranks", options.sum_in_ranks),
     HELP("with --tp: reduce partial sums, which takes fewer bytes and rounds differently"),
     .offered = ENGINES, .why = "it runs one rank"},
    {WORD("dispatch-dtype", options.dispatch_dtype, dispatch_dtypes),
     HELP("with --ep: how rows travel to the experts of other ranks; fp8: a quarter of the bytes, as FP8 "
          "products of --precision official round them"),
     .offered = ENGINES, .why = "it runs one rank"},
    {TEXT("overlap", options.overlap, "auto|off|2|3"),
     HELP("ranks run steps in so many micro-batches, of which one computes while rows of another "
          "travel; auto: where it was measured to be faster"),
     .offered = ENGINES, .why = "it runs one rank"},
    {INT("null-step-us", options.null_step_us, 0, 60000000),
     HELP("what a step of the null backend takes; default 0"), .offered = ENGINES,
     .why = "there is nothing to compute without a model"},
    {WORD("precision", options.precision, hd_precision_names),
     HELP("number format of activations in GEMMs: exact is float32, fast and official round"),
     .option.on_machine = tell_formats, .offered = ALL},
    {FLAG("no-batch-invariance", options.no_batch_invariance),
     HELP("with fast on a GPU: large GEMMs by cuBLASLt, whose bits depend on the batch"),
     .offered = ALL},
    {WORD("mla", options.mla, mla_forms),
     HELP("attention of V2 and V3: naive is faster for prompts in large chunks; on a GPU with "
          "fast or official"),
     .offered = ALL},
    {WORD("kv-cache-dtype", options.kv_cache_dtype, hd_kv_type_names),
     HELP("number format of the KV cache: bfloat16 takes half the memory, fp8 a quarter; auto is "
          "float32, on a GPU with fast or official bfloat16"),
     .offered = ALL},
    {TEXT("manifest", options.manifest, "FILE"),
     HELP("SHA-256 digests that all files of the model must have"),
     .offered = ENGINES | ENGINE_LOGITS | ENGINE_INSPECT,
     .why = "its weights are random and not read from files"},
    {INT("threads", options.threads, 0, 1024), HELP("threads of the CPU backend; 0: one per core"),
     .offered = ALL},
    {FLAG("pin", options.pin_threads), HELP("bind each thread to a core"), .offered = ALL},
    {INT("max-running", options.max_running, 0, 4096), HELP("choices at once; 0: 16"),
     .offered = ENGINE_SERVE | ENGINE_EVAL | ENGINE_REPLAY | ENGINE_THROUGHPUT,
     .why = "what runs side by side follows from what it is asked for"},
    {INT("max-running", options.max_running, 0, 4096),
     HELP("answers side by side; 0: as many as --n"), .offered = ENGINE_GENERATE},
    {INT("max-running", options.max_running, 0, 4096), HELP("answers side by side; 0: 1"),
     .offered = ENGINE_LATENCY},
    {INT("context", options.max_context, 0, INT32_MAX),
     HELP("tokens of a prompt and its answer; 0: 8192, or what the model knows"),
     .offered = CONVERSATIONS | ENGINE_GENERATE,
     .why = "its sequences are as long as its --tokens"},
    {INT("context", options.max_context, 0, INT32_MAX),
     HELP("tokens of a prompt and its answer; 0: what the load needs"), .offered = BENCH},
    {INT("kv-tokens", options.kv_tokens, 0, INT64_MAX),
     HELP("capacity of the KV pools; 0: two full contexts"),
     .offered = CONVERSATIONS | ENGINE_GENERATE,
     .why = "its KV pools hold just the sequences that it computes"},
    {INT("kv-tokens", options.kv_tokens, 0, INT64_MAX),
     HELP("capacity of the KV pools; 0: what the load needs"), .offered = BENCH},
    {INT("snapshot-tokens", options.snapshot_tokens, 0, INT64_MAX),
     HELP("capacity of host memory for window snapshots; 0: as --kv-tokens, and not more than 16 "
          "pages for each of --max-running, or 256"),
     .offered = ENGINES,
     .why = "it keeps no prefix cache"},
    {GIGABYTES("kv-host", options.kv_host_gb),
     HELP("host memory for KV pages that the device would drop, of each rank; 0: as "
          "--snapshot-tokens says"),
     .offered = ENGINES, .why = "it keeps no prefix cache"},
    {TEXT("kv-disk", options.kv_disk, "DIR:GB"),
     HELP("with --kv-host: keep KV pages in files of a folder, so many gigabytes of them, also "
          "after a restart"),
     .offered = ENGINES, .why = "it keeps no prefix cache"},
    {CHOICE("kv-write", options.kv_write_through, back_through),
     HELP("when KV pages go to host memory and the disk: back: when the device needs their room or "
          "is idle; through: when they are computed; default back"),
     .offered = ENGINES, .why = "it keeps no prefix cache"},
    {TEXT("hisparse", options.hisparse, "auto|off|ROWS"),
     HELP("entries that attention selects lie in host memory, and so many of each layer on "
          "the device; auto: on a GPU where the KV pools do not fit and it pays; default off"),
     .offered = ENGINES, .why = "its KV pools hold just the sequences that it computes"},
    {TEXT("hisparse", options.hisparse, "off|ROWS"),
     HELP("entries that attention selects lie in host memory, and so many of each layer on the "
          "device; default off"),
     .offered = ENGINE_RANK},
    {INT("chunk", options.chunk_tokens, 0, 1 << 20),
     HELP("prompt tokens of a request per step; 0: 256"), .offered = ENGINES},
    {INT("prompt-ms", options.prompt_ms, 0, 3600000),
     HELP("while several requests run, a step has so many prompt tokens that it takes so many "
          "milliseconds; 0: as many as fit"),
     .offered = ENGINES, .why = "it has no scheduler"},
    {INT("chunk", options.chunk_tokens, 0, 1 << 20),
     HELP("tokens of a sequence per step; 0: 256 or less, by how many sequences there are"),
     .offered = ENGINE_LOGITS, .why = "--prompt says what one step reads"},
    {INT("step-tokens", options.step_tokens, 0, 1 << 20),
     HELP("prompt tokens, decoded tokens and drafts of one step; 0: as needed"),
     .offered = ENGINES, .why = "it has no scheduler; its own options say what a step is"},
    {INT("queue", options.queue_limit, 0, 65536), HELP("choices that wait; 0: 1024"),
     .offered = ENGINE_SERVE | ENGINE_REPLAY,
     .why = "nothing waits but what it submits itself"},
    {INT("max-logprobs", options.max_logprobs, 0, HD_MAX_ALTERNATIVES),
     HELP("most alternatives of a token that a request may ask for; 0: 20"),
     .offered = ENGINE_SERVE | ENGINE_REPLAY, .why = "it asks for no alternatives"},
    {WORD("drafter", options.drafter, drafters),
     HELP("auto: the model's own; mtp, dspark: refuse a model with another, but take that of its "
          "folder dspark; none: no drafts"),
     .offered = ENGINES | ENGINE_LOGITS,
     .why = "it runs the drafter only where that is asked for"},
    {FLAG("no-drafts", options.no_drafts), HELP("the same as --drafter none"),
     .offered = ENGINES, .why = "it runs the drafter only where that is asked for"},
    {INT("draft-tokens", draft_tokens, HD_DRAFTS_AUTO, HD_MAX_DRAFTS),
     .option.min_word = "auto",
     HELP("drafts per step, at most a block of DSpark's; auto or -1, the default: as many as "
          "pay"),
     .offered = ENGINES, .why = "it runs the drafter only where that is asked for"},
    {WORD("prompt-decoder", options.prompt_decoder, prompt_decoders),
     HELP("V4.1's last layers compute of a prompt: tail: what later positions read, the default; "
          "whole: every position, with the same result; replay: the last window alone, with "
          "another result"),
     .offered = ENGINES, .why = "its steps compute every position"},
    {FLAG("no-graphs", options.no_graphs),
     HELP("on a GPU: launch every operator by itself, without CUDA graphs"),
     .offered = ENGINES, .why = "its operators are queued one by one where that is measured"},
    {CHOICE("token-history", options.no_token_history, on_off),
     HELP("on: an earlier answer in a conversation keeps the tokens that were sampled"),
     .offered = CONVERSATIONS, .why = "none of its requests holds an earlier answer"},
    {FLAG("routed-experts", options.replay[HD_REPLAY_EXPERTS]),
     HELP("keep the experts of every token, for requests that ask for them"),
     .offered = ENGINE_SERVE, .why = "only requests to a server ask for them"},
    {FLAG("indexer-topk", options.replay[HD_REPLAY_KEYS]),
     HELP("keep the keys that indexers select for every token, for requests that ask for them"),
     .offered = ENGINE_SERVE, .why = "only requests to a server ask for them"},
    {REAL("forced-acceptance", options.forced_acceptance, 0, HD_MAX_DRAFTS),
     HELP("accept this many drafts per step on average; 0: what the model says"),
     .offered = BENCH, .why = "it would make the answers meaningless; benchmarks have it"},
};
/* clang-format on */

const engine_option *engine_options_all(size_t *n) {
    *n = HD_LEN(rows);
    return rows;
}

engine_settings engine_settings_default(void) {
    return (engine_settings){
        .options = {.size = sizeof(hd_engine_options),
                    .backend = backends[0],
                    .cuda_path = hd_cuda_path_names[0],
                    .precision = hd_precision_names[HD_AUTO],
                    .mla = mla_forms[0],
                    .kv_cache_dtype = hd_kv_type_names[0],
                    .tp = 1,
                    .cp = 1,
                    .ep = 1,
                    .dwdp = 1,
                    .expert_split = hd_expert_split_names[0],
                    .dispatch_dtype = dispatch_dtypes[0],
                    .drafter = drafters[0],
                    .prompt_decoder = prompt_decoders[0]},
        .draft_tokens = HD_DRAFTS_AUTO
    };
}

/* ---- the list of one command ---- */

static bool has(const option_list *list, const char *name) {
    for (int i = 0; i < list->n; i++) {
        if (strcmp(list->all[i].name, name) == 0) return true;
    }
    return false;
}

static option_list parsed;

const option_list *engine_options_parsed(void) {
    return &parsed;
}

static void list_options(const command_line *line, engine_command command, engine_settings *s) {
    parsed.n = 0;
    option_list_add(&parsed, line->options, (size_t)line->n_options);
    for (size_t i = 0; i < HD_LEN(rows); i++) {
        if (!(rows[i].offered & (int)command)) continue;
        option o = rows[i].option;
        o.value = (char *)s + rows[i].at;
        option_list_add(&parsed, &o, 1);
    }
}

static int list_absent(option_absent *out) {
    int n = 0;
    for (size_t i = 0; i < HD_LEN(rows); i++) {
        if (!rows[i].why || has(&parsed, rows[i].option.name)) continue;
        out[n++] = (option_absent){rows[i].option.name, rows[i].why};
    }
    return n;
}

bool engine_options_parse(const command_line *line, engine_command command, engine_settings *s,
                          int argc, char **argv, int *code) {
    option_absent absent[HD_LEN(rows)];
    command_line whole = *line;
    list_options(line, command, s);
    whole.options = parsed.all;
    whole.n_options = parsed.n;
    whole.absent = absent;
    if (command != ENGINE_INSPECT) whole.n_absent = list_absent(absent);
    if (!options_parse(&whole, argc, argv, code)) return false;
    s->options.need_drafts = s->draft_tokens > 0;
    const bool none = strcmp(s->options.drafter, "none") == 0;
    if ((!s->options.no_drafts && !none) || !s->options.need_drafts) return true;
    hd_err err = {0};
    HD_FAIL(&err, HD_EINVAL, "--draft-tokens asks for drafts, --%s for none",
            none ? "drafter" : "no-drafts");
    *code = report_error(&err);
    return false;
}

/* ---- their use ---- */

hd_status engine_settings_open(hd_engine **out, const engine_settings *s, bool quiet,
                               hd_err *err) {
    char why[600];
    upload_bar bar = {.quiet = quiet};
    hd_engine_options options = s->options;
    options.on_upload = upload_bar_draw;
    options.on_upload_ctx = &bar;
    const int opened = hd_engine_open(out, &options, why, sizeof why);
    return opened == 0 ? HD_OK : HD_FAIL(err, (hd_status)opened, "%s", why);
}

hd_status engine_settings_ops(const engine_settings *s, hd_ops_options *ops, hd_mla_form *mla,
                              hd_err *err) {
    const hd_engine_options *o = &s->options;
    HD_TRY(hd_mla_form_of(mla, o->mla, err));
    *ops = (hd_ops_options){
        .cpu = {.n_threads = o->threads, .pin = o->pin_threads},
        .gpu = o->gpu,
        .no_batch_invariance = o->no_batch_invariance
    };
    HD_TRY(hd_precision_of(&ops->precision, o->precision, err));
    HD_TRY(hd_kv_type_of(&ops->kv_type, o->kv_cache_dtype, err));
    HD_TRY(hd_cuda_path_of(&ops->cuda_path, o->cuda_path, err));
    if (hd_mla_needs_cpu(*mla, ops->precision)) ops->needs_cpu = "mla naive";
    return HD_OK;
}
