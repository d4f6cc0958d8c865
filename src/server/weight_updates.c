/* weight_updates.c - endpoints that replace weights: from a folder, from memory, in parts
 * between a begin and an end. Reading and checking run on the call's own worker thread, while
 * the model serves; only the copies of a whole, checked update lie between two steps. */
#include "server/weight_updates.h"

#include <gnutls/crypto.h>
#include <gnutls/gnutls.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base64.h"
#include "base/file.h"
#include "base/log.h"
#include "weights/delta.h"
#include "weights/torch/ipc_tensors.h"
#include "weights/torch/torch_tensors.h"

enum { SHA256_BYTES = 32 };

/* ---- state ---- */

weight_updates *weight_updates_new(const char *model_dir, const char *weights_dir) {
    weight_updates *w = calloc(1, sizeof *w);
    if (!w) return NULL;
    w->model_dir = model_dir;
    w->weights_dir = weights_dir;
    snprintf(w->path, sizeof w->path, "%s", model_dir);
    pthread_mutex_init(&w->busy, NULL);
    pthread_mutex_init(&w->lock, NULL);
    return w;
}

void weight_updates_drop(weight_updates *w) {
    if (!w) return;
    hd_weights_update_close(w->session.update);
    w->session.update = NULL;
}

void weight_updates_free(weight_updates *w) {
    if (!w) return;
    pthread_mutex_destroy(&w->busy);
    pthread_mutex_destroy(&w->lock);
    free(w->snapshot);
    free(w);
}

void weight_updates_read_path(weight_updates *w, char *out, size_t size) {
    pthread_mutex_lock(&w->lock);
    snprintf(out, size, "%s", w->path);
    pthread_mutex_unlock(&w->lock);
}

bool weight_updates_begun(weight_updates *w) {
    return atomic_load(&w->begun);
}

static void set_path(weight_updates *w, const char *path) {
    pthread_mutex_lock(&w->lock);
    snprintf(w->path, sizeof w->path, "%s", path);
    pthread_mutex_unlock(&w->lock);
}

void weight_updates_answer(weight_call *c, int status, json_t *reply) {
    c->status = status;
    c->reply = reply;
}

static void reply_with(weight_call *c, int status, const char *code, const char *text) {
    json_t *reply = json_pack("{s:b, s:s}", "success", status == 200, "message", text);
    if (status != 200) {
        json_object_set_new(reply, "error",
                            json_pack("{s:s, s:s, s:n, s:s}", "message", text, "type",
                                      status < 500 ? "invalid_request_error" : "server_error",
                                      "param", "code", code));
    }
    weight_updates_answer(c, status, reply);
}

void weight_updates_reply(weight_call *c, int status, const char *format, ...) {
    char text[700];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    reply_with(c, status, status == 409 ? "weights_busy" : "update_refused", text);
}

void weight_updates_failed(weight_call *c, const hd_err *err) {
    const bool later = err->status == HD_ENOMEM || err->status == HD_EAGAIN;
    const int status = later                            ? 503
                       : err->status == HD_EDEVICE      ? 500
                       : err->status == HD_EUNSUPPORTED ? 501
                                                        : 400;
    reply_with(c, status, err->code ? err->code : "update_refused", err->msg);
}

bool weight_updates_refuse_lost(server *s, weight_call *c) {
    hd_engine_stats e;
    hd_engine_read_stats(s->engine, &e);
    if (!e.weights_lost) return false;
    reply_with(c, 503, e.hindrance, "the values of weights are lost until they are updated");
    return true;
}

