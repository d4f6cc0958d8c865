/* kv_saved.c - endpoints that save the pages of a conversation under a name, bring them back, list and
 * delete them.
 *
 * A save or a restore has a thread. It takes pages out of the cache and puts them there by jobs of the
 * step thread (engine.h), one page at a time, so that steps run between them. */
#include "server/kv_saved.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/job.h"
#include "base/progress.h"
#include "engine/kv_disk.h"
#include "kv/saved.h"
#include "server/server_internal.h"

enum {
    MOST_CALLS = 8, /* saves and restores at a time */
    TRIES = 3       /* of a save whose pages are dropped meanwhile */
};

struct kv_saved {
    hd_saved *folder;
    hd_engine *engine;
    hd_saved_head own; /* what files of this server have in their heads */
    int32_t max_context, n_groups;
    atomic_bool stopping;
    pthread_mutex_t lock; /* guards running */
    pthread_cond_t ended;
    int32_t running;
};

/* ---- parameters ---- */

#define AT(field) offsetof(api_request, field)

/* clang-format off */
static const api_param name_params[] = {
    {"name", API_STRING, AT(saved_name), .high = HD_SAVED_NAME, .about = "of the saved conversation"},
};
static const api_param salt_params[] = {
    {"cache_salt", API_STRING, AT(cache_salt), .high = API_MAX_SALT,
     .about = "as requests that have the prefix, or shall have it"},
    {"extra_key", API_STRING, AT(extra_key), .high = API_MAX_SALT, .about = "as cache_salt"},
    {"api_key_sha256", API_STRING, AT(key_digest), .high = 64,
     .about = "the SHA-256 digest of their API key; the key of this request without it"},
};
static const api_param save_params[] = {
    {"prompt", API_ANY, AT(prompt), .about = "a text, or token ids"},
    {"text", API_ANY, AT(text), .about = "as prompt"},
    {"input_ids", API_ARRAY, AT(input_ids), .about = "token ids"},
};
static const api_param restore_params[] = {
    {"return_input_ids", API_BOOL, AT(w.prompt_ids), .about = "the ids of the tokens too"},
};
/* clang-format on */
static const api_section name_section = API_SECTION(name_params);
static const api_section salt_section = API_SECTION(salt_params);
static const api_section save_section = API_SECTION(save_params);
static const api_section restore_section = API_SECTION(restore_params);

static const char *const wants_name[] = {"name", NULL};
const api_family kv_save_family = {
    .name = "KvSaveRequest",
    .endpoint = "/kv/save",
    .required = wants_name,
    .sections = {&name_section, &salt_section, &save_section, &api_conversation_section},
    .closed = true
};
const api_family kv_restore_family = {
    .name = "KvRestoreRequest",
    .endpoint = "/kv/restore",
    .required = wants_name,
    .sections = {&name_section, &salt_section, &restore_section},
    .closed = true
};
const api_family kv_delete_family = {.name = "KvDeleteRequest",
                                     .endpoint = "/kv/delete",
                                     .required = wants_name,
                                     .sections = {&name_section},
                                     .closed = true};

/* ---- a call ---- */

typedef struct kv_call kv_call;

struct kv_call {
    kv_saved *kv;
    http_call *http;
    void (*work)(kv_call *c);
    char name[HD_SAVED_NAME + 1];
    uint64_t salt;
    int32_t group;   /* of attention: whose pages these are */
    int32_t *tokens; /* [n + 1] the last is 0 */
    size_t n;
    bool with_ids;
    int64_t begun_ns;
    uint8_t *message; /* room for the message of a page */
    json_t *reply;    /* NULL: refused */
};

/* What went wrong, by status and code. */
static bool refuse(const kv_call *c, int status, const char *code, const char *why) {
    const char *type = status >= 500 ? "server_error" : "invalid_request_error";
    if (status == 503) http_reply_header(c->http, "Retry-After", "1");
    http_error(c->http, status, type, code, NULL, "%s", why);
    return false;
}

