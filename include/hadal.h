/* hadal.h - the public API of the inference engine: open a model, submit requests, poll
 * events.
 *
 * An hd_engine holds a loaded model, its KV cache, its scheduler and its device. A request
 * is one prompt with its sampling parameters; its output comes back as events. Any thread
 * may submit, cancel, pause and read; exactly one thread polls. The engine copies its
 * arguments and owns what it returns. A request with a given seed has the same output
 * whatever else is in the batch. Times are nanoseconds of one monotonic clock. */
#ifndef HADAL_H
#define HADAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hadal_types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hd_engine hd_engine;

/* Options of hd_engine_open(). Zero selects the default everywhere. */
/* One rank in this process, of a world of `size` processes that meet at rank 0 (docs/ranks.md). */
typedef struct hd_world_options {
    int32_t rank, size;     /* size 0: all ranks are threads of this process */
    const char *rendezvous; /* "HOST:PORT" where rank 0 listens; NULL: HD_WORLD_RENDEZVOUS */
    const char *key;        /* secret of all ranks; NULL: only for loopback */
    const char *job;        /* ranks of another job are refused; NULL: not compared */
    int32_t start_seconds;  /* longest wait for the others; default 60 */
} hd_world_options;

#define HD_WORLD_RENDEZVOUS "127.0.0.1:30100"

enum { HD_CP_AUTO = -1 }; /* hd_engine_options.cp */