/* The reply is sent when the weights are free again: the caller's next call finds them so. */
void weight_updates_handle(http_call *c, server *s, weight_updates_handler *fn) {
    weight_call call = {.http = c};
    if (!s->weights->weights_dir) {
        http_error(c, 501, "invalid_request_error", "fixed_weights", NULL,
                   "weights cannot be replaced: the server was started without --weights-dir");
        return;
    }
    if (atomic_load(&s->draining)) {
        http_reply_header(c, "Retry-After", "5");
        http_error(c, 503, "overloaded_error", "draining", NULL, "the server is going down");
        return;
    }
    if (http_hand_over(c)) return;
    json_t *body = server_take_body(c);
    if (!body) return;
    if (pthread_mutex_trylock(&s->weights->busy) == 0) {
        fn(s, &call, body);
        pthread_mutex_unlock(&s->weights->busy);
    } else {
        weight_updates_reply(&call, 409, "another call has the weights");
    }
    if (call.status == 503) http_reply_header(c, "Retry-After", "1");
    server_reply_json(c, call.status, call.reply);
    json_decref(body);
}

/* ---- fields ---- */

typedef struct wishes {
    const char *version; /* NULL: it stays */
    hd_weights_selector selector;
    bool abort_all, keep_pause;
} wishes;

static bool refuse_field(weight_call *c, const char *name, const char *must) {
    weight_updates_reply(c, 400, "%s must be %s", name, must);
    return false;
}

static bool take_flag(weight_call *c, json_t *body, const char *name, bool *out) {
    json_t *v = json_object_get(body, name);
    if (v && !json_is_null(v) && !json_is_boolean(v)) {
        return refuse_field(c, name, "true or false");
    }
    if (json_is_boolean(v)) *out = json_is_true(v);
    return true;
}

static bool take_text(weight_call *c, json_t *body, const char *name, const char **out) {
    json_t *v = json_object_get(body, name);
    if (v && !json_is_null(v) && !json_is_string(v)) return refuse_field(c, name, "a string");
    if (json_is_string(v)) *out = json_string_value(v);
    return true;
}

static bool take_selector(weight_call *c, json_t *body, hd_weights_selector *out) {
    static const char *const names[] = {"all", "target", "draft"};
    const char *name = NULL;
    bool no_draft = false;
    if (!take_flag(c, body, "disable_draft_model", &no_draft)) return false;
    if (no_draft) *out = HD_SELECT_TARGET;
    if (!take_text(c, body, "selector", &name)) return false;
    for (size_t i = 0; name && i < HD_LEN(names); i++) {
        if (strcmp(name, names[i]) != 0) continue;
        *out = (hd_weights_selector)i;
        return true;
    }
    return !name || refuse_field(c, "selector", "target, draft or all");
}

static bool take_version(weight_call *c, json_t *body, const char *name, const char **out) {
    if (!take_text(c, body, name, out)) return false;
    const size_t n = *out ? strlen(*out) : 1;
    if (n > 0 && n <= HD_MAX_WEIGHT_VERSION) return true;
    weight_updates_reply(c, 400, "%s must have 1 to %d bytes, not %zu", name,
                         HD_MAX_WEIGHT_VERSION, n);
    return false;
}

/* flush_cache is checked and changes nothing: after an update nothing old is ever matched. */
static bool take_wishes(weight_call *c, json_t *body, wishes *out) {
    bool flush = true;
    *out = (wishes){.version = NULL};
    return take_version(c, body, "weight_version", &out->version) &&
           take_flag(c, body, "abort_all_requests", &out->abort_all) &&
           take_flag(c, body, "keep_pause", &out->keep_pause) &&
           take_flag(c, body, "flush_cache", &flush) && take_selector(c, body, &out->selector);
}

static bool take_number(weight_call *c, json_t *body, const char *name, json_int_t *out) {
    json_t *v = json_object_get(body, name);
    if (!v || json_is_null(v)) return true;
    if (!json_is_integer(v) || json_integer_value(v) < 0) {
        return refuse_field(c, name, "a whole number");
    }
    *out = json_integer_value(v);
    return true;
}

/* ---- applying ---- */

