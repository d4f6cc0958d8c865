/* models.c - GET /v1/models and /v1/models/{id}: the served model and its context length.
 * Also refuses the endpoints that do not exist here, with a status after which clients do
 * not retry (they do after 408, 409, 429 and 5xx). */
#include <string.h>
#include <time.h>

#include "api/endpoints.h"
#include "api/request.h"
#include "api/api.h"

/* Writes the members of OpenAI's, vLLM's and Anthropic's model objects in one. */
static void put_model(api_text *out, const api_context *ctx) {
    char born[32] = "";
    struct tm utc;
    const time_t created = (time_t)ctx->created;
    hd_engine_stats stats;
    hd_engine_read_stats(ctx->engine, &stats);
    if (gmtime_r(&created, &utc)) strftime(born, sizeof born, "%Y-%m-%dT%H:%M:%SZ", &utc);
    api_write(out,
              "{'id':%s,'object':'model','created':%lld,'owned_by':'hadal','root':%s,"
              "'parent':null,'max_model_len':%d,'type':'model','display_name':%s,"
              "'created_at':%s,'lifecycle':'active','max_input_tokens':%d,'max_tokens':%d}",
              ctx->model_name, (long long)ctx->created, ctx->model_name, stats.max_context,
              ctx->model_name, born, stats.max_context, stats.max_context);
}

void api_models(http_call *c, void *server) {
    const api_context *ctx = server;
    api_text out = {0};
    api_write(&out, "{'object':'list','data':[");
    put_model(&out, ctx);
    api_write(&out, "],'has_more':%i,'first_id':%s,'last_id':%s}", false, ctx->model_name,
              ctx->model_name);
    api_reply(c, "application/json", &out);
}

void api_model(http_call *c, void *server) {
    const api_context *ctx = server;
    api_text out = {0};
    if (strcmp(http_path_tail(c), ctx->model_name) != 0) {
        http_error(c, 404, "not_found_error", "model_not_found", "model",
                   "there is no such model; %s is served", ctx->model_name);
        return;
    }
    put_model(&out, ctx);
    api_reply(c, "application/json", &out);
}

void api_unsupported(http_call *c, void *server) {
    (void)server;
    http_error(c, 404, "not_found_error", "unsupported_endpoint", NULL,
               "%s %s is not supported by this server", http_method(c), http_path(c));
}
