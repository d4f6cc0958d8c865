/* replay_text.c - collects text by kind and choice, so that streams and complete replies can
 * be compared. */
#include "cli/replay_text.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"

/* Texts joined so far, by "choice/kind". */
typedef struct collected {
    json_t *texts;
} collected;

static bool is_logged(const char *key) {
    static const char *const logged[] = {"content",      "text",  "reasoning_content",
                                         "arguments",    "name",  "thinking",
                                         "partial_json", "delta", "output_ids"};
    for (size_t i = 0; i < sizeof logged / sizeof logged[0]; i++) {
        if (strcmp(key, logged[i]) == 0) return true;
    }
    return false;
}

static void join(collected *c, json_int_t choice, const char *kind, const char *text) {
    char key[64];
    snprintf(key, sizeof key, "%06lld/%s", (long long)choice, kind);
    const char *before = json_string_value(json_object_get(c->texts, key));
    const size_t n = before ? strlen(before) : 0, m = strlen(text);
    char *both = malloc(n + m + 1);
    if (!both) return;
    if (n) memcpy(both, before, n);
    memcpy(both + n, text, m + 1);
    json_object_set_new(c->texts, key, json_string(both));
    free(both);
}

/* the parser bounds the depth */
static void walk(collected *c, const json_t *value, json_int_t choice, const char *kind) {
    const char *key;
    json_t *item;
    size_t i;
    if (json_is_object(value)) {
        const json_t *index = json_object_get(value, "index");
        if (json_is_integer(index)) choice = json_integer_value(index);
        json_object_foreach((json_t *)(uintptr_t)value, key, item) {
            walk(c, item, choice, key);
        }
    } else if (json_is_array(value)) {
        json_array_foreach(value, i, item) {
            walk(c, item, choice, kind);
        }
    } else if (json_is_string(value) && is_logged(kind)) {
        join(c, choice, kind, json_string_value(value));
    }
}

/* The native endpoint repeats all text in every event: the last one is complete. */
static bool walk_events(collected *c, const char *answer, bool last_only) {
    json_t *last = NULL;
    bool any = false;
    for (const char *p = answer; *p;) {
        const size_t n = strcspn(p, "\n");
        if (n > 6 && strncmp(p, "data: ", 6) == 0 && p[6] == '{') {
            json_t *event = hd_json_read(p + 6, n - 6, JSON_ALLOW_NUL, NULL);
            any = any || event;
            if (!last_only) walk(c, event, 0, "");
            json_decref(last);
            last = event;
        }
        p += n + (p[n] == '\n');
    }
    if (last_only) walk(c, last, 0, "");
    json_decref(last);
    return any;
}

char *replay_text(const char *path, const char *answer) {
    collected c = {json_object()};
    json_t *whole = hd_json_read(answer, strlen(answer), JSON_ALLOW_NUL, NULL);
    bool any = whole != NULL;
    if (whole) {
        walk(&c, whole, 0, "");
    } else {
        any = walk_events(&c, answer, strcmp(path, "/generate") == 0);
    }
    char *text = any ? hd_json_write(c.texts, JSON_SORT_KEYS | JSON_INDENT(0)) : NULL;
    json_decref(whole);
    json_decref(c.texts);
    return text;
}