/* Applies u, which it closes, and replies. path: where the weights came from, or NULL. */
static void apply(server *s, weight_call *c, hd_weights_update *u, const wishes *how,
                  const char *path) {
    hd_engine_stats e;
    hd_err err = {0};
    if (how->abort_all) records_abort(s->records, s->engine, NULL);
    hd_engine_read_stats(s->engine, &e);
    if (how->keep_pause && !e.paused) hd_engine_pause(s->engine, HD_PAUSE_RETRACT);
    const int32_t n = hd_weights_update_count(u);
    const hd_status st = hd_engine_update_weights(s->engine, u, how->version, &err);
    prefix_ring_forget(s->prefixes); /* nothing computed before is matched */
    hd_weights_update_close(u);
    if (st != HD_OK) {
        weight_updates_failed(c, &err);
        return;
    }
    if (path) set_path(s->weights, path);
    HD_LOG(HD_LOG_INFO, "weights_updated", hd_log_int("tensors", n),
           hd_log_text("version", hd_engine_weight_version(s->engine)));
    weight_updates_answer(c, 200,
                          json_pack("{s:b, s:s, s:i}", "success", true, "message",
                                    "Succeeded to update model weights.", "num_paused_requests",
                                    e.paused ? e.running : 0));
}

static hd_status open_update(server *s, hd_weights_update **out, hd_err *err) {
    return hd_weights_update_open(out, hd_engine_weights(s->engine), err);
}

/* ---- from a folder ---- */

static void update_from_disk(server *s, weight_call *c, json_t *body) {
    const char *path = NULL, *format = NULL;
    hd_weights_update *u = NULL;
    hd_err err = {0};
    wishes how;
    if (!take_text(c, body, "model_path", &path) ||
        !take_text(c, body, "load_format", &format) || !take_wishes(c, body, &how)) {
        return;
    }
    if (!path) {
        refuse_field(c, "model_path", "a folder");
    } else if (format && strcmp(format, "auto") != 0 && strcmp(format, "safetensors") != 0) {
        refuse_field(c, "load_format", "auto or safetensors");
    } else if (s->weights->session.update) {
        weight_updates_reply(c, 409, "an update in parts has begun and not ended");
    } else if (weights_read_folder(s, &u, path, how.selector, &err) != HD_OK) {
        hd_weights_update_close(u);
        weight_updates_failed(c, &err);
    } else {
        apply(s, c, u, &how, path);
    }
}

/* ---- from memory ---- */

static hd_status decode_base64(hd_map *out, const char *what, const char *text, hd_err *err) {
    const size_t n = strlen(text);
    size_t used = 0;
    HD_TRY(hd_map_take(out, hd_base64_room(n), what, err));
    if (n > 0 && hd_base64_decode(hd_map_writable(out), &used, text, n)) {
        hd_map_shorten(out, used); /* by its padding */
        return HD_OK;
    }
    hd_map_close(out);
    return HD_FAIL(err, HD_EINVAL, "%s: no base64", what);
}

/* Whether hex is the SHA-256 of the bytes. */
static bool has_digest(const hd_map *map, const char *hex) {
    unsigned char digest[SHA256_BYTES];
    char text[2 * SHA256_BYTES + 1];
    if (gnutls_hash_fast(GNUTLS_DIG_SHA256, map->data, map->bytes, digest) != 0) return false;
    for (size_t i = 0; i < sizeof digest; i++) snprintf(text + 2 * i, 3, "%02x", digest[i]);
    return strcmp(text, hex) == 0;
}

/* SGLang's field has a pickle for each rank; here is one. */
static hd_status read_pickle(json_t *list, hd_checkpoint **out, bool flattened, hd_device *gpu,
                             hd_err *err) {
    const char *text = json_string_value(json_array_get(list, 0));
    hd_map map;
    if (json_array_size(list) != 1 || !text) {
        return HD_FAIL(err, HD_EINVAL, "serialized_named_tensors: must be a list of one text");
    }
    HD_TRY(decode_base64(&map, "serialized_named_tensors", text, err));
    const hd_status st = hd_torch_tensors_read(out, map.data, map.bytes, flattened, gpu, err);
    hd_map_close(&map);
    return st;
}