typedef struct hd_engine_options {
    size_t size;           /* sizeof(hd_engine_options): the version of this struct */
    const char *model_dir; /* checkpoint directory, never NULL */
    /* For measuring: model_dir is a config.json or its folder, and the weights are random.
     * There is no text: prompts are token ids, events have no deltas, and messages, stop
     * strings and response formats are refused. */
    bool dummy_weights;
    /* "auto", the default: a GPU if one can be used and has enough memory, else the CPU.
     * "cpu", "cuda". "ref": the plain reference. "null": the null runner returns tokens
     * without a model. */
    const char *backend;
    /* Of the cuda backend: which GPU, of those that CUDA shows to this process; default 0. With
     * another than 0, "auto" is "cuda". */
    int32_t gpu;
    /* Of the cuda backend: "auto", the default; "sm90": kernels for Hopper, compute capability 9.0; or
     * "generic": those of every GPU from 8.0 on. */
    const char *cuda_path;
    /* "auto", the default, is "official" on a GPU and "exact" elsewhere. Of the cpu and cuda backends:
     * "exact", or "fast", which rounds activations before GEMMs (docs/numerics.md). A CPU that gains no
     * speed by it computes exactly. Of the cuda and ref backends also "official", which rounds activations
     * to FP8, and V4.1's cached entries, where the published inference programs do. A GPU that is to cache
     * float32 has "exact" with "auto". */
    const char *precision;
    /* Of the cuda backend with "fast": GEMMs of many rows use cuBLASLt, so the bits of a
     * result depend on the rest of the batch (docs/numerics.md). */
    bool no_batch_invariance;
    /* Of the cpu and ref backends: how the KV cache is stored. "auto", the default, is "float32";
     * "bfloat16" takes half the memory, "fp8" a quarter; "fp4", of V4.1 alone, a seventh
     * (docs/numerics.md). A GPU has "auto", which is float32 with "exact" and bfloat16 with the other
     * precisions. */
    const char *kv_cache_dtype;
    /* Ranks: threads of this process that share one model, on the cpu and ref backends
     * (docs/ranks.md). tp: each has a part of every matrix. ep: each has a part of the routed
     * experts. dp: attention groups, each with a scheduler, KV pools and requests of its own. As
     * many ranks as the larger of tp * dp and ep, which must be a multiple of the other. Default
     * 1 of each. max_running, kv_tokens and other capacities, but queue_limit, are of a group. */
    int32_t tp, ep, dp;
    /* Spare slots of all ranks of ep together, which hold copies of experts. */
    int32_t redundant;
    /* "off", the default; "auto": experts move between ranks where that makes steps faster; or a
     * number of steps after which they move to the best places. Texts do not change. */
    const char *rebalance;
    /* "auto": chooses these for so many ranks (or those of world) by the model and by the bytes of
     * memory that each rank has. Default: as tp, ep and dp say. */
    const char *layout;
    int32_t ranks;
    int64_t rank_memory; /* default: an equal part of what is free on the host */
    /* Ranks reduce partial sums: fewer bytes to exchange, and not bit for bit equal. */
    bool sum_in_ranks;
    /* How rows travel to the experts of other ranks: "float32", the default; or "fp8", a quarter of the bytes, as
     * precision "official" rounds what FP8 experts multiply, so that nothing changes there (docs/numerics.md). */
    const char *dispatch_dtype;
    /* "2" or "3": steps run in so many micro-batches, of which one computes while rows of another
     * travel; "off"; "auto", the default: in 2 where measured figures say that it is faster. Texts do not
     * change. For ranks that exchange rows (docs/ranks.md). */
    const char *overlap;
    hd_world_options world;
    /* Attention groups of one rank each that divide the memory of the experts, instead of tp and dp:
     * every rank fetches the experts that it lacks from the others before its layers need them,
     * and no forward pass waits for another rank. With ep above 1, ep times as many ranks: each dwdp of them
     * divide a part of the experts so, and rows travel to the parts. Texts do not change. Default 1
     * (docs/experts.md). */
    int32_t dwdp;
    int32_t prefetch_depth; /* how many layers ahead experts are fetched, 1 to 3; default 1 */
    /* With dwdp, as threads of one process: in steps in which no rank has so many rows, a number or "auto", ranks
     * exchange rows instead, as those of ep do; then ranks begin their steps together. auto: from as many on as
     * take as long to compute as the experts to fetch, both measured. Default: experts are always fetched. */
    const char *dwdp_from;
    /* "off", the default: all routed experts are resident. "auto", or a number of gigabytes of
     * host memory: they stay in the model's files and are staged in this memory when rows choose
     * them; auto takes most of what is free. Texts do not change. For one rank of the cpu and ref
     * backends (docs/experts.md). */
    const char *experts_disk;
    /* "off", the default; "auto", or a number of gigabytes of device memory: routed experts lie in
     * host memory, and those that are used most, beside those that a layer needs next, in this
     * memory; auto takes most of what is free. Texts do not change. For one rank. */
    const char *experts_host;
    /* With experts_host, what computes an expert that is not in device memory: "device", the default, which
     * copies it; "host": processors of the host, where it lies; or "auto": both, so that they end together, by
     * rates that are measured. On a GPU the host rounds sums otherwise (docs/numerics.md). */
    const char *experts_host_compute;
    /* Of a GPU: so many of the 10^9 bytes of its memory that are free at first are used, and no more.
     * Default: all. */
    double device_memory_gb;
    /* With experts_host: 10^9 bytes of host memory that experts may take. What has no room, whole layers, is
     * in device memory only. Default: 0.9 of what is free. */
    double host_memory_gb;
    /* Of V2 and V3, on a GPU not with precision "exact": "absorbed", the default, or "naive" for
     * long prompts, which is faster and not bit for bit equal. */
    const char *mla;
    /* Of the cpu backend, for all ranks together. Default: one thread per core that this process
     * may use, limited by its quota of processor time. */
    int32_t threads;
    bool pin_threads;    /* pin each thread to its own core */
    int32_t max_running; /* choices that run at the same time; default 16 */
    /* Prompt and output tokens of one choice. Default: 8192, or the model's maximum if that
     * is less. Values above the model's maximum are refused. */
    int32_t max_context;
    int64_t kv_tokens; /* capacity of the KV pools in tokens; default: two full contexts */
    /* capacity for snapshots of WINDOW pages in host memory, in tokens; default: kv_tokens, and not more
     * than 16 pages for each of max_running, or 256 */
    int64_t snapshot_tokens;
    /* Host memory of each rank for KV pages that its device would drop, in 10^9 bytes. If
     * snapshot_tokens is 0, half of it is for WINDOW pages. Default: for WINDOW pages only. */
    double kv_host_gb;
    /* "DIR:GB": a folder, and how many 10^9 bytes its files may have, for KV pages that outlive the
     * host memory of kv_host_gb, which must be given, and this process; of all attention groups
     * together. NULL: none (docs/kv.md). */
    const char *kv_disk;
    /* Pages are copied to host memory, and from there to kv_disk, when they are computed (write-through). Default:
     * when the device needs their room, and to the disk when their request has ended and nothing is
     * computed (write-back). */
    bool kv_write_through;
    /* HiSparse, of models whose attention chooses entries (V3.2, V4, V4.1): "off", the default; or a
     * number of rows: the entries that it chooses among lie in host memory, and of each layer so many
     * of them, those that were chosen lately, on the device. "auto" does so on a GPU if the KV pools
     * do not fit and it pays. Texts do not change (docs/kv.md). */
    const char *hisparse;
    /* prefill tokens of one request in one step (chunked prefill); default 256 */
    int32_t chunk_tokens;
    /* While several requests run, prompts get so many tokens of a step that it is predicted to take so
     * many milliseconds; 0: as many as fit. */
    int32_t prompt_ms;
    int32_t step_tokens; /* tokens of one step; default: enough for all running requests */
    int32_t queue_limit; /* choices that may wait; default 1024 */
    /* Most top_logprobs of a request, up to HD_MAX_ALTERNATIVES; default HD_DEFAULT_LOGPROBS. Memory and copies
     * of every step grow with it. */
    int32_t max_logprobs;
    /* "auto": what the model drafts with, if it does; "mtp" or "dspark": refuse a model without
     * it; a folder `dspark` in the model's is another drafter, which "dspark" takes; "none": no
     * drafts. Default: "auto". */
    const char *drafter;
    bool no_drafts;   /* the same as drafter "none" */
    bool need_drafts; /* refuse a model that cannot draft */
    /* What the last layers of V4.1 compute of a prompt: "tail": what later positions read; "whole":
     * every position, with the same result; "replay": the last window alone, in windows that begin
     * there, with another result (docs/kv.md). Default: "tail", which every model accepts. */
    const char *prompt_decoder;
    bool no_graphs; /* launch every operator by itself: no CUDA graphs */
    /* Encode earlier answers from their text alone. Default: reuse the tokens that the model
     * generated for them, if the salt is the same (token history). */
    bool no_token_history;
    /* For benchmarks: accept this many drafts per step on average, whatever the model
     * computes. The text is then meaningless. */
    float forced_acceptance;
    int32_t null_step_us; /* duration of one step of the null runner; default 0 */
    /* Called inside hd_engine_open() while weights are copied to a GPU, with the bytes
     * copied so far and the total. May be NULL. */
    void (*on_upload)(void *ctx, size_t done, size_t total);
    void *on_upload_ctx;
    /* A file of SHA-256 digests, in sha256sum's format, that all files of the model must
     * match. Default: no digests are computed. */
    const char *manifest;
    /* The weights may be replaced while it runs. They are then read into memory of this
     * process, where a change of the files does not reach them. For ranks of one process. */
    bool updatable;
    /* A folder for the values of weights whose memory is given back: without a name, they come back
     * when it is resumed. NULL: they are lost then. */
    const char *weights_backup;
    /* Keep the choices of every position beside its KV pages, for requests that ask for them.
     * For one rank. */
    bool replay[HD_N_REPLAYS];
    /* Context parallelism: cp times as many ranks in an attention group, which divide the rows of
     * prompts in attention; each has the complete KV pools. Default 1. HD_CP_AUTO: as many as there are
     * ranks with the same heads (world, or ep), and prompts so short that it does not pay run on each. */
    int32_t cp;
    /* How the rows of an expert go to its copies, where redundant gives it some: "turns", the default:
     * one after the other; "local": exactly, so that each rank sends equal rows to all ranks as far as
     * their experts allow; "flow": exactly, so that all ranks get equal rows, for which they exchange
     * the rows of each expert in every layer. Texts do not change. Ranks on GPUs: turns (docs/eplb.md). */
    const char *expert_split;
} hd_engine_options;

