/* engine.h - the engine's interface for API, server and CLI beyond include/hadal.h: prompts
 * that are already parsed, chat template rendering, and the tokenizer. */
#ifndef HD_ENGINE_ENGINE_H
#define HD_ENGINE_ENGINE_H

#include "base/status.h"
#include "hadal.h"
#include "chat/chat.h"
#include "kv/handover.h"
#include "moe/recorder.h"
#include "ops/ops.h"
#include "tokenizer/tokenizer.h"
#include "weights/parallel_config.h"
#include "weights/spec.h"
#include "weights/update.h"

/* Like hd_engine_submit(), but returns a status: HD_EAGAIN if the queue is full, HD_EINVAL
 * for a request that can never run. conversation, unless NULL, replaces g->messages and
 * g->tools. */
hd_status hd_engine_submit_chat(hd_engine *e, uint64_t *id, const hd_request *g,
                                const hd_conversation *conversation, hd_err *err);

/* Renders a conversation by the model's chat template. Release *out with
 * hd_chat_prompt_deinit(). */
hd_status hd_engine_render(const hd_engine *e, hd_chat_prompt *out, const hd_request *g,
                           const hd_conversation *conversation, hd_err *err);

/* Appends the token ids of the prompt to out, as hd_engine_submit_chat() would encode them. */
hd_status hd_engine_encode(const hd_engine *e, hd_ids *out, const hd_request *g,
                           const hd_conversation *conversation, hd_err *err);

const hd_tokenizer *hd_engine_tokenizer(const hd_engine *e); /* NULL with dummy weights */
const hd_model_spec *hd_engine_spec(const hd_engine *e);
hd_chat_encoding hd_engine_encoding(const hd_engine *e);
const char *hd_engine_cuda_path(const hd_engine *e);      /* "sm90"; NULL: not on a GPU */
const char *hd_engine_kv_cache_dtype(const hd_engine *e); /* "float32" */
/* The number format of activations in products, "bfloat16", and the precision that has it. NULL
 * on the null runner. */
const char *hd_engine_activations(const hd_engine *e, hd_precision *precision);
/* The ranks that run the model; their number is hd_parallel_world(). */
const hd_parallel_config *hd_engine_parallel(const hd_engine *e);
/* Why layout "auto" chose these; NULL: the options said it. */
const char *hd_engine_layout_reason(const hd_engine *e);
/* Two ranks in processes of their own, which exchanged bytes before weights were read. */
typedef struct hd_engine_pair {
    int32_t rank[2];
    const char *host[2];
    double rate; /* bytes per second each way */
} hd_engine_pair;
/* Returns how many pairs there are, and pair i in *out. */
int32_t hd_engine_read_pair(const hd_engine *e, int32_t i, hd_engine_pair *out);

/* A rank in a process of its own, as rank 0 found it before weights were read. */
typedef struct hd_engine_found {
    const char *host;
    int64_t clock_ns, within_ns; /* its clock is ahead of rank 0's, to within so much */
    uint64_t free_bytes;         /* of its memory, or of its GPU's */
} hd_engine_found;
/* Returns how many ranks there are, 0 on another rank, and what was found of one in *out. */
int32_t hd_engine_read_found(const hd_engine *e, int32_t rank, hd_engine_found *out);

/* Returns the micro-batches of a step, 1: one; *from: of an attention group's rows, from so many on. */
int32_t hd_engine_micro_batches(const hd_engine *e, int32_t *from);
/* Returns from how many rows on --cp auto divides a step; 0: the ranks do not choose by length. */
int32_t hd_engine_cp_from(const hd_engine *e);
bool hd_engine_thinks(const hd_engine *e); /* whether the model reasons by default */

/* ---- update.c: new weights ---- */

enum { HD_MAX_WEIGHT_VERSION = 256 }; /* bytes of a version's name */

/* Returns the weights, which only hd_engine_update_weights() changes. NULL: they cannot be
 * replaced, as the options say. */
const hd_weights *hd_engine_weights(const hd_engine *e);
/* Returns the GPU of its first rank, which has a copy of them; NULL: they are in host memory. */
hd_device *hd_engine_device(const hd_engine *e);
/* Returns how many threads of the CPU the engine may use, as the options said it. */
int32_t hd_engine_threads(const hd_engine *e);

/* Applies u (weights/update.h) between two steps, and returns when that is done. From then on
 * no prefix computed before is matched. version: the new weights' name, NULL: the old one
 * stays; u NULL: only the name changes. An update must not be applied while another is. The
 * caller still owns u. Unless the engine is paused, running requests are retracted: their KV
 * is computed anew by the new weights. */
hd_status hd_engine_update_weights(hd_engine *e, hd_weights_update *u, const char *version,
                                   hd_err *err);

/* Gives memory (hd_memory bits) back to the system, between two steps, and keeps its addresses.
 * Until hd_engine_resume_memory(), and for weights until updates have brought back every tensor,
 * requests are refused with HD_EAGAIN, and those that wait keep waiting. HD_EINVAL: requests run.
 * What was cached is forgotten. Not while an update is applied. */