/* Makes a checkpoint of the one field that carries tensors. gpu: that of the weights, or NULL. */
static hd_status read_tensors(json_t *body, hd_checkpoint **out, hd_device *gpu, hd_err *err) {
    json_t *bytes = json_object_get(body, "safetensors");
    json_t *name = json_object_get(body, "shared_memory");
    json_t *pickles = json_object_get(body, "serialized_named_tensors");
    json_t *on_gpu = json_object_get(body, "cuda_ipc");
    const char *format = json_string_value(json_object_get(body, "load_format"));
    const char *digest = json_string_value(json_object_get(body, "sha256"));
    const bool flattened = format && strcmp(format, "flattened_bucket") == 0;
    hd_map map = {0};
    if (json_is_string(bytes) + json_is_string(name) + json_is_array(pickles) +
            json_is_array(on_gpu) !=
        1) {
        return HD_FAIL(err, HD_EINVAL,
                       "give one of safetensors, the bytes of such a file in base64, "
                       "shared_memory, the name of an object that holds them, cuda_ipc, a list "
                       "of tensors on a GPU, and serialized_named_tensors");
    }
    if (digest && (json_is_array(pickles) || json_is_array(on_gpu))) {
        return HD_FAIL(err, HD_EINVAL,
                       "sha256: of a pickle or of handles it would not cover the tensors");
    }
    if (json_is_array(pickles)) return read_pickle(pickles, out, flattened, gpu, err);
    if (json_is_array(on_gpu)) return hd_ipc_tensors_read(out, on_gpu, gpu, err);
    HD_TRY(json_is_string(bytes)
               ? decode_base64(&map, "safetensors", json_string_value(bytes), err)
               : hd_map_read_shared(&map, json_string_value(name), err));
    if (digest && !has_digest(&map, digest)) {
        hd_map_close(&map);
        return HD_FAIL(err, HD_EINVAL, "sha256: the bytes that came have another digest");
    }
    return hd_checkpoint_of_bytes(out, &map, "update", err);
}

static bool is_delta(const json_t *body) {
    const char *format = json_string_value(json_object_get(body, "load_format"));
    return format && strcmp(format, "delta") == 0;
}

/* A delta is completed by the weights in use. */
static hd_status read_whole_tensors(server *s, json_t *body, hd_checkpoint **out, hd_err *err) {
    hd_checkpoint *c;
    HD_TRY(read_tensors(body, &c, hd_engine_device(s->engine), err));
    if (is_delta(body)) {
        return hd_weights_delta_read(out, hd_engine_weights(s->engine), c, err);
    }
    *out = c;
    return HD_OK;
}

static hd_status add_tensors(server *s, hd_weights_update **u, json_t *body,
                             hd_weights_selector selector, hd_err *err) {
    const hd_weights_update_rule rule = {.selector = selector,
                                         .once = is_delta(body),
                                         .n_threads = hd_engine_threads(s->engine)};
    hd_checkpoint *c;
    HD_TRY(read_whole_tensors(s, body, &c, err));
    const hd_status st = *u ? HD_OK : open_update(s, u, err);
    if (st != HD_OK) {
        hd_checkpoint_close(c);
        return st;
    }
    return hd_weights_update_add(*u, c, &rule, err);
}

/* Whether the call's update, if it names one, is the one that has begun. A part that comes late is
 * not taken for an update of its own. */
static bool check_number(server *s, weight_call *c, json_t *body) {
    const update_session *w = &s->weights->session;
    json_int_t number = -1;
    if (!take_number(c, body, "update", &number)) return false;
    if (number < 0 || (w->update && number == w->number)) return true;
    weight_updates_reply(c, 409, "update %lld is not the one that has begun",
                         (long long)number);
    return false;
}

/* Whether the call is for the version in use. A delta must say its version, and its checksum. */
static bool check_base(server *s, weight_call *c, json_t *body, const char *digest) {
    const char *base = NULL, *now = hd_engine_weight_version(s->engine);
    if (!take_text(c, body, "base_version", &base)) return false;
    if (is_delta(body) && (!base || !digest)) {
        weight_updates_reply(c, 400,
                             "a delta needs base_version, the name of the weights that "
                             "it changes, and sha256");
        return false;
    }
    if (!base || strcmp(base, now) == 0) return true;
    weight_updates_reply(c, 400, "base_version: the weights in use are %.256s", now);
    return false;
}