/* Returns 0, or a negative status: then *out is NULL and why contains one sentence. */
int hd_engine_open(hd_engine **out, const hd_engine_options *options, char *why,
                   size_t why_size);

/* Aborts all requests and releases the engine. e may be NULL. */
void hd_engine_close(hd_engine *e);

/* Returns the number of notices: sentences about oddities of the model that do not prevent
 * it from being served. The engine owns *out and its strings. */
size_t hd_engine_notices(const hd_engine *e, const char *const **out);

/* Returns the backend in use: "cpu", "cuda", "ref" or "null". *no_gpu, unless no_gpu is
 * NULL, is set to a sentence of the engine's that says why "auto" did not choose a GPU. It
 * is set to NULL if "auto" chose one or another backend was named. */
const char *hd_engine_backend(const hd_engine *e, const char **no_gpu);

/* The response format: what the content of a choice must match. docs/grammar.md lists what
 * is supported. */
typedef enum hd_response_format {
    HD_FORMAT_FREE,
    HD_FORMAT_JSON,        /* any JSON object */
    HD_FORMAT_JSON_SCHEMA, /* format_text is the JSON schema */
    HD_FORMAT_REGEX, /* format_text is a regular expression that the whole content must match */
    HD_FORMAT_CHOICE /* one of the strings in choices */
} hd_response_format;