static bool refuse_folder(const kv_call *c, const hd_err *err) {
    switch (err->status) {
    case HD_EINVAL:
        return refuse(c, 404, "not_saved", err->msg);
    case HD_EFORMAT:
        return refuse(c, 422, "bad_file", err->msg);
    case HD_ENOMEM:
        return refuse(c, 507, "no_room", err->msg);
    default:
        return refuse(c, 500, "folder_failed", err->msg);
    }
}

/* A job, and who waits for it. */
typedef struct awaited_job {
    hd_page_job job;
    pthread_mutex_t lock;
    pthread_cond_t done;
    bool is_done;
} awaited_job;

static void on_done(hd_page_job *job) {
    awaited_job *j = (awaited_job *)job;
    pthread_mutex_lock(&j->lock);
    j->is_done = true;
    pthread_cond_signal(&j->done);
    pthread_mutex_unlock(&j->lock);
}

static void run_job(const kv_call *c, hd_page_job *job) {
    awaited_job j = {.job = *job};
    j.job.salt = c->salt;
    j.job.tokens = c->tokens;
    j.job.n_tokens = (int32_t)c->n + 1;
    j.job.done = on_done;
    pthread_mutex_init(&j.lock, NULL);
    pthread_cond_init(&j.done, NULL);
    hd_engine_post_job(c->kv->engine, c->group, &j.job);
    pthread_mutex_lock(&j.lock);
    while (!j.is_done) pthread_cond_wait(&j.done, &j.lock);
    pthread_mutex_unlock(&j.lock);
    pthread_cond_destroy(&j.done);
    pthread_mutex_destroy(&j.lock);
    *job = j.job;
}

/* Finds the usable prefix of the call's tokens, and the weights in use. */
static bool find(const kv_call *c, bool from_disk, hd_page_job *job) {
    *job = (hd_page_job){.work = HD_PAGES_FIND, .from_disk = from_disk};
    run_job(c, job);
    return job->status == HD_OK ||
           refuse(c, 503, "unavailable", "the memory of pages is released, or ranks are lost");
}

/* Chooses the attention group that has most of the prefix in memory. */
static void choose_group(kv_call *c) {
    int32_t most = -1, best = 0;
    for (c->group = 0; c->group < c->kv->n_groups; c->group++) {
        hd_page_job job = {.work = HD_PAGES_FIND};
        run_job(c, &job);
        if (job.status != HD_OK || job.lacking.n[HD_KV_FULL] <= most) continue;
        most = job.lacking.n[HD_KV_FULL];
        best = c->group;
    }
    c->group = best;
}

static hd_handover side_of(const kv_call *c, uint64_t salt) {
    const hd_saved_head *own = &c->kv->own;
    return (hd_handover){
        .page_tokens = (int32_t)own->page_tokens,
        .page_bytes = {(size_t)own->page_bytes[0], (size_t)own->page_bytes[1]},
        .salt = salt,
        .tokens = c->tokens,
        .n_tokens = (int32_t)c->n + 1
    };
}

static bool may_go_on(const kv_call *c) {
    return !atomic_load(&c->kv->stopping) ||
           refuse(c, 503, "stopping", "the server is being closed");
}

static json_t *reply_of(const kv_call *c, int64_t tokens, int64_t pages, int64_t windows,
                        uint64_t bytes) {
    return json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:f}", "status", "ok", "name", c->name,
                     "tokens", (json_int_t)tokens, "pages", (json_int_t)pages, "window_pages",
                     (json_int_t)windows, "bytes", (json_int_t)bytes, "milliseconds",
                     (double)(hd_now_ns() - c->begun_ns) * 1e-6);
}

/* ---- save ---- */

