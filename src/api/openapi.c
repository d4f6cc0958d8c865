/* openapi.c - GET /openapi.json: writes the parameter tables that the parser uses as OpenAPI
 * 3.1. */
#include <stdio.h>
#include <string.h>

#include "api/endpoints.h"
#include "api/openapi.h"
#include "api/request.h"
#include "api/text.h"

/* ---- parameters ---- */

static void put_ref(api_text *out, const char *schema) {
    api_write(out, "{'$ref':'#/components/schemas/");
    api_puts(out, schema);
    api_write(out, "'}");
}

/* text: as api_schema describes. */
static void put_schema(api_text *out, const char *text) {
    char name[64];
    while (*text) {
        const size_t plain = strcspn(text, "'@");
        api_put(out, text, plain);
        text += plain;
        if (*text == '\'') {
            api_puts(out, "\"");
            text++;
        } else if (*text == '@') {
            const size_t n = strcspn(++text, ",}]");
            snprintf(name, sizeof name, "%.*s", (int)n, text);
            put_ref(out, name);
            text += n;
        }
    }
}

static void put_number(api_text *out, const api_param *p, const api_limits *limits) {
    double low, high;
    api_write(out, "'type':[%s,'null']", p->kind == API_NUMBER ? "number" : "integer");
    if (p->kind == API_LONG) {
        api_write(out, ",'format':'int64'");
    } else if (api_param_range(p, limits, &low, &high) && p->kind == API_INT) {
        api_write(out, ",'minimum':%lld,'maximum':%lld", (long long)low, (long long)high);
    } else if (p->kind == API_NUMBER) {
        api_write(out, ",'minimum':%g,'maximum':%g", low, high);
    }
}

static void put_string(api_text *out, const api_param *p) {
    if (!p->words) {
        api_write(out, "'type':['string','null'],'maxLength':%d",
                  p->high > 0 ? (int)p->high : API_MAX_STRING);
        return;
    }
    api_write(out, "'enum':[");
    for (const char *const *w = p->words; *w; w++) api_write(out, "%s,", *w);
    api_puts(out, "null]");
}

static void put_type(api_text *out, const api_param *p, const api_limits *limits) {
    switch (p->kind) {
    case API_BOOL:
    case API_BOOL_NOT:
    case API_SWITCH:
        api_write(out, "'type':['boolean','null']");
        break;
    case API_INT:
    case API_LONG:
    case API_NUMBER:
        put_number(out, p, limits);
        break;
    case API_STRING:
        put_string(out, p);
        break;
    case API_LEVEL:
        api_write(out, "'anyOf':[{");
        put_string(out, p);
        api_write(out, "},{'type':'integer','minimum':%d,'maximum':%d}]", (int)p->low,
                  (int)p->high);
        break;
    case API_OBJECT:
        api_write(out, "'type':['object','null']");
        break;
    case API_ARRAY:
        api_write(out, "'type':['array','null']");
        break;
    case API_TEXTS:
        api_write(out, "'type':['string','array','null'],'items':{'type':'string'}");
        break;
    case API_INTS:
        api_write(out, "'type':['array','null'],'items':{'type':'integer'}");
        break;
    case API_NESTED:
        api_write(out, "'oneOf':[{'type':'null'},");
        put_ref(out, p->nested->name);
        api_puts(out, "]");
        break;
    case API_ONE_OR_MANY:
        api_write(out, "'oneOf':[{'type':'null'},");
        put_ref(out, p->nested->name);
        api_write(out, ",{'type':'array','items':");
        put_ref(out, p->nested->name);
        api_puts(out, "}]");
        break;
    case API_ANY:
    case API_NOTED:
        api_write(out, "'title':%s", p->name);
        break;
    case API_ONLY:
        api_write(out, "'enum':[null,%i]", p->low != 0);
        break;
    case API_ONE:
        api_write(out, "'enum':[null,false,1]");
        break;
    case API_REFUSED:
        api_write(out, "'enum':[null,false,[]]");
        break;
    }
}

