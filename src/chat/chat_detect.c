/* chat_detect.c - detects the chat format of a model directory. Reads, in this order: the
 * encoder scripts of V3.2 and V4, the chat template, config.json's model_type, the added
 * tokens of tokenizer.json. Jinja templates are not executed, only searched for certain
 * words. */
#include "chat/chat_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"

enum { MAX_TEXT_BYTES = 16 << 20 };

typedef struct guess {
    const char *dir;
    hd_chat_encoding encoding;
    bool thinks;
    bool done;
    hd_err *err;
} guess;

static void decide(guess *g, hd_chat_encoding encoding, bool thinks) {
    g->encoding = encoding;
    g->thinks = thinks;
    g->done = true;
}

/* *out is NULL if the file does not exist; the caller owns it. */
static hd_status read_optional(char **out, size_t *n, const guess *g, const char *name) {
    *out = NULL;
    *n = 0;
    char *path = hd_path_join(g->dir, name);
    if (!path) return HD_FAIL(g->err, HD_ENOMEM, "no memory for the path of %s", name);
    hd_status st = HD_OK;
    if (hd_file_exists(path)) st = hd_file_read(out, n, path, MAX_TEXT_BYTES, g->err);
    free(path);
    return st;
}

static hd_status load_optional(json_t **out, const guess *g, const char *name) {
    char *text, *path = NULL;
    size_t n;
    *out = NULL;
    HD_TRY(read_optional(&text, &n, g, name));
    if (!text) return HD_OK;
    path = hd_path_join(g->dir, name);
    hd_status st = hd_json_parse(out, text, n, path ? path : name, g->err);
    free(path);
    free(text);
    return st;
}

static bool holds(const char *text, const char *word) {
    return strstr(text, word) != NULL;
}

/* The refreshed V4 has a text for one more level of effort. */
static hd_chat_encoding v4_release(const char *text) {
    return holds(text, "Effort: Beyond maximum") ? HD_CHAT_V4_0731 : HD_CHAT_V4;
}

static hd_status try_scripts(guess *g) {
    char *v4, *v32 = NULL;
    size_t n;
    HD_TRY(read_optional(&v4, &n, g, "encoding/encoding_dsv4.py"));
    hd_status st = v4 ? HD_OK : read_optional(&v32, &n, g, "encoding/encoding_dsv32.py");
    if (v4) {
        decide(g, v4_release(v4), false);
    } else if (v32) {
        decide(g, HD_CHAT_V32, false);
    }
    free(v4);
    free(v32);
    return st;
}

/* Returns false for an unknown template. */
static bool match_template(guess *g, const char *t) {
    if (holds(t, CHAT_DSML)) {
        const bool v41 = holds(t, CHAT_DSML " calls>");
        const hd_chat_encoding other =
            holds(t, "function_calls>") ? HD_CHAT_V32 : v4_release(t);
        decide(g, v41 ? HD_CHAT_V41 : other, v41);
    } else if (holds(t, CHAT_USER) && holds(t, CHAT_CALL_SEP) && !holds(t, "```json")) {
        /* bare arguments: V3.1; the later template knows a conversation of system text only */
        decide(g, holds(t, "is_only_sys") ? HD_CHAT_V31_TERMINUS : HD_CHAT_V31, false);
    } else if (holds(t, CHAT_USER)) {
        bool opens = holds(t, "is_last_user"), forces = holds(t, CHAT_ASSISTANT CHAT_THINK);
        if (holds(t, CHAT_END_THINK) || forces) {
            decide(g, opens ? HD_CHAT_R1_0528 : HD_CHAT_R1, forces || opens);
        } else {
            decide(g, opens ? HD_CHAT_V3_0324 : HD_CHAT_V3, false);
        }
    } else if (holds(t, "'User: '") && holds(t, "'Assistant: '")) {
        decide(g, HD_CHAT_V2, false);
    } else {
        return false;
    }
    return true;
}

