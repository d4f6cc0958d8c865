/* reply_tools.c - the tools of a request, read from their JSON for the reply parser. */
#include "chat/reply.h"

#include <stdlib.h>
#include <string.h>

/* "string", or a list of types with it. Without a type only an enumeration tells. */
static bool schema_is_string(json_t *schema) {
    json_t *type = json_object_get(schema, "type"), *value;
    size_t i;
    if (json_is_string(type)) return strcmp(json_string_value(type), "string") == 0;
    json_array_foreach(type, i, value) {
        if (json_is_string(value) && strcmp(json_string_value(value), "string") == 0) {
            return true;
        }
    }
    if (type) return false;
    json_array_foreach(json_object_get(schema, "enum"), i, value) {
        if (!json_is_string(value)) return false;
    }
    return true;
}

static json_t *properties_of(json_t *tool) {
    json_t *function = json_object_get(tool, "function");
    return json_object_get(json_object_get(function, "parameters"), "properties");
}

hd_status hd_reply_tools_init(hd_reply_tools *out, json_t *tools, hd_err *err) {
    size_t i, n_params = 0, at = 0, n = json_array_size(tools);
    json_t *tool, *schema;
    const char *key;
    *out = (hd_reply_tools){0};
    json_array_foreach(tools, i, tool) {
        n_params += json_object_size(properties_of(tool));
    }
    if (n == 0) return HD_OK;
    out->tools = calloc(n, sizeof *out->tools);
    out->params = calloc(n_params + 1, sizeof *out->params);
    if (!out->tools || !out->params) {
        hd_reply_tools_deinit(out);
        return HD_FAIL(err, HD_ENOMEM, "no memory for %zu tools", n);
    }
    json_array_foreach(tools, i, tool) {
        json_t *name = json_object_get(json_object_get(tool, "function"), "name");
        if (!json_is_string(name)) continue;
        hd_reply_tool *t = &out->tools[out->n_tools++];
        *t = (hd_reply_tool){.name = json_string_value(name),
                             .n = json_string_length(name),
                             .params = out->params + at};
        json_object_foreach(properties_of(tool), key, schema) {
            out->params[at++] = (hd_reply_param){
                .name = key, .n = strlen(key), .is_string = schema_is_string(schema)};
            t->n_params++;
        }
    }
    return HD_OK;
}

void hd_reply_tools_deinit(hd_reply_tools *t) {
    free(t->tools);
    free(t->params);
    *t = (hd_reply_tools){0};
}
