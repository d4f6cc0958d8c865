/* openapi.c - GET /openapi.json: the tables that parse, written as OpenAPI 3.1. */
#include <stdio.h>
#include <string.h>

#include "api/endpoints.h"
#include "api/request.h"
#include "api/schemas.h"
#include "api/text.h"

typedef struct operation {
    const char *path, *method, *summary;
    const api_family *body;    /* NULL: none */
    const char *reply, *event; /* schemas; event NULL: never a stream */
    const char *argument;      /* of the path, or NULL */
} operation;

static const operation operations[] = {
    {"/v1/chat/completions",      "post", "Continue a conversation",       &api_chat_family,
     "ChatCompletion",                                                                                                "ChatCompletionChunk", NULL},
    {"/v1/completions",           "post", "Continue a text",               &api_complete_family,   "Completion",
     "Completion",                                                                                                                           NULL},
    {"/v1/models",                "get",  "The model that is served",      NULL,                   "ModelList",       NULL,                  NULL},
    {"/v1/models/{id}",           "get",  "The model, by its name",        NULL,                   "Model",           NULL,                  "id"},
    {"/generate",                 "post", "Token in, token out",           &api_generate_family,   "GenerateAnswers",
     "GenerateAnswer",                                                                                                                       NULL},
    {"/tokenize",                 "post", "Text to token ids",             &api_tokenize_family,   "Tokens",          NULL,                  NULL},
    {"/v1/tokenize",              "post", "Text to token ids",             &api_tokenize_family,   "Tokens",          NULL,                  NULL},
    {"/detokenize",               "post", "Token ids to text",             &api_detokenize_family, "DecodedTokens",   NULL,
     NULL                                                                                                                                        },
    {"/v1/detokenize",            "post", "Token ids to text",             &api_detokenize_family, "DecodedTokens",
     NULL,                                                                                                                                   NULL},
    {"/apply-template",           "post", "A conversation as prompt text", &api_template_family,   "Prompt",
     NULL,                                                                                                                                   NULL},
    {"/parse_function_call",      "post", "Tool calls out of a text",      &api_parse_call_family,
     "ParsedCalls",                                                                                                   NULL,                  NULL},
    {"/separate_reasoning",       "post", "Reasoning out of a text",       &api_reasoning_family,
     "SeparatedReasoning",                                                                                            NULL,                  NULL},
    {"/v1/messages",              "post", "Anthropic's messages",          &api_messages_family,   "Message",
     "MessageEvent",                                                                                                                         NULL},
    {"/v1/messages/count_tokens", "post", "Tokens of a conversation",      &api_count_family,
     "TokenCount",                                                                                                    NULL,                  NULL},
    {"/v1/responses",             "post", "OpenAI's responses",            &api_responses_family,  "Response",
     "ResponseEvent",                                                                                                                        NULL},
    {"/v1/responses/{id}",        "get",  "A response that was kept",      NULL,                   "Response",        NULL,                  "id"},
};

/* ---- parameters ---- */

static void put_ref(api_text *out, const char *schema) {
    api_write(out, "{'$ref':'#/components/schemas/");
    api_puts(out, schema);
    api_write(out, "'}");
}

/* As schemas.h has it. */
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
        api_write(out, "'enum':[null,false]");
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
            if (api_params_find(f, p->name) != p) continue; /* an earlier section has it */
            if (!first) api_puts(out, ",");
            first = false;
            put_param(out, p, limits);
        }
    }
    api_puts(out, "}}");
}

/* ---- families, each once ---- */

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

/* Nested ones come behind those that nest them, so one pass finds all. */
static void list_families(family_list *list) {
    for (size_t i = 0; i < HD_LEN(operations); i++) list_family(list, operations[i].body);
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

static void put_operation(api_text *out, const operation *o) {
    const bool anthropic = strncmp(o->path, "/v1/messages", 12) == 0;
    api_write(out, "%s:{%s:{'summary':%s,", o->path, o->method, o->summary);
    if (o->argument) {
        api_write(out,
                  "'parameters':[{'name':%s,'in':'path','required':%i,"
                  "'schema':{'type':'string'}}],",
                  o->argument, true);
    }
    if (o->body) {
        api_write(out, "'requestBody':{'required':%i,'content':{", true);
        put_content(out, "application/json", o->body->name);
        api_puts(out, "}},");
    }
    api_write(out, "'responses':{");
    put_reply(out, "200", "The answer", o->reply, o->event);
    api_puts(out, ",");
    put_reply(out, "default", "A refusal or a failure", anthropic ? "AnthropicError" : "Error",
              NULL);
    api_puts(out, "}}}");
}

static void put_components(api_text *out, const api_limits *limits) {
    family_list list = {.n = 0};
    list_families(&list);
    api_write(out, "'components':{'securitySchemes':{'key':{'type':'http','scheme':'bearer'}},"
                   "'schemas':{");
    for (size_t i = 0; i < list.n; i++) {
        put_family(out, list.families[i], limits);
        api_puts(out, ",");
    }
    for (size_t i = 0; i < api_n_schemas; i++) {
        if (i > 0) api_puts(out, ",");
        api_write(out, "%s:", api_schemas[i].name);
        put_schema(out, api_schemas[i].text);
    }
    api_puts(out, "}}");
}

void api_openapi(http_call *c, void *server) {
    const api_context *ctx = server;
    api_text out = {0};
    api_write(&out,
              "{'openapi':'3.1.0','info':{'title':'hadal','version':%s},"
              "'security':[{},{'key':[]}],'paths':{",
              HD_VERSION);
    for (size_t i = 0; i < HD_LEN(operations); i++) {
        if (i > 0) api_puts(&out, ",");
        put_operation(&out, &operations[i]);
    }
    api_puts(&out, "},");
    put_components(&out, &ctx->limits);
    api_puts(&out, "}");
    http_reply(c, 200, "application/json", out.data, out.n);
    api_text_deinit(&out);
}