/* Copies the pages into a file. HD_EAGAIN: one was dropped meanwhile. */
static hd_status write_pages(const kv_call *c, hd_saved_file *f, const hd_page_job *found,
                             hd_err *err) {
    const hd_handover side = side_of(c, c->salt);
    const hd_page_range *range = &found->lacking;
    for (uint32_t i = 0; i < hd_page_range_size(range); i++) {
        hd_page_job job = {.work = HD_PAGES_COPY, .weights = found->weights};
        job.page = hd_page_range_at(range, i, &job.kind);
        job.copy = c->message + sizeof(hd_page_head);
        if (atomic_load(&c->kv->stopping)) {
            return HD_FAIL(err, HD_EPEER, "the server is being closed");
        }
        run_job(c, &job);
        if (job.status != HD_OK) {
            return HD_FAIL(err, job.status, "pages were dropped while they were saved");
        }
        hd_handover_seal(&side, job.kind, job.page, c->message);
        HD_TRY(hd_saved_add(f, c->message, hd_handover_bytes(&side, job.kind), err));
    }
    return hd_saved_finish(f, err);
}

static hd_status save_once(const kv_call *c, const hd_page_job *found, uint64_t *bytes,
                           hd_err *err) {
    const hd_page_range *range = &found->lacking;
    hd_saved_file f;
    hd_saved_head head = c->kv->own;
    head.salt = c->salt;
    head.weights = found->weights;
    for (int g = 0; g < HD_N_KV_GROUPS; g++) head.n[g] = (uint32_t)range->n[g];
    head.n_tokens = head.n[HD_KV_FULL] * head.page_tokens;
    HD_TRY(hd_saved_create(&f, c->kv->folder, c->name, &head, c->tokens, err));
    *bytes = f.bytes;
    const hd_status st = write_pages(c, &f, found, err);
    hd_saved_drop(&f);
    return st;
}

static void save(kv_call *c) {
    hd_page_job found;
    uint64_t bytes = 0;
    hd_err err = {0};
    hd_status st = HD_EAGAIN;
    if (c->kv->n_groups > 1) choose_group(c);
    for (int i = 0; i < TRIES && st == HD_EAGAIN; i++) {
        if (!find(c, true, &found)) return;
        if (found.lacking.n[HD_KV_FULL] == 0) {
            refuse(c, 404, "not_cached", "the server has no whole page of this prefix");
            return;
        }
        st = save_once(c, &found, &bytes, &err);
    }
    if (st == HD_EAGAIN || st == HD_EPEER) {
        refuse(c, 503, "unavailable", err.msg);
    } else if (st == HD_EINVAL) {
        refuse(c, 409, "other_weights", "the weights were replaced while pages were saved");
    } else if (st != HD_OK) {
        refuse_folder(c, &err);
    } else {
        const hd_page_range *range = &found.lacking;
        const int64_t tokens = (int64_t)range->n[HD_KV_FULL] * c->kv->own.page_tokens;
        c->reply = reply_of(c, tokens, range->n[HD_KV_FULL], range->n[HD_KV_WINDOW], bytes);
        json_object_set_new(c->reply, "not_cached_tokens",
                            json_integer((json_int_t)c->n - tokens));
    }
}

/* ---- restore ---- */

/* Puts all pages of a file into the cache; fewer if there is no room. */
static bool place_pages(kv_call *c, hd_saved_file *f, const hd_saved_head *head,
                        uint64_t weights) {
    const hd_handover side = side_of(c, head->salt);
    const uint32_t n_full = head->n[HD_KV_FULL];
    for (uint32_t i = 0; i < n_full + head->n[HD_KV_WINDOW]; i++) {
        hd_err err = {0};
        const size_t n = hd_handover_bytes(&side, i < n_full ? HD_KV_FULL : HD_KV_WINDOW);
        if (!may_go_on(c)) return false;
        if (hd_saved_next(f, c->message, n, &err) != HD_OK) return refuse_folder(c, &err);
        if (hd_handover_check(&side, c->message, n, &err) != HD_OK) {
            return refuse_folder(c, &err);
        }
        hd_page_job job = {
            .work = HD_PAGES_PLACE, .message = c->message, .n = n, .weights = weights};
        run_job(c, &job);
        if (job.status == HD_EAGAIN) return true;
        if (job.status == HD_EINVAL) {
            return refuse(c, 409, "other_weights", "the weights were replaced meanwhile");
        }
        if (job.status != HD_OK) return refuse(c, 503, "unavailable", "ranks are lost");
    }
    return true;
}