struct hd_event;

/* A request: a prompt with its sampling parameters. Exactly one of tokens, text and messages
 * must be set. Zero selects the default, except for temperature, where it selects greedy
 * sampling. hd_engine_defaults() fills in the values of generation_config.json. */
typedef struct hd_request {
    size_t size;           /* sizeof(hd_request) */
    const int32_t *tokens; /* [n_tokens] the prompt as token ids */
    size_t n_tokens;
    /* The prompt as raw text, NUL-terminated. A BOS is added if the tokenizer's
     * configuration says so. */
    const char *text;
    /* The prompt as OpenAI JSON, rendered by the model's chat template. */
    const char *messages, *tools;
    const char *
        /* NULL or "auto": the model decides. "none". "required". Or the name of a tool,
         * which is then called once. Arguments of a tool with strict: true match the schema
         * of its parameters. Arguments of a forced call match it as far as a grammar can
         * express it. With a response format the model either calls a tool or answers in
         * that format. */
        tool_choice;
    bool one_call; /* at most one tool call per choice */
    int thinking;  /* 1: on, -1: off, 0: the model's default */
    int effort;    /* reasoning effort, if the chat template has one: 1 low, 2 high, 3 max */
    int32_t effort_number; /* of V4.1, instead: 1 to 100; 0: as effort says */

    /* Number of choices. They share the prompt's pages. Default 1. Choice i uses seed + i. */
    int32_t n;
    int32_t max_tokens; /* output tokens of each choice; default: what the context leaves */
    int32_t min_tokens; /* the end of sequence is forbidden before this many tokens */
    /* reasoning budget in tokens, after which reasoning is ended; default: unlimited */
    int32_t max_reasoning;
    int32_t priority; /* higher values are admitted first */
    int64_t queue_timeout_ns;
    uint64_t salt; /* cached prefixes are shared only among requests of equal salt */
    /* A server, as "HOST:PORT", whose pages of the prompt may be fetched instead of computing them
     * here; NULL: none. Changes no output (docs/pd.md). */
    const char *prefill;
    const char *trace_id; /* what both servers call it in their logs; NULL: nothing */

    float temperature, top_p, min_p;
    int32_t top_k;
    float repetition_penalty, presence_penalty, frequency_penalty;
    uint64_t seed;
    const hd_logit_bias *bias; /* [n_bias] */
    size_t n_bias;
    const char *const *stop; /* [n_stop] stop strings */
    size_t n_stop;
    /* [n_stop_tokens] stop tokens, in addition to the end of sequence */
    const int32_t *stop_tokens;
    size_t n_stop_tokens;
    bool ignore_eos;

    hd_response_format response_format; /* of the content, after any reasoning */
    const char *format_text;
    const char *const *choices; /* [n_choices] */
    size_t n_choices;

    /* draft depth: 0 to HD_MAX_DRAFTS, or HD_DRAFTS_AUTO. A number above 0 is refused if
     * the model has no MTP layer. */
    int32_t draft_tokens;
    /* Relaxed acceptance: inside reasoning a draft is also accepted if it is among the
     * relaxed_top most probable tokens and at most relaxed_delta less probable than the
     * first. 0: strict. Changes the distribution. */
    int32_t relaxed_top;
    float relaxed_delta;

    bool keep_stop;    /* the text includes the stop string that was found */
    bool keep_special; /* the text includes special tokens */
    bool unparsed;     /* no reasoning or tool call parser: all text is content */
    /* top log-probabilities of each token, at most max_logprobs */
    int32_t top_logprobs;
    hd_logprob_mode logprob_mode; /* of which distribution they and those of tokens are */
    /* log-probabilities also of prompt tokens, from prompt_logprobs_from (at least 1) on */
    bool prompt_logprobs;
    int32_t prompt_logprobs_from;
    /* what the layers chose from position replay_from (at most the prompt's length) on; the
     * engine must keep it */
    bool replay[HD_N_REPLAYS];
    int32_t replay_from;
    /* An event without tokens after each step that computed a part of the prompt (step.n_prefilled), of
     * choice 0 */
    bool prompt_progress;

    /* Called on the polling thread for each event. If NULL, hd_engine_poll() returns the
     * event. */
    void (*on_event)(void *user, const struct hd_event *event);
    void *user;
} hd_request;