static void put_param(api_text *out, const api_param *p, const api_limits *limits) {
    api_write(out, "%s:{", p->name);
    put_type(out, p, limits);
    api_write(out, ",'description':'");
    if (p->kind == API_REFUSED) api_puts(out, "Refused: ");
    if (p->kind == API_NOTED) api_puts(out, "Without effect: ");
    api_put_escaped(out, p->about, strlen(p->about));
    api_puts(out, "\"}");
}

static void put_family(api_text *out, const api_family *f, const api_limits *limits) {
    bool first = true;
    api_write(out, "%s:{'type':'object','additionalProperties':%i,'required':[", f->name,
              !f->closed);
    for (const char *const *r = f->required; r && *r; r++) {
        if (r != f->required) api_puts(out, ",");
        api_write(out, "%s", *r);
    }
    api_write(out, "],'properties':{");
    for (int32_t s = 0; s < API_MAX_SECTIONS && f->sections[s]; s++) {
        for (size_t i = 0; i < f->sections[s]->n; i++) {
            const api_param *p = &f->sections[s]->params[i];
            /* an earlier section contains it */
            if (api_params_find(f, p->name) != p) continue;
            if (!first) api_puts(out, ",");
            first = false;
            put_param(out, p, limits);
        }
    }
    api_puts(out, "}}");
}

typedef const api_description *both[2]; /* of src/api, of the server */

/* ---- parameter families, each once ---- */

enum { MAX_FAMILIES = 48 };

typedef struct family_list {
    const api_family *families[MAX_FAMILIES];
    size_t n;
} family_list;

static void list_family(family_list *list, const api_family *f) {
    for (size_t i = 0; i < list->n; i++) {
        if (list->families[i] == f) return;
    }
    if (!f || list->n == MAX_FAMILIES) return;
    list->families[list->n++] = f;
}

/* Nested families are appended behind those that contain them, so one pass finds all. */
static void list_families(family_list *list, const both described) {
    for (size_t t = 0; t < 2; t++) {
        for (size_t i = 0; i < described[t]->n_operations; i++) {
            list_family(list, described[t]->operations[i].body);
        }
    }
    for (size_t k = 0; k < list->n; k++) {
        const api_family *f = list->families[k];
        for (int32_t s = 0; s < API_MAX_SECTIONS && f->sections[s]; s++) {
            for (size_t i = 0; i < f->sections[s]->n; i++) {
                list_family(list, f->sections[s]->params[i].nested);
            }
        }
    }
}

/* ---- paths ---- */

static void put_content(api_text *out, const char *type, const char *schema) {
    api_write(out, "%s:{'schema':", type);
    put_ref(out, schema);
    api_puts(out, "}");
}

static void put_reply(api_text *out, const char *status, const char *about, const char *schema,
                      const char *event) {
    api_write(out, "%s:{'description':%s,'content':{", status, about);
    put_content(out, "application/json", schema);
    if (event) {
        api_puts(out, ",");
        put_content(out, "text/event-stream", event);
    }
    api_puts(out, "}}");
}

static void put_argument(api_text *out, const char *name, size_t n, bool in_path) {
    api_comma(out);
    api_write(out, "{'name':%.*s,'in':%s,'required':%i,'schema':{'type':'string'}}", (int)n,
              name, in_path ? "path" : "query", in_path);
}

/* Parameters for each {name} in the path, and for the query. */
static void put_arguments(api_text *out, const api_operation *o) {
    api_write(out, ",'parameters':[");
    for (const char *p = o->path; (p = strchr(p, '{')); p++) {
        put_argument(out, p + 1, strcspn(p + 1, "}"), true);
    }
    for (const char *const *q = o->query; q && *q; q++) {
        put_argument(out, *q, strlen(*q), false);
    }
    api_puts(out, "]");
}