static void restore_file(kv_call *c, hd_saved_file *f, const hd_saved_head *head) {
    hd_page_job found;
    hd_err err = {0};
    if (head->n_tokens > (uint32_t)c->kv->max_context) {
        refuse(c, 422, "bad_file", "the conversation is longer than the context");
        return;
    }
    if (hd_engine_choose_group(c->kv->engine, &c->group, c->salt, c->tokens,
                               (int32_t)head->n_tokens, &err) != HD_OK) {
        refuse(c, 503, "out_of_memory", err.msg);
        return;
    }
    if (!find(c, false, &found)) return;
    if (found.weights != head->weights) {
        refuse(c, 409, "other_weights", "the pages were saved with other weights");
        return;
    }
    if (!place_pages(c, f, head, found.weights) || !find(c, false, &found)) return;
    const hd_page_range *range = &found.lacking;
    const int64_t tokens = (int64_t)range->n[HD_KV_FULL] * head->page_tokens;
    if (tokens < (int64_t)c->n) {
        refuse(c, 503, "no_room",
               "the host memory of --kv-host has no room for the pages of the conversation");
        return;
    }
    c->reply = reply_of(c, tokens, range->n[HD_KV_FULL], range->n[HD_KV_WINDOW], f->bytes);
    if (!c->with_ids) return;
    json_t *ids = json_array();
    for (size_t i = 0; i < c->n; i++) json_array_append_new(ids, json_integer(c->tokens[i]));
    json_object_set_new(c->reply, "input_ids", ids);
}

static void restore(kv_call *c) {
    hd_saved_file f;
    hd_saved_head head;
    hd_err err = {0};
    if (hd_saved_read(&f, c->kv->folder, c->name, &c->kv->own, &head, &c->tokens, &err) !=
        HD_OK) {
        refuse_folder(c, &err);
        return;
    }
    c->n = head.n_tokens;
    restore_file(c, &f, &head);
    hd_saved_end(&f);
}

/* ---- threads ---- */

static void free_call(kv_call *c) {
    if (!c) return;
    free(c->tokens);
    free(c->message);
    free(c);
}

static bool enter(kv_saved *k) {
    pthread_mutex_lock(&k->lock);
    const bool may = k->running < MOST_CALLS && !atomic_load(&k->stopping);
    k->running += may;
    pthread_mutex_unlock(&k->lock);
    return may;
}

static void leave(kv_saved *k) {
    pthread_mutex_lock(&k->lock);
    k->running--;
    pthread_cond_signal(&k->ended);
    pthread_mutex_unlock(&k->lock);
}

static void *run(void *arg) {
    kv_call *c = arg;
    kv_saved *k = c->kv;
    http_call *http = c->http;
    c->work(c);
    if (c->reply) server_reply_json(http, 200, c->reply);
    free_call(c);
    http_release(http);
    leave(k);
    return NULL;
}

/* The call is the thread's from now on. */
static void start(kv_call *c) {
    pthread_attr_t detached;
    pthread_t thread;
    if (!enter(c->kv)) {
        refuse(c, 503, "too_many_run", "as many saves and restores as may run already");
        free_call(c);
        return;
    }
    http_retain(c->http);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    const bool started = pthread_create(&thread, &detached, run, c) == 0;
    pthread_attr_destroy(&detached);
    if (started) return;
    leave(c->kv);
    refuse(c, 503, "out_of_memory", "no thread for this call");
    http_release(c->http);
    free_call(c);
}

static kv_call *new_call(kv_saved *k, const api_request *r, void (*work)(kv_call *c)) {
    const uint64_t *bytes = k->own.page_bytes;
    kv_call *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->message = malloc(sizeof(hd_page_head) + (bytes[0] > bytes[1] ? bytes[0] : bytes[1]));
    c->kv = k;
    c->http = r->call;
    c->work = work;
    c->salt = r->g.salt;
    c->with_ids = r->w.prompt_ids;
    c->begun_ns = http_start_ns(r->call);
    snprintf(c->name, sizeof c->name, "%s", r->saved_name);
    if (c->message) return c;
    free_call(c);
    return NULL;
}