/* Sets temperature, top_p, top_k, min_p and repetition_penalty from generation_config.json,
 * or to neutral values if it does not contain them. No other field changes. */
void hd_engine_defaults(const hd_engine *e, hd_request *g);

/* Returns the request's id, or 0 if it is refused. Then why contains one sentence, and
 * *full, unless full is NULL, tells whether the queue was full, so that a retry may succeed. */
uint64_t hd_engine_submit(hd_engine *e, const hd_request *g, bool *full, char *why,
                          size_t why_size);

/* Aborts a request: its unfinished choices end with HD_FINISH_ABORT. Unknown ids are
 * ignored. */
void hd_engine_cancel(hd_engine *e, uint64_t id);

typedef enum hd_delta_kind {
    HD_DELTA_REASONING, /* text */
    HD_DELTA_CONTENT,   /* text */
    HD_DELTA_CALL,      /* a tool call begins; text: the function's name */
    HD_DELTA_ARGUMENTS, /* text: a piece of the arguments, a JSON object */
    HD_DELTA_CALL_END,  /* the call ends; whole: its arguments are one complete JSON object */
    HD_DELTA_NOTE       /* text: what in the output did not match the chat format */
} hd_delta_kind;

typedef struct hd_delta {
    hd_delta_kind kind;
    int32_t call; /* index of the tool call in the choice: 0, 1, ... */
    bool whole;
    const char *text; /* [n] complete UTF-8 characters, not NUL-terminated */
    size_t n;
} hd_delta;

/* What one step adds to one choice. The deltas may be behind the tokens: text that may be
 * the beginning of a stop string is held back until that is decided. */
typedef struct hd_event {
    uint64_t id;
    void *user;
    int32_t choice; /* index of the choice: 0, 1, ... */
    /* with a finish reason this is the choice's last event */
    hd_step_tokens step;
    const hd_delta *deltas; /* [n_deltas] */
    size_t n_deltas;
    /* with the first event of choice 0, if requested; else n is 0 */
    hd_prompt_logprobs prompt;
    /* with the last event of every choice, if requested: of all positions but that of the last
     * token, which no step has read */
    hd_replay_rows replay[HD_N_REPLAYS];

    bool last;             /* this is the request's last event */
    int32_t stop_token;    /* HD_FINISH_STOP by this token, else -1 */
    const char *stop_text; /* HD_FINISH_STOP by this stop string, else NULL */
    const char *why;       /* HD_FINISH_ERROR: one sentence, else NULL */

    /* totals of the choice so far */
    int32_t prompt_tokens, output_tokens, reasoning_tokens;
    /* Version of the weights that computed the step's tokens; the engine owns it. */
    const char *weight_version;
    /* Drafts of this choice so far, and how many of its output_tokens are accepted drafts.
     * Drafts behind the end of the choice do not count as accepted. The arrays count by
     * position of the draft in its step. */
    int32_t drafted, accepted;
    int32_t drafted_at[HD_MAX_DRAFTS], accepted_at[HD_MAX_DRAFTS];
    int32_t retracted;                 /* how often the choice was preempted */
    int64_t submitted_ns, admitted_ns; /* admitted_ns is 0 while it waits */
} hd_event;