static void put_operation(api_text *out, const api_operation *o) {
    const bool anthropic = strncmp(o->path, "/v1/messages", 12) == 0;
    const char *body = o->body ? o->body->name : o->free_body;
    api_write(out, "{'summary':%s", o->summary);
    put_arguments(out, o);
    if (body) {
        api_write(out, ",'requestBody':{'required':%i,'content':{", o->body != NULL);
        put_content(out, "application/json", body);
        api_puts(out, "}}");
    }
    api_write(out, ",'responses':{");
    if (o->type) {
        api_write(out,
                  "'200':{'description':'The answer','content':{%s:{'schema':"
                  "{'type':'string'}}}},",
                  o->type);
    } else if (o->reply) {
        put_reply(out, "200", "The answer", o->reply, o->event);
        api_puts(out, ",");
    }
    put_reply(out, "default", "A refusal or a failure", anthropic ? "AnthropicError" : "Error",
              NULL);
    api_puts(out, "}}");
}

/* ---- paths: operations of one path are grouped ---- */

static bool is_first(const both described, const api_operation *o) {
    for (size_t t = 0; t < 2; t++) {
        for (size_t i = 0; i < described[t]->n_operations; i++) {
            const api_operation *other = &described[t]->operations[i];
            if (strcmp(other->path, o->path) == 0) return other == o;
        }
    }
    return true;
}

/* "GET POST" lists two operations; OpenAPI writes methods in lower case. */
static void put_methods(api_text *out, const api_operation *o) {
    for (const char *m = o->methods; *m;) {
        const size_t n = strcspn(m, " ");
        char name[8] = "";
        for (size_t i = 0; i < n && i + 1 < sizeof name; i++) name[i] = (char)(m[i] | 0x20);
        api_comma(out);
        api_write(out, "%s:", name);
        put_operation(out, o);
        m += n + (m[n] == ' ');
    }
}

static void put_path(api_text *out, const both described, const char *path) {
    api_comma(out);
    api_write(out, "%s:{", path);
    for (size_t t = 0; t < 2; t++) {
        for (size_t i = 0; i < described[t]->n_operations; i++) {
            const api_operation *o = &described[t]->operations[i];
            if (strcmp(o->path, path) == 0) put_methods(out, o);
        }
    }
    api_puts(out, "}");
}

static void put_paths(api_text *out, const both described) {
    api_write(out, "'paths':{");
    for (size_t t = 0; t < 2; t++) {
        for (size_t i = 0; i < described[t]->n_operations; i++) {
            const api_operation *o = &described[t]->operations[i];
            if (is_first(described, o)) put_path(out, described, o->path);
        }
    }
    api_puts(out, "},");
}

static void put_schemas(api_text *out, const api_description *described) {
    for (size_t i = 0; i < described->n_schemas; i++) {
        api_comma(out);
        api_write(out, "%s:", described->schemas[i].name);
        put_schema(out, described->schemas[i].text);
    }
}

static void put_components(api_text *out, const both described, const api_limits *limits) {
    family_list list = {.n = 0};
    list_families(&list, described);
    api_write(out, "'components':{'securitySchemes':{'key':{'type':'http','scheme':'bearer'}},"
                   "'schemas':{");
    for (size_t i = 0; i < list.n; i++) {
        api_comma(out);
        put_family(out, list.families[i], limits);
    }
    for (size_t t = 0; t < 2; t++) put_schemas(out, described[t]);
    api_puts(out, "}}");
}

void api_openapi(http_call *c, void *server) {
    static const api_description none;
    const api_context *ctx = server;
    const both described = {&api_own_description, ctx->described ? ctx->described : &none};
    api_text out = {0};
    api_write(&out,
              "{'openapi':'3.1.0','info':{'title':'hadal','version':%s},"
              "'security':[{},{'key':[]}],",
              HD_VERSION);
    put_paths(&out, described);
    put_components(&out, described, &ctx->limits);
    api_puts(&out, "}");
    api_reply(c, "application/json", &out);
}
