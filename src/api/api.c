/* api.c - the routes of the generating endpoints. */
#include "api/api.h"

#include "api/endpoints.h"

const http_route api_routes[] = {
    {"POST",            "/v1/chat/completions",       HTTP_USER,   HTTP_OPENAI,    api_chat              },
    {"POST",            "/v1/completions",            HTTP_USER,   HTTP_OPENAI,    api_complete          },
    {"GET",             "/v1/models",                 HTTP_USER,   HTTP_OPENAI,    api_models            },
    {"GET",             "/v1/models/*",               HTTP_USER,   HTTP_OPENAI,    api_model             },
    {"POST PUT",        "/generate",                  HTTP_USER,   HTTP_OPENAI,    api_generate          },
    {"POST",            "/tokenize",                  HTTP_USER,   HTTP_OPENAI,    api_tokenize          },
    {"POST",            "/v1/tokenize",               HTTP_USER,   HTTP_OPENAI,    api_tokenize          },
    {"POST",            "/detokenize",                HTTP_USER,   HTTP_OPENAI,    api_detokenize        },
    {"POST",            "/v1/detokenize",             HTTP_USER,   HTTP_OPENAI,    api_detokenize        },
    {"POST",            "/apply-template",            HTTP_USER,   HTTP_OPENAI,    api_apply_template    },
    {"POST",            "/parse_function_call",       HTTP_USER,   HTTP_OPENAI,    api_parse_call        },
    {"POST",            "/separate_reasoning",        HTTP_USER,   HTTP_OPENAI,    api_separate_reasoning},
    {"POST",            "/v1/messages",               HTTP_USER,   HTTP_ANTHROPIC, api_messages          },
    {"POST",            "/v1/messages/count_tokens",  HTTP_USER,   HTTP_ANTHROPIC, api_count_tokens      },
    {"POST",            "/v1/responses",              HTTP_USER,   HTTP_OPENAI,    api_responses         },
    {"POST",            "/v1/responses/input_tokens", HTTP_USER,   HTTP_OPENAI,    api_input_tokens      },
    {"POST",            "/v1/responses/compact",      HTTP_USER,   HTTP_OPENAI,    api_unsupported       },
    {"GET POST DELETE", "/v1/responses/*",            HTTP_USER,   HTTP_OPENAI,    api_one_response      },
    {"GET",             "/openapi.json",              HTTP_PUBLIC, HTTP_OPENAI,    api_openapi           },
    {"POST",            "/v1/embeddings",             HTTP_USER,   HTTP_OPENAI,    api_unsupported       },
    {"POST",            "/v1/rerank",                 HTTP_USER,   HTTP_OPENAI,    api_unsupported       },
    {"POST",            "/v1/score",                  HTTP_USER,   HTTP_OPENAI,    api_unsupported       },
    {"POST",            "/v1/classify",               HTTP_USER,   HTTP_OPENAI,    api_unsupported       },
    {"POST",            "/v1/moderations",            HTTP_USER,   HTTP_OPENAI,    api_unsupported       },
    {"POST",            "/v1/audio/*",                HTTP_USER,   HTTP_OPENAI,    api_unsupported       },
    {"POST",            "/v1/images/*",               HTTP_USER,   HTTP_OPENAI,    api_unsupported       },
    {"POST",            "/v1/chat/completions/batch", HTTP_USER,   HTTP_OPENAI,    api_unsupported       },
    {"GET",             "/v1/chat/completions",       HTTP_USER,   HTTP_OPENAI,    api_unsupported       },
    {"GET POST DELETE", "/v1/chat/completions/*",     HTTP_USER,   HTTP_OPENAI,    api_unsupported       },
    {"POST",            "/v1/conversations",          HTTP_USER,   HTTP_OPENAI,    api_unsupported       },
    {"GET POST",        "/v1/files",                  HTTP_USER,   HTTP_OPENAI,    api_unsupported       },
    {"GET POST",        "/v1/batches",                HTTP_USER,   HTTP_OPENAI,    api_unsupported       },
    {"GET POST",        "/v1/messages/batches",       HTTP_USER,   HTTP_ANTHROPIC, api_unsupported       },
    {"POST",            "/load_lora_adapter",         HTTP_USER,   HTTP_OPENAI,    api_unsupported       },
    {"POST",            "/unload_lora_adapter",       HTTP_USER,   HTTP_OPENAI,    api_unsupported       },
};
const size_t api_n_routes = sizeof api_routes / sizeof api_routes[0];