/* Returns the next event in *out, valid until the next call. Returns false if there was none
 * within timeout_ns (0: do not wait; negative: wait without limit), or if the engine is idle
 * and no event is pending. */
bool hd_engine_poll(hd_engine *e, hd_event *out, int64_t timeout_ns);

/* Makes a waiting hd_engine_poll() return false soon. Any thread may call it, also one that
 * handles signals. */
void hd_engine_wake(hd_engine *e);

/* ---- control ---- */

/* For a rank other than 0 of a world of processes: computes what rank 0 commands until that
 * closes its engine. Returns 0 or an HD_ code, with the reason as hd_engine_open() gives it. No
 * other function but hd_engine_close() may be called on such an engine. */
int hd_engine_follow(hd_engine *e, char *why, size_t why_size);

enum { HD_MAX_WORLD_TEXT = 200 };

/* A world of ranks in processes. */
typedef struct hd_world_figures {
    int32_t size, working; /* ranks; of them those that have a place in the layout */
    uint32_t epoch;        /* rises when ranks are lost or come back */
    bool serves; /* false: requests wait for lost ranks, or until the others begin anew */
    /* which rank was lost and how, until all work again; else empty */
    char lost[HD_MAX_WORLD_TEXT];
} hd_world_figures;

/* Returns false if all ranks are in this process. Any thread. */
bool hd_engine_read_world(hd_engine *e, hd_world_figures *out);

typedef enum hd_rank_state {
    HD_RANK_ACTIVE,
    HD_RANK_STANDBY, /* it is there, and the layout of those that work has no place for it */
    HD_RANK_LOST
} hd_rank_state;

typedef struct hd_rank_status {
    hd_rank_state state;
    int32_t group;           /* attention group of a rank that works */
    hd_rank_figures figures; /* of another process, as of half a second ago at most */
} hd_rank_status;

/* Copies what the first `max` ranks do, and returns how many there are; 0: there is one, or they
 * exchange nothing. Any thread. */
int32_t hd_engine_read_ranks(hd_engine *e, hd_rank_status *out, int32_t max);

/* refuse new submissions from now on; accepted requests finish */
void hd_engine_drain(hd_engine *e);

typedef enum hd_pause {
    HD_PAUSE_ABORT,   /* running and waiting requests are aborted */
    HD_PAUSE_RETRACT, /* running requests are preempted and return to the queue */
    HD_PAUSE_IN_PLACE /* running requests keep their slots and pages */
} hd_pause;

/* No step runs until resumed. Does not wait for the step that runs. Returns the pause's number,
 * from 1 on: it is in effect when hd_engine_stats.pauses has reached it. */
uint64_t hd_engine_pause(hd_engine *e, hd_pause how);
void hd_engine_resume(hd_engine *e);
void hd_engine_flush(hd_engine *e); /* empties the prefix cache, except for pages in use */

/* ---- reading ---- */

/* Memory that an engine can give back while it is not needed. */
typedef enum hd_memory { HD_MEMORY_WEIGHTS = 1, HD_MEMORY_KV = 2 } hd_memory;

/* Moves of experts between ranks. */
typedef struct hd_rebalance_figures {
    bool on;
    const char *state;           /* watch, stage, verify, flip, drop, wait; NULL: off */
    int64_t plans, flips, moves; /* plans carried out; layers, experts that moved */
    int64_t interrupted;         /* plans given up; the maps before stayed in force */
    double bytes;                /* of the experts that moved */
    int64_t looks;               /* at the rows of the ranks */
    /* mean over layers of mean / max of the ranks' rows between the last two looks; what no places
     * of experts would exceed; what the places at the start would have given */
    double balancedness, bound, at_start;
    int32_t single_copies; /* experts, of all layers, that one slot holds */
    int32_t layers_left;   /* of the plan that is carried out */
    char why[128];         /* why the last one was given up */
} hd_rebalance_figures;

