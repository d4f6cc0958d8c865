/* api.c - the OpenAI, Anthropic and SGLang compatible endpoints as tables: HTTP routes, and what
 * /openapi.json says of them. */
#include "api/api.h"

#include "api/endpoints.h"
#include "api/openapi.h"

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
    {"GET",             "/tokenizer_info",            HTTP_USER,   HTTP_OPENAI,    api_tokenizer_info    },
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
    {"GET POST",        "/slow_down",                 HTTP_ADMIN,  HTTP_OPENAI,    api_unsupported       },
};
const size_t api_n_routes = sizeof api_routes / sizeof api_routes[0];

/* ---- descriptions ---- */

static const char *const response_query[] = {"stream", "starting_after", NULL};
static const char *const items_query[] = {"order", "limit", "after", NULL};

/* clang-format off */
static const api_operation operations[] = {
    {.path = "/v1/chat/completions", .methods = "POST", .summary = "Continue a conversation",
     .body = &api_chat_family, .reply = "ChatCompletion", .event = "ChatCompletionChunk"},
    {.path = "/v1/completions", .methods = "POST", .summary = "Continue a text",
     .body = &api_complete_family, .reply = "Completion", .event = "Completion"},
    {.path = "/v1/models", .methods = "GET", .summary = "The model that is served",
     .reply = "ModelList"},
    {.path = "/v1/models/{id}", .methods = "GET", .summary = "The model, by its name",
     .reply = "Model"},
    {.path = "/generate", .methods = "POST PUT", .summary = "Token in, token out",
     .body = &api_generate_family, .reply = "GenerateAnswers", .event = "GenerateAnswer"},
    {.path = "/tokenize", .methods = "POST", .summary = "Text to token ids",
     .body = &api_tokenize_family, .reply = "Tokens"},
    {.path = "/v1/tokenize", .methods = "POST", .summary = "Text to token ids",
     .body = &api_tokenize_family, .reply = "Tokens"},
    {.path = "/tokenizer_info", .methods = "GET", .summary = "The tokenizer's special tokens",
     .reply = "TokenizerInfo"},
    {.path = "/detokenize", .methods = "POST", .summary = "Token ids to text",
     .body = &api_detokenize_family, .reply = "DecodedTokens"},
    {.path = "/v1/detokenize", .methods = "POST", .summary = "Token ids to text",
     .body = &api_detokenize_family, .reply = "DecodedTokens"},
    {.path = "/apply-template", .methods = "POST", .summary = "A conversation as prompt text",
     .body = &api_template_family, .reply = "Prompt"},
    {.path = "/parse_function_call", .methods = "POST", .summary = "Tool calls out of a text",
     .body = &api_parse_call_family, .reply = "ParsedCalls"},
    {.path = "/separate_reasoning", .methods = "POST", .summary = "Reasoning out of a text",
     .body = &api_reasoning_family, .reply = "SeparatedReasoning"},
    {.path = "/v1/messages", .methods = "POST", .summary = "Anthropic's messages",
     .body = &api_messages_family, .reply = "Message", .event = "MessageEvent"},
    {.path = "/v1/messages/count_tokens", .methods = "POST",
     .summary = "Tokens of a conversation", .body = &api_count_family, .reply = "TokenCount"},
    {.path = "/v1/responses", .methods = "POST", .summary = "OpenAI's responses",
     .body = &api_responses_family, .reply = "Response", .event = "ResponseEvent"},
    {.path = "/v1/responses/input_tokens", .methods = "POST", .summary = "Tokens of an input",
     .body = &api_input_tokens_family, .reply = "InputTokens"},
    {.path = "/v1/responses/{id}", .methods = "GET", .summary = "A response that was kept",
     .reply = "Response", .event = "ResponseEvent", .query = response_query},
    {.path = "/v1/responses/{id}", .methods = "DELETE", .summary = "Forget a response",
     .reply = "DeletedResponse"},
    {.path = "/v1/responses/{id}/input_items", .methods = "GET",
     .summary = "What a response answered", .reply = "InputItems", .query = items_query},
    {.path = "/v1/responses/{id}/cancel", .methods = "POST",
     .summary = "End a response in the background", .reply = "Response"},
    {.path = "/openapi.json", .methods = "GET", .summary = "This description",
     .reply = "Description"},
};