/* Adds to the update that was begun. */
static void add_part(server *s, weight_call *c, json_t *body, const wishes *how) {
    update_session *w = &s->weights->session;
    hd_err err = {0};
    if (add_tensors(s, &w->update, body, w->selector, &err) != HD_OK) {
        w->spoilt = true;
        weight_updates_failed(c, &err);
        return;
    }
    w->parts++;
    if (how->version) snprintf(w->version, sizeof w->version, "%s", how->version);
    weight_updates_reply(c, 200, "Checked: %d tensors wait for the end of the update.",
                         hd_weights_update_count(w->update));
}

static const char *const tensor_formats[] = {"auto", "safetensors", "flattened_bucket",
                                             "delta"};

static bool is_one_of(const char *text, const char *const *list, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (strcmp(text, list[i]) == 0) return true;
    }
    return false;
}

static void update_from_tensor(server *s, weight_call *c, json_t *body) {
    const char *format = NULL, *digest = NULL;
    hd_weights_update *u = NULL;
    hd_err err = {0};
    wishes how;
    if (!take_text(c, body, "load_format", &format) || !take_wishes(c, body, &how) ||
        !take_text(c, body, "sha256", &digest) || !check_number(s, c, body) ||
        !check_base(s, c, body, digest)) {
        return;
    }
    if (format && !is_one_of(format, tensor_formats, HD_LEN(tensor_formats))) {
        refuse_field(c, "load_format", "auto, safetensors, flattened_bucket or delta");
    } else if (s->weights->session.update) {
        add_part(s, c, body, &how);
    } else if (add_tensors(s, &u, body, how.selector, &err) != HD_OK) {
        hd_weights_update_close(u);
        weight_updates_failed(c, &err);
    } else {
        apply(s, c, u, &how, NULL);
    }
}

/* ---- in parts ---- */

static void begin_update(server *s, weight_call *c, json_t *body) {
    update_session *w = &s->weights->session;
    hd_weights_selector selector = HD_SELECT_ALL;
    hd_err err = {0};
    if (!take_selector(c, body, &selector)) return;
    if (w->update) {
        weight_updates_reply(c, 400,
                             "update %lld has begun already; /abort_weight_update drops it",
                             (long long)w->number);
        return;
    }
    const json_int_t number = w->number + 1;
    *w = (update_session){.selector = selector, .number = number};
    if (open_update(s, &w->update, &err) != HD_OK) {
        weight_updates_failed(c, &err);
        return;
    }
    atomic_store(&s->weights->begun, true);
    weight_updates_answer(c, 200,
                          json_pack("{s:b, s:s, s:I}", "success", true, "message",
                                    "Succeeded to begin the weight update.", "update", number));
}

/* Takes what was collected out of the session, which is over then. */
static hd_weights_update *leave_session(server *s) {
    hd_weights_update *u = s->weights->session.update;
    s->weights->session.update = NULL;
    atomic_store(&s->weights->begun, false);
    return u;
}

/* Why the parts that came are no update, or NULL. */
static const char *fault_of(const update_session *w, json_int_t parts) {
    if (w->spoilt) return "a part of the update was refused";
    if (w->parts == 0) return "no part of the update came";
    if (parts >= 0 && parts != w->parts)
        return "parts of the update are missing, or came twice";
    return NULL;
}

static void end_update(server *s, weight_call *c, json_t *body) {
    update_session *w = &s->weights->session;
    json_int_t parts = -1;
    wishes how;
    if (!take_wishes(c, body, &how) || !take_number(c, body, "parts", &parts) ||
        !check_number(s, c, body)) {
        return;
    }
    if (!w->update) {
        weight_updates_reply(c, 400, "no update has begun");
        return;
    }
    hd_weights_update *u = leave_session(s);
    const char *fault = fault_of(w, parts);
    if (fault) {
        hd_weights_update_close(u);
        weight_updates_reply(c, 400, "%s (%lld came): nothing was changed", fault,
                             (long long)w->parts);
        return;
    }
    if (!how.version && w->version[0]) how.version = w->version;
    apply(s, c, u, &how, NULL);
}