hd_status hd_engine_release_memory(hd_engine *e, uint32_t memory, hd_err *err);
hd_status hd_engine_resume_memory(hd_engine *e, uint32_t memory, hd_err *err);

/* The engine owns the name, until it is closed. */
const char *hd_engine_weight_version(hd_engine *e);

/* ---- pages.c: pages of prompts that move between servers ---- */

/* Returns the attention group to which a request with this prompt would go now, and says that it has the
 * prompt's pages from now on. */
hd_status hd_engine_choose_group(hd_engine *e, int32_t *group, uint64_t salt,
                                 const int32_t *tokens, int32_t n, hd_err *err);

/* Refuses engines whose pages cannot move: without a model or host memory for pages, or with
 * entries that depend on chunks. page_bytes: of hd_handover; NULL is fine. */
hd_status hd_engine_check_pages(hd_engine *e, size_t page_bytes[HD_N_KV_GROUPS], hd_err *err);

typedef enum hd_page_work {
    HD_PAGES_LOOK,  /* finds what the cache lacks of a prompt */
    HD_PAGES_PLACE, /* puts a page into the cache */
    HD_PAGES_FIND,  /* finds the longest prefix of a prompt that the cache has */
    HD_PAGES_COPY   /* copies a page out of the cache */
} hd_page_work;

/* What the step thread of an attention group does between two steps, in this process or another.
 * The caller's again when done() is called: once, in any thread, maybe under a lock of the engine, so
 * that it only takes notes. */
typedef struct hd_page_job {
    hd_page_work work;
    uint64_t salt;
    const int32_t *tokens; /* [n_tokens] the prompt */
    int32_t n_tokens;
    const void *message; /* to place: a page message of n bytes, which was checked */
    size_t n;
    bool from_disk;   /* to find: what only the disk has is read into host memory before */
    hd_kv_group kind; /* to copy: the page, and where its bytes go */
    int32_t page;
    void *copy;
    /* Tells the weights in use from those before: 0 until the first update, then by the updates'
     * version names. LOOK and FIND set it; a page is placed or copied only if it is this one. */
    uint64_t weights;
    void (*done)(struct hd_page_job *job);
    hd_page_range lacking; /* set by LOOK; FIND: what is there */
    /* HD_EAGAIN: there is no room, or no such page; HD_EINVAL: the weights are others; HD_EPEER: the group's ranks
     * are lost */
    hd_status status;
    /* the engine's */
    struct hd_page_job *next;
    uint64_t number;
    int32_t group;
} hd_page_job;

/* Jobs of a group run in their order, also while the engine is paused. Those that have not run when
 * it closes never do. */
void hd_engine_post_job(hd_engine *e, int32_t group, hd_page_job *job);

/* As hd_engine_submit_chat(), of one choice, whose pages are exported in their order behind the steps
 * that complete them. The functions take notes like hd_page_job.done(), and are not called after
 * the request's last event. */
typedef struct hd_page_watch {
    void *ctx;
    hd_page_range pages;
    uint64_t weights; /* see hd_page_job */
    /* Returns room for the message of the next page; NULL: no page is wanted any more. */
    void *(*room)(void *ctx, size_t n);
    void (*exported)(void *ctx, hd_status st); /* into that; otherwise no page comes any more */
} hd_page_watch;

hd_status hd_engine_submit_watched(hd_engine *e, uint64_t *id, const hd_request *g,
                                   const hd_page_watch *watch, hd_err *err);

/* A request that names a prefill server. */
typedef struct hd_page_wish {
    uint64_t id;
    const char *server;
    const char *trace_id;  /* "": none */
    const int32_t *tokens; /* [n_tokens] its prompt */
    int32_t n_tokens, priority, group;
    uint64_t salt;
} hd_page_wish;

/* Who fetches pages. Both are called under a lock of the engine: they only take notes, and call
 * no function of the engine. */
typedef struct hd_page_source {
    void *ctx;
    /* True: the request waits until hd_engine_pages_settled(). The strings live during the call. */
    bool (*fetch)(void *ctx, const hd_page_wish *wish);
    void (*cancelled)(void *ctx, uint64_t id); /* it waits no longer */
} hd_page_source;

/* NULL: nobody; no request may wait then. */
void hd_engine_set_page_source(hd_engine *e, const hd_page_source *source);

/* The request waits no longer: the cache has what came. An id that does not wait is ignored. */
void hd_engine_pages_settled(hd_engine *e, uint64_t id);

/* ---- rebalance.c ---- */

/* Orders a plan of the experts' places, and its moves whether or not they pay. Returns at once. */
hd_status hd_engine_rebalance(hd_engine *e, hd_err *err);

/* ---- expert records ---- */

/* Returns what records are taken from; NULL without experts. */
hd_recorder *hd_engine_recorder(const hd_engine *e);

/* Orders to begin a record, in place of the one before, and to end it. They are obeyed between
 * two steps; settled: all were. */
hd_status hd_engine_record_start(hd_engine *e, hd_record_mode mode, hd_err *err);
void hd_engine_record_stop(hd_engine *e);
bool hd_engine_record_settled(hd_engine *e);

#endif