/* chat_template of tokenizer_config.json: a string, or named ones of which "default". */
static const char *default_template(json_t *config) {
    json_t *v = json_object_get(config, "chat_template"), *item;
    size_t i;
    json_array_foreach(v, i, item) {
        const char *name = json_string_value(json_object_get(item, "name"));
        if (name && strcmp(name, "default") == 0) {
            return json_string_value(json_object_get(item, "template"));
        }
    }
    return json_string_value(v);
}

static hd_status try_template(guess *g) {
    char *file;
    size_t n;
    json_t *config = NULL;
    HD_TRY(read_optional(&file, &n, g, "chat_template.jinja"));
    hd_status st = file ? HD_OK : load_optional(&config, g, "tokenizer_config.json");
    const char *t = file ? file : default_template(config);
    if (st == HD_OK && t && !match_template(g, t)) {
        st = HD_FAIL(g->err, HD_EUNSUPPORTED,
                     "%s: its chat template is none of DeepSeek's; name an encoding", g->dir);
    }
    free(file);
    json_decref(config);
    return st;
}

static hd_status try_config(guess *g) {
    static const struct {
        const char *model_type;
        hd_chat_encoding encoding;
    } types[] = {
        {"deepseek_v2",  HD_CHAT_V2 },
        {"deepseek_v3",  HD_CHAT_V3 },
        {"deepseek_v32", HD_CHAT_V32},
        {"deepseek_v4",  HD_CHAT_V4 },
        {"deepseek_v41", HD_CHAT_V41},
    };
    json_t *config;
    HD_TRY(load_optional(&config, g, "config.json"));
    const char *type = json_string_value(json_object_get(config, "model_type"));
    for (size_t i = 0; type && i < HD_LEN(types); i++) {
        if (strcmp(type, types[i].model_type) == 0) {
            decide(g, types[i].encoding, hd_chat_thinks(types[i].encoding));
        }
    }
    if (g->encoding == HD_CHAT_V4 && json_object_get(config, "dspark_block_size")) {
        g->encoding = HD_CHAT_V4_0731; /* only the later release has this draft head */
    }
    hd_status st = HD_OK;
    if (type && !g->done) {
        st = HD_FAIL(g->err, HD_EUNSUPPORTED,
                     "%s: model_type '%s' is none of DeepSeek's; name an encoding", g->dir,
                     type);
    }
    json_decref(config);
    return st;
}

static bool map_holds(const hd_map *m, const char *word) {
    size_t n = strlen(word);
    for (size_t i = 0; i + n <= m->bytes; i++) {
        const uint8_t *at = memchr(m->data + i, word[0], m->bytes - i - n + 1);
        if (!at) return false;
        i = (size_t)(at - m->data);
        if (memcmp(at, word, n) == 0) return true;
    }
    return false;
}

/* Only V4.1 has the system's token; of the others only V4 has the DSML token; only V3 and later
 * have the user's token. */
static hd_status try_tokenizer(guess *g) {
    char *path = hd_path_join(g->dir, "tokenizer.json");
    hd_map m = {0};
    if (!path) return HD_FAIL(g->err, HD_ENOMEM, "no memory for the path of tokenizer.json");
    hd_status st = hd_map_open(&m, path, g->err);
    free(path);
    if (st != HD_OK) return st;
    bool v4 = map_holds(&m, "\"" CHAT_DSML "\""), v3 = map_holds(&m, CHAT_USER);
    bool v41 = v4 && map_holds(&m, CHAT_SYSTEM);
    decide(g, v41 ? HD_CHAT_V41 : v4 ? HD_CHAT_V4 : v3 ? HD_CHAT_V3 : HD_CHAT_V2, v41);
    hd_map_close(&m);
    return HD_OK;
}

hd_status hd_chat_detect(hd_chat_encoding *out, bool *thinks, const char *dir, hd_err *err) {
    typedef hd_status try_fn(guess * g);
    static try_fn *const tries[] = {try_scripts, try_template, try_config, try_tokenizer};
    guess g = {.dir = dir, .err = err};
    for (size_t i = 0; i < HD_LEN(tries) && !g.done; i++) HD_TRY(tries[i](&g));
    *out = g.encoding;
    *thinks = g.thinks;
    return HD_OK;
}