/* For the sender that comes after one that died. */
static void abort_update(server *s, weight_call *c, json_t *body) {
    if (!check_number(s, c, body)) return;
    hd_weights_update *u = leave_session(s);
    if (u) {
        weight_updates_reply(c, 200, "Dropped: %d tensors.", hd_weights_update_count(u));
    } else {
        weight_updates_reply(c, 200, "No update has begun.");
    }
    hd_weights_update_close(u);
}

/* ---- version ---- */

static void rename_weights(server *s, weight_call *c, json_t *body) {
    const char *version = NULL;
    bool abort_all = true;
    hd_err err = {0};
    if (!take_version(c, body, "new_version", &version) ||
        !take_flag(c, body, "abort_all_requests", &abort_all)) {
        return;
    }
    if (!version) {
        refuse_field(c, "new_version", "a string");
        return;
    }
    if (abort_all) records_abort(s->records, s->engine, NULL);
    if (hd_engine_update_weights(s->engine, NULL, version, &err) != HD_OK) {
        weight_updates_failed(c, &err);
        return;
    }
    weight_updates_answer(c, 200,
                          json_pack("{s:b, s:s, s:s}", "success", true, "message",
                                    "Weight version updated.", "new_version", version));
}

static void on_version(http_call *c, void *user) {
    server *s = user;
    server_reply_json(
        c, 200, json_pack("{s:s}", "weight_version", hd_engine_weight_version(s->engine)));
}

/* ---- handlers ---- */

#define HANDLER(name, fn)                        \
    static void name(http_call *c, void *user) { \
        weight_updates_handle(c, user, fn);      \
    }
HANDLER(on_from_disk, update_from_disk)
HANDLER(on_from_tensor, update_from_tensor)
HANDLER(on_begin, begin_update)
HANDLER(on_end, end_update)
HANDLER(on_abort, abort_update)
HANDLER(on_rename, rename_weights)

static void on_group(http_call *c, void *user) {
    (void)user;
    http_error(c, 501, "invalid_request_error", "no_group", NULL,
               "%s needs NCCL and a second GPU, which this server does not have: send weights "
               "by /update_weights_from_disk or /update_weights_from_tensor",
               http_path(c));
}

const http_route weights_routes[] = {
    {"POST",     "/update_weights_from_disk",        HTTP_ADMIN, HTTP_OPENAI, on_from_disk      },
    {"POST",     "/update_weights_from_tensor",      HTTP_ADMIN, HTTP_OPENAI, on_from_tensor    },
    {"POST",     "/begin_weight_update",             HTTP_ADMIN, HTTP_OPENAI, on_begin          },
    {"POST",     "/end_weight_update",               HTTP_ADMIN, HTTP_OPENAI, on_end            },
    {"POST",     "/abort_weight_update",             HTTP_ADMIN, HTTP_OPENAI, on_abort          },
    {"POST",     "/update_weight_version",           HTTP_ADMIN, HTTP_OPENAI, on_rename         },
    {"GET POST", "/get_weight_version",              HTTP_USER,  HTTP_OPENAI, on_version        },
    {"GET POST", "/get_weights_by_name",             HTTP_ADMIN, HTTP_OPENAI, weights_on_by_name},
    {"GET POST", "/weights_checker",                 HTTP_ADMIN, HTTP_OPENAI, weights_on_checker},
    {"GET POST", "/release_memory_occupation",       HTTP_ADMIN, HTTP_OPENAI, weights_on_release},
    {"GET POST", "/resume_memory_occupation",        HTTP_ADMIN, HTTP_OPENAI, weights_on_resume },
    {"POST",     "/init_weights_update_group",       HTTP_ADMIN, HTTP_OPENAI, on_group          },
    {"POST",     "/destroy_weights_update_group",    HTTP_ADMIN, HTTP_OPENAI, on_group          },
    {"POST",     "/update_weights_from_distributed", HTTP_ADMIN, HTTP_OPENAI, on_group          },
};
const size_t weights_n_routes = HD_LEN(weights_routes);