/* Replies and events. The end-to-end tests validate real ones against them. */
static const api_schema schemas[] = {
    /* used by several APIs */
    {"Count", "{'type':'integer','minimum':0}"},
    {"Text", "{'type':'string'}"},
    {"MaybeText", "{'type':['string','null']}"},
    {"Integers", "{'type':'array','items':{'type':'integer'}}"},
    {"FinishReason", "{'enum':['stop','length','tool_calls','abort',null]}"},
    {"MatchedStop", "{'type':['integer','string','null']}"},

    {"Error",
     "{'type':'object','required':['error'],'properties':{'error':{'type':'object',"
     "'required':['message','type','param','code'],'properties':{"
     "'message':@Text,'type':@Text,'param':@MaybeText,'code':@MaybeText}}}}"},
    {"AnthropicError",
     "{'type':'object','required':['type','error'],'properties':{'type':{'const':'error'},"
     "'error':{'type':'object','required':['type','message'],'properties':{"
     "'type':@Text,'message':@Text,'details':{'type':'object','required':['error_code'],"
     "'properties':{'error_code':@MaybeText}}}}}}"},

    /* OpenAI */
    {"Usage",
     "{'type':'object','required':['prompt_tokens','completion_tokens','total_tokens'],"
     "'properties':{'prompt_tokens':@Count,'completion_tokens':@Count,'total_tokens':@Count,"
     "'reasoning_tokens':@Count,'prompt_tokens_details':@PromptDetails,"
     "'completion_tokens_details':@CompletionDetails}}"},
    {"PromptDetails",
     "{'type':'object','required':['cached_tokens'],'properties':{'cached_tokens':@Count}}"},
    {"CompletionDetails",
     "{'type':'object','required':['reasoning_tokens','accepted_prediction_tokens',"
     "'rejected_prediction_tokens','draft_steps'],'properties':{'reasoning_tokens':@Count,"
     "'accepted_prediction_tokens':@Count,'rejected_prediction_tokens':@Count,"
     "'draft_steps':@Count}}"},
    {"ScoredToken",
     "{'type':'object','required':['token','logprob','bytes'],'properties':{'token':@Text,"
     "'logprob':{'type':'number'},'bytes':@Integers,"
     "'top_logprobs':{'type':'array','items':@ScoredToken}}}"},
    {"ChatScores",
     "{'type':['object','null'],'required':['content'],'properties':{"
     "'content':{'type':'array','items':@ScoredToken}}}"},
    {"ToolCall",
     "{'type':'object','required':['id','type','function'],'properties':{'id':@Text,"
     "'index':@Count,'type':{'const':'function'},'function':{'type':'object',"
     "'required':['name','arguments'],'properties':{'name':@Text,'arguments':@Text}}}}"},
    {"ToolCallDelta",
     "{'type':'object','required':['index','function'],'properties':{'index':@Count,'id':@Text,"
     "'type':{'const':'function'},'function':{'type':'object','required':['arguments'],"
     "'properties':{'name':@Text,'arguments':@Text}}}}"},
    {"ChatMessage",
     "{'type':'object','required':['role','content'],'properties':{"
     "'role':{'const':'assistant'},'content':@MaybeText,'reasoning_content':@MaybeText,"
     "'tool_calls':{'type':['array','null'],'items':@ToolCall}}}"},
    {"ChatDelta",
     "{'type':'object','properties':{'role':{'const':'assistant'},'content':@Text,"
     "'reasoning_content':@Text,'tool_calls':{'type':'array','items':@ToolCallDelta}}}"},
    {"ChatCompletion",
     "{'type':'object','required':['id','object','created','model','choices','usage'],"
     "'properties':{'id':@Text,'object':{'const':'chat.completion'},'created':@Count,"
     "'model':@Text,'usage':@Usage,'system_fingerprint':@Text,'prompt_token_ids':@Integers,"
     "'metadata':@AnswerMetadata,"
     "'choices':{'type':'array','items':{'type':'object',"
     "'required':['index','message','logprobs','finish_reason'],'properties':{'index':@Count,"
     "'message':@ChatMessage,'logprobs':@ChatScores,'finish_reason':@FinishReason,"
     "'matched_stop':@MatchedStop,"
     "'weight_versions':@VersionSpans,'token_ids':@Integers}}}}}"},
    {"ChatCompletionChunk",
     "{'type':'object','required':['id','object','created','model','choices'],"
     "'properties':{'id':@Text,'object':{'const':'chat.completion.chunk'},'created':@Count,"
     "'model':@Text,'usage':@Usage,'prompt_token_ids':@Integers,'metadata':@AnswerMetadata,"
     "'prompt_progress':@PromptProgress,"
     "'choices':{'type':'array','items':{'type':'object',"
     "'required':['index','delta','finish_reason'],'properties':{'index':@Count,"
     "'delta':@ChatDelta,'logprobs':@ChatScores,'finish_reason':@FinishReason,"
     "'matched_stop':@MatchedStop,"
     "'weight_versions':@VersionSpans,'token_ids':@Integers}}}}}"},
    {"PromptProgress",
     "{'type':'object','required':['total','cache','processed','time_ms'],'properties':{"
     "'total':@Count,'cache':@Count,'processed':@Count,'time_ms':@Count}}"},
    {"AnswerMetadata",
     "{'type':'object','required':['weight_version'],'properties':{'weight_version':@Text}}"},
    {"VersionSpans",
     "{'type':'array','items':{'type':'object','required':['version','start','end'],"
     "'properties':{'version':@Text,'start':@Count,'end':@Count}}}"},
    {"TextScores",
     "{'type':['object','null'],"
     "'required':['tokens','token_logprobs','top_logprobs','text_offset'],'properties':{"
     "'tokens':{'type':'array','items':@Text},'text_offset':@Integers,"
     "'token_logprobs':{'type':'array','items':{'type':['number','null']}},"
     "'top_logprobs':{'type':'array','items':{'type':['object','null']}}}}"},
    {"Completion",
     "{'type':'object','required':['id','object','created','model','choices'],"
     "'properties':{'id':@Text,'object':{'const':'text_completion'},'created':@Count,"
     "'model':@Text,'usage':@Usage,'system_fingerprint':@Text,'metadata':@AnswerMetadata,"
     "'prompt_progress':@PromptProgress,"
     "'choices':{'type':'array','items':{'type':'object',"
     "'required':['index','text','logprobs','finish_reason'],'properties':{'index':@Count,"
     "'text':@Text,'logprobs':@TextScores,'finish_reason':@FinishReason,"
     "'matched_stop':@MatchedStop,"
     "'weight_versions':@VersionSpans,'token_ids':@Integers,'prompt_token_ids':@Integers}}}}}"},
    {"Model",
     "{'type':'object','required':['id','object','created','owned_by','max_model_len','type',"
     "'display_name','created_at','lifecycle','max_input_tokens'],"
     "'properties':{'id':@Text,'object':{'const':'model'},'created':@Count,'owned_by':@Text,"
     "'root':@Text,'parent':@MaybeText,'max_model_len':@Count,'type':{'const':'model'},"
     "'display_name':@Text,'created_at':{'type':'string','format':'date-time'},"
     "'lifecycle':{'const':'active'},'max_input_tokens':@Count,'max_tokens':@Count}}"},
    {"ModelList",
     "{'type':'object','required':['object','data','has_more','first_id','last_id'],"
     "'properties':{'object':{'const':'list'},'data':{'type':'array','items':@Model},"
     "'has_more':{'const':false},'first_id':@Text,'last_id':@Text}}"},
    {"InputTokens",
     "{'type':'object','required':['object','input_tokens'],'properties':{"
     "'object':{'const':'response.input_tokens'},'input_tokens':@Count}}"},
    {"DeletedResponse",
     "{'type':'object','required':['id','object','deleted'],'properties':{'id':@Text,"
     "'object':{'const':'response.deleted'},'deleted':{'const':true}}}"},
    {"InputItems",
     "{'type':'object','required':['object','data','has_more','first_id','last_id'],"
     "'properties':{'object':{'const':'list'},'has_more':{'type':'boolean'},"
     "'first_id':@MaybeText,'last_id':@MaybeText,'data':{'type':'array','items':{"
     "'type':'object','required':['type','id'],'properties':{'type':@Text,'id':@Text}}}}}"},
    {"Description",
     "{'type':'object','required':['openapi','info','paths','components']}"},
    {"ResponseItem",
     "{'type':'object','required':['type','id'],'properties':{'id':@Text,"
     "'type':{'enum':['message','reasoning','function_call']},"
     "'status':{'enum':['in_progress','completed','incomplete']}}}"},
    {"Response",
     "{'type':'object','required':['id','object','created_at','status','model','output',"
     "'usage','error','incomplete_details','parallel_tool_calls','tool_choice','tools'],"
     "'properties':{"
     "'id':@Text,'object':{'const':'response'},'created_at':@Count,'model':@Text,"
     "'status':{'enum':['queued','in_progress','completed','incomplete','failed',"
     "'cancelled']},"
     "'output':{'type':'array','items':@ResponseItem},"
     "'usage':{'type':['object','null'],"
     "'required':['input_tokens','output_tokens','total_tokens']},"
     "'error':{'type':['object','null']},'incomplete_details':{'type':['object','null']},"
     "'tools':{'type':'array'},'metadata':{'type':'object'},'store':{'type':'boolean'}}}"},
    {"ResponseEvent",
     "{'type':'object','required':['type','sequence_number'],'properties':{"
     "'type':{'type':'string','pattern':'^response[.]'},'sequence_number':@Count,"
     "'response':@Response,'item':@ResponseItem,'output_index':@Count,'content_index':@Count,"
     "'delta':@Text}}"},

    /* SGLang */
    {"Triple",
     "{'type':'array','prefixItems':[{'type':['number','null']},@Count,@MaybeText],"
     "'minItems':3,'maxItems':3}"},
    {"GenerateAnswer",
     "{'type':'object','required':['text','output_ids','meta_info'],'properties':{"
     "'text':@Text,'output_ids':@Integers,'index':@Count,'meta_info':{'type':'object',"
     "'required':['id','finish_reason','prompt_tokens','completion_tokens','cached_tokens'],"
     "'properties':{'id':@Text,'prompt_tokens':@Count,'completion_tokens':@Count,"
     "'cached_tokens':@Count,'reasoning_tokens':@Count,'e2e_latency':{'type':'number'},"
     "'finish_reason':{'type':['object','null'],'required':['type'],'properties':{"
     "'type':{'enum':['stop','length','abort']}}},"
     "'input_token_logprobs':{'type':'array','items':@Triple},"
     "'output_token_logprobs':{'type':'array','items':@Triple}}}}}"},
    {"GenerateAnswers",
     "{'oneOf':[@GenerateAnswer,{'type':'array','items':@GenerateAnswer}]}"},
    {"Tokens",
     "{'type':'object','required':['tokens','count','max_model_len'],'properties':{"
     "'tokens':{'type':'array'},'count':{'type':['integer','array']},'max_model_len':@Count,"
     "'token_strs':{'type':'array'}}}"},
    {"TokenizerInfo",
     "{'type':'object','required':['bos_token','eos_token','pad_token','chat_template'],"
     "'properties':{'tokenizer_class':@Text,'bos_token':@MaybeText,'eos_token':@MaybeText,"
     "'pad_token':@MaybeText,'add_bos_token':{'type':'boolean'},'vocab_size':@Count,"
     "'model_max_length':@Count,'chat_template':{'type':'null'}}}"},
    {"DecodedTokens",
     "{'type':'object','required':['text','prompt','content'],'properties':{"
     "'text':{'type':['string','array']},'prompt':{'type':['string','array']},"
     "'content':{'type':['string','array']}}}"},
    {"Prompt", "{'type':'object','required':['prompt'],'properties':{'prompt':@Text}}"},
    {"ParsedCalls",
     "{'type':'object','required':['normal_text','calls'],'properties':{'normal_text':@Text,"
     "'calls':{'type':'array','items':{'type':'object',"
     "'required':['tool_index','name','parameters'],'properties':{'tool_index':@Count,"
     "'name':@Text,'parameters':@Text}}}}}"},
    {"SeparatedReasoning",
     "{'type':'object','required':['reasoning_text','text'],'properties':{"
     "'reasoning_text':@Text,'text':@Text}}"},

    /* Anthropic */
    {"Block",
     "{'type':'object','required':['type'],'properties':{"
     "'type':{'enum':['text','thinking','tool_use']}}}"},
    {"MessageUsage",
     "{'type':'object','required':['input_tokens','output_tokens'],'properties':{"
     "'input_tokens':@Count,'output_tokens':@Count,'cache_read_input_tokens':@Count,"
     "'cache_creation_input_tokens':@Count}}"},
    {"Message",
     "{'type':'object','required':['id','type','role','model','content','stop_reason',"
     "'stop_sequence','usage'],'properties':{'id':@Text,'type':{'const':'message'},"
     "'role':{'const':'assistant'},'model':@Text,'content':{'type':'array','items':@Block},"
     "'stop_reason':{'enum':['end_turn','max_tokens','stop_sequence','tool_use','pause_turn',"
     "null]},'stop_sequence':@MaybeText,'usage':@MessageUsage}}"},
    {"MessageEvent",
     "{'type':'object','required':['type'],'properties':{'type':{'enum':['message_start',"
     "'content_block_start','content_block_delta','content_block_stop','message_delta',"
     "'message_stop','error']},'message':@Message,'index':@Count,'content_block':@Block,"
     "'delta':{'type':'object'},'usage':@MessageUsage}}"},
    {"TokenCount",
     "{'type':'object','required':['input_tokens'],'properties':{'input_tokens':@Count}}"},
};
/* clang-format on */

const api_description api_own_description = {operations, HD_LEN(operations), schemas,
                                             HD_LEN(schemas)};