/* Experts that are elsewhere: in the model's files (experts_disk), in host memory (experts_host) or in
 * the memory of other ranks (dwdp). Of several ranks, all together. */
typedef struct hd_expert_figures {
    const char *source; /* "file", "host" or "peer"; NULL: all are resident */
    int32_t slots,
        elsewhere;     /* experts that fit into memory, of how many; 0: all are resident */
    size_t slot_bytes; /* memory of one, and what is copied to fetch it at most */
    int64_t used;      /* by layers; of them staged already */
    int64_t staged;
    int64_t fetched, failed; /* fetches, and those of them that failed */
    int64_t fetched_bytes;
    int64_t predicted,
        right;       /* experts elsewhere that the layer before predicted; of them, used */
    int64_t ahead;   /* of the fetches: by a prediction */
    int64_t moved;   /* experts that became resident because they were used most */
    int64_t wait_ns; /* time in steps without one that could be computed */
    int64_t sent,
        sent_rows;   /* of those used, the host computed (experts_host_compute); their rows */
    int64_t sent_ns; /* time in which it computed */
    int64_t split_ns,
        split_predicted_ns; /* time of layers with such, and as it was predicted */
    /* dwdp_from: steps that fetched experts, and the rows from which on; 0: not known yet */
    int64_t fetch_steps, fetch_from;
    int64_t network_bytes; /* of those fetched: from other hosts */
    int64_t file_bytes;    /* of those fetched: other hosts did not send them */
    int64_t refused;       /* connections from other hosts that sent what is no request */
} hd_expert_figures;

/* Rows of V4.1's Engram tables, which lie in the model's files: of each the row and its scales. */
typedef struct hd_engram_figures {
    int64_t pieces;     /* that steps asked the system for */
    int64_t resident;   /* of them: were in memory */
    int64_t read_bytes; /* of the pages that were not */
    int64_t skipped;    /* that were not asked for, because the steps before were not done */
} hd_engram_figures;

/* KV pages on a disk (kv_disk). */
typedef struct hd_kv_disk_figures {
    int32_t extents[HD_N_KV_GROUPS],
        pages[HD_N_KV_GROUPS]; /* room for pages; pages; 0: no disk */
    int64_t written[HD_N_KV_GROUPS], read[HD_N_KV_GROUPS]; /* pages */
    int64_t replaced[HD_N_KV_GROUPS];                      /* pages that made room for others */
    int64_t tokens;              /* of prompts, whose entries were read */
    int64_t read_bytes, read_ns; /* of prefixes; from when they were asked for */
    /* transfers that failed, wrong checksums among them; prefixes that took longer than computing
     * them; those that were not read because computing was predicted to be sooner */
    int64_t write_failed, read_failed, late, declined;
    uint64_t bytes; /* that the files may have */
} hd_kv_disk_figures;

/* Entries that attention chooses among, in host memory (hisparse). */
typedef struct hd_hisparse_figures {
    int32_t rows;      /* of each layer's buffer on the device; 0: all lie there */
    size_t host_bytes; /* of all ranks */
    int64_t selected,
        fetched; /* entries that rows selected; of them, those that the buffer lacked */
} hd_hisparse_figures;