/* ---- handlers ---- */

static bool check_name(api_request *r) {
    hd_err err = {0};
    if (!r->saved_name) {
        return api_refuse(r, "missing_required_parameter", "name", "name is missing");
    }
    return hd_saved_check_name(r->saved_name, &err) == HD_OK ||
           api_refuse(r, "invalid_value", "name", "%s", err.msg);
}

static bool out_of_memory(api_request *r) {
    return api_refuse_status(r, 503, "out_of_memory", NULL, "no memory for the request");
}

static bool copy_ids(api_request *r, kv_call *c, const int32_t *ids, size_t n) {
    if (n > (size_t)r->max_context) {
        return api_refuse(r, "context_length_exceeded", NULL, "%zu tokens; at most %d fit", n,
                          r->max_context);
    }
    c->tokens = calloc(n + 1, sizeof *c->tokens);
    if (!c->tokens) return out_of_memory(r);
    if (n) memcpy(c->tokens, ids, n * sizeof *ids);
    c->n = n;
    return true;
}

static bool take_conversation(api_request *r, kv_call *c) {
    hd_ids ids = {0};
    const bool ok = api_take_thinking(r) && api_take_messages(r) && api_render_ids(r, &ids) &&
                    copy_ids(r, c, ids.ids, ids.n);
    hd_ids_deinit(&ids);
    return ok;
}

static bool take_tokens(api_request *r, kv_call *c) {
    const int given = (r->messages != NULL) + (r->prompt != NULL) + (r->text != NULL) +
                      (r->input_ids != NULL);
    json_t *one = r->prompt ? r->prompt : r->text ? r->text : r->input_ids;
    const char *param = r->prompt ? "prompt" : r->text ? "text" : "input_ids";
    api_prompt *prompts;
    int32_t n;
    if (given != 1) {
        return api_refuse(r, "missing_required_parameter", "messages",
                          "give one of messages, prompt, text and input_ids");
    }
    if (r->messages) return take_conversation(r, c);
    if (!api_take_prompts(r, one, param, &prompts, &n)) return false;
    if (n != 1) return api_refuse(r, "invalid_value", param, "%s must be one prompt", param);
    return copy_ids(r, c, prompts->tokens, prompts->n);
}

/* Opens the request; false: it was refused or handed over, and is closed. */
static bool open_request(api_request *r, http_call *http, server *s, const api_family *family) {
    if (!s->saved) {
        http_error(http, 501, "invalid_request_error", "no_folder", NULL,
                   "conversations are not saved: the server was started without --kv-save");
        return false;
    }
    if (api_request_open(r, http, &s->api, family, HTTP_OPENAI) && check_name(r)) return true;
    api_request_send_refusal(r);
    api_request_close(r);
    return false;
}

static void on_save(http_call *http, void *user) {
    server *s = user;
    api_request r;
    if (!open_request(&r, http, s, &kv_save_family)) return;
    kv_call *c = new_call(s->saved, &r, save);
    if (!c) out_of_memory(&r);
    if (c && take_tokens(&r, c)) {
        start(c);
    } else {
        api_request_send_refusal(&r);
        free_call(c);
    }
    api_request_close(&r);
}

static void on_restore(http_call *http, void *user) {
    server *s = user;
    api_request r;
    if (!open_request(&r, http, s, &kv_restore_family)) return;
    kv_call *c = new_call(s->saved, &r, restore);
    if (c) {
        start(c);
    } else {
        out_of_memory(&r);
        api_request_send_refusal(&r);
    }
    api_request_close(&r);
}

