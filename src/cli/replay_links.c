/* replay_links.c - see replay_links.h. */
#include "cli/replay_links.h"

#include <string.h>

#include "base/json.h"

/* Returns the id of a response itself, or of the first event with a response. A new reference,
 * or NULL. */
static json_t *response_id(const char *answer) {
    json_t *whole = hd_json_read(answer, strlen(answer), JSON_ALLOW_NUL, NULL);
    const char *data = whole ? NULL : strstr(answer, "data: {");
    if (data) whole = hd_json_read(data + 6, strcspn(data + 6, "\n"), JSON_ALLOW_NUL, NULL);
    const json_t *inner = json_object_get(whole, "response");
    json_t *id = json_object_get(inner ? inner : whole, "id");
    const char *text = json_string_value(id);
    id = text && strncmp(text, "resp_", 5) == 0 ? json_incref(id) : NULL;
    json_decref(whole);
    return id;
}

void replay_link(json_t *links, const char *before, const char *now) {
    json_t *was = response_id(before), *is = response_id(now);
    if (was && is) json_object_set(links, json_string_value(was), is);
    json_decref(was);
    json_decref(is);
}

bool replay_relink(const json_t *links, json_t *request, const char **id) {
    const char *before = json_string_value(json_object_get(request, "previous_response_id"));
    json_t *now = before ? json_object_get(links, before) : NULL;
    *id = json_string_value(now);
    if (!before) return true;
    return now && json_object_set(request, "previous_response_id", now) == 0;
}