typedef struct hd_engine_stats {
    int32_t waiting, running, max_running; /* as of the end of the last step */
    int32_t fetching;                      /* choices that wait for pages of another server */
    /* submitted choices whose last event was not polled; also correct while a step hangs */
    int32_t living;
    bool paused;       /* paused, and no step is running */
    int64_t paused_ns; /* when the pause began, by the clock of last_step_ns; 0: not paused */
    uint64_t pauses;   /* pauses before which the last step has ended */
    bool draining;
    int64_t steps, rows, finished, retracted;
    int64_t drafted_at[HD_MAX_DRAFTS], accepted_at[HD_MAX_DRAFTS];
    int64_t prompt_tokens, cached_tokens, output_tokens;
    int32_t pages[HD_N_KV_GROUPS], pages_free[HD_N_KV_GROUPS], pages_cached[HD_N_KV_GROUPS];
    int32_t page_tokens;
    /* pages of host memory; pages copied to it and back */
    int32_t host_pages[HD_N_KV_GROUPS], host_free[HD_N_KV_GROUPS];
    int64_t host_saved[HD_N_KV_GROUPS], host_loaded[HD_N_KV_GROUPS];
    int64_t host_cached_tokens; /* of cached_tokens: entries came from host memory */
    /* windows that were in no tier and were computed again, and positions for them */
    int64_t rebuilt_windows, rebuilt_rows;
    hd_kv_disk_figures kv_disk; /* its tokens are among those of the host */
    size_t
        page_bytes[HD_N_KV_GROUPS]; /* of one page in all layers of a rank, without choices */
    int64_t step_ns;                /* total time in steps */
    int64_t host_ns;     /* the part of step_ns in which the host did not wait for the device */
    int64_t graph_steps; /* decode steps that were launched as one CUDA graph */
    int64_t micro_steps; /* steps that ran in several micro-batches */
    int64_t graph_ns;    /* GPU time in them */
    /* GPU idle time between one graph and the next that was queued meanwhile */
    int64_t gap_ns;
    int64_t gaps[HD_GAP_BINS]; /* histogram of these idle times */
    /* recorded graphs, and the host's time for recording, which host_ns does not include */
    int64_t graphs, record_ns;
    int64_t last_step_ns; /* when the last step ended */
    size_t weight_bytes, kv_bytes, activation_bytes;
    int32_t max_context;
    int64_t weight_updates;    /* how often weights were replaced */
    int64_t weight_updates_ns; /* time without steps in which they were copied */
    /* why no request can run before memory or weights are back: "memory_released",
     * "weights_released" or "weights_incomplete"; else NULL */
    const char *hindrance;
    uint32_t released; /* hd_memory bits: memory that was given back to the system */
    size_t released_bytes;
    int32_t weights_lost;              /* tensors to be updated before any request can run */
    int64_t replay_rows[HD_N_REPLAYS]; /* positions whose choices were given to requests */
    size_t replay_bytes[HD_N_REPLAYS]; /* host memory in which they are kept */
    int64_t audits; /* checks, after one idle second, that every page and slot is free */
    /* audits that failed; then all pages and slots were freed and the prefix cache emptied */
    int64_t audits_failed;
    /* steps that were given up because a rank failed; their requests ran again */
    int64_t rank_failures;
    char rank_failure[128]; /* why, of the last one */
    bool ranks_lost;        /* restarts were of no use: what runs ends with that error */
    char audit_missed[128]; /* what was missing in the last failed audit */
    hd_rebalance_figures rebalance;
    hd_expert_figures experts;
    hd_engram_figures engram;
    hd_hisparse_figures hisparse;
} hd_engine_stats;

void hd_engine_read_stats(hd_engine *e, hd_engine_stats *out);

/* Reads those of one attention group, if there is group `group`: steps, requests, pages and memory
 * of its own. Returns the number of groups. */
int32_t hd_engine_read_group(hd_engine *e, int32_t group, hd_engine_stats *out);

typedef enum hd_phase { HD_PHASE_WAITING, HD_PHASE_PREFILL, HD_PHASE_DECODE } hd_phase;

typedef struct hd_request_status {
    uint64_t id;
    int32_t choice;
    hd_phase phase;
    int32_t prompt_tokens, cached_tokens, done_tokens, output_tokens;
} hd_request_status;

/* Writes the status of running and waiting requests, most important first, to out[max].
 * Returns how many were written. */
size_t hd_engine_read_requests(hd_engine *e, hd_request_status *out, size_t max);

/* Rows that each routed expert has computed: load[layer * n_experts + expert], at most one
 * second and one step old. Returns layers * experts, or 0 without experts. Writes nothing if
 * max is less. Never waits for a step. */
size_t hd_engine_read_experts(hd_engine *e, int64_t *load, size_t max, int32_t *n_experts);

#ifdef __cplusplus
}
#endif

#endif