static void on_delete(http_call *http, void *user) {
    server *s = user;
    api_request r;
    hd_err err = {0};
    const kv_call c = {.http = http};
    if (!open_request(&r, http, s, &kv_delete_family)) return;
    if (hd_saved_delete(s->saved->folder, r.saved_name, &err) == HD_OK) {
        server_reply_json(http, 200,
                          json_pack("{s:s, s:s}", "status", "ok", "name", r.saved_name));
    } else {
        refuse_folder(&c, &err);
    }
    api_request_close(&r);
}

static void on_list(http_call *http, void *user) {
    server *s = user;
    hd_saved_entry *all;
    size_t n;
    uint64_t used, limit;
    hd_err err = {0};
    const kv_call c = {.http = http};
    if (!s->saved) {
        server_reply_json(http, 200,
                          json_pack("{s:[], s:i, s:i}", "saved", "bytes", 0, "limit_bytes", 0));
        return;
    }
    if (hd_saved_list(s->saved->folder, &all, &n, &err) != HD_OK) {
        refuse_folder(&c, &err);
        return;
    }
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) {
        json_array_append_new(list, json_pack("{s:s, s:I, s:I}", "name", all[i].name, "bytes",
                                              (json_int_t)all[i].bytes, "saved",
                                              (json_int_t)all[i].saved_s));
    }
    free(all);
    hd_saved_usage(s->saved->folder, &used, &limit);
    server_reply_json(http, 200,
                      json_pack("{s:o, s:I, s:I}", "saved", list, "bytes", (json_int_t)used,
                                "limit_bytes", (json_int_t)limit));
}

const http_route kv_routes[] = {
    {"POST", "/kv/save",    HTTP_ADMIN, HTTP_OPENAI, on_save   },
    {"POST", "/kv/restore", HTTP_ADMIN, HTTP_OPENAI, on_restore},
    {"POST", "/kv/delete",  HTTP_ADMIN, HTTP_OPENAI, on_delete },
    {"GET",  "/kv/saved",   HTTP_ADMIN, HTTP_OPENAI, on_list   },
};
const size_t kv_n_routes = HD_LEN(kv_routes);

/* ---- opening and closing ---- */

hd_status kv_saved_open(kv_saved **out, char **dir, const char *option, hd_err *err) {
    double bytes;
    *out = NULL;
    *dir = NULL;
    if (!option) return HD_OK;
    HD_TRY(hd_kv_disk_split(dir, &bytes, "--kv-save", option, err));
    kv_saved *k = calloc(1, sizeof *k);
    if (!k) return HD_FAIL(err, HD_ENOMEM, "no memory for saved conversations");
    pthread_mutex_init(&k->lock, NULL);
    pthread_cond_init(&k->ended, NULL);
    *out = k;
    return hd_saved_open(&k->folder, *dir, (uint64_t)bytes, err);
}

hd_status kv_saved_start(kv_saved *k, hd_engine *e, const hd_engine_options *o, hd_err *err) {
    size_t page_bytes[HD_N_KV_GROUPS];
    hd_engine_stats stats;
    if (!k) return HD_OK;
    HD_TRY(hd_engine_check_pages(e, page_bytes, err));
    hd_engine_read_stats(e, &stats);
    k->engine = e;
    k->n_groups = hd_engine_parallel(e)->dp;
    k->max_context = stats.max_context;
    k->own.page_tokens = (uint32_t)hd_kv_shape_of(hd_engine_spec(e)).page_tokens;
    for (int g = 0; g < HD_N_KV_GROUPS; g++) k->own.page_bytes[g] = page_bytes[g];
    return hd_engine_page_identity(k->own.identity, e, o, err);
}

void kv_saved_stop(kv_saved *k) {
    if (!k) return;
    atomic_store(&k->stopping, true);
    pthread_mutex_lock(&k->lock);
    while (k->running) pthread_cond_wait(&k->ended, &k->lock);
    pthread_mutex_unlock(&k->lock);
}

void kv_saved_close(kv_saved *k) {
    if (!k) return;
    hd_saved_close(k->folder);
    pthread_cond_destroy(&k->ended);
    pthread_mutex_destroy(&k->lock);
    free(k);
}
