/* describe.c - describes the routes of src/server and their replies for /openapi.json. */
#include "api/openapi.h"
#include "server/server_internal.h"

static const char *const flush_query[] = {"timeout", NULL};
static const char *const requests_query[] = {"request_id", NULL};
static const char *const loads_query[] = {"include", "dp_rank", "format", NULL};

#define TEXT "text/plain"

/* clang-format off */
static const api_operation operations[] = {
    {.path = "/health", .methods = "GET", .summary = "Whether it serves: ok, or 503 and why not",
     .type = TEXT},
    {.path = "/ping", .methods = "GET", .summary = "As /health", .type = TEXT},
    {.path = "/health_generate", .methods = "GET", .summary = "The same, with one real token",
     .type = TEXT},
    {.path = "/version", .methods = "GET", .summary = "The program's version", .reply = "Version"},
    {.path = "/model_info", .methods = "GET", .summary = "The model", .reply = "ModelInfo"},
    {.path = "/get_model_info", .methods = "GET", .summary = "As /model_info",
     .reply = "ModelInfo"},
    {.path = "/server_info", .methods = "GET", .summary = "Every flag, and what came of it",
     .reply = "ServerInfo"},
    {.path = "/get_server_info", .methods = "GET", .summary = "As /server_info",
     .reply = "ServerInfo"},
    {.path = "/v1/loads", .methods = "GET", .summary = "What runs and waits, in sections",
     .reply = "Loads", .query = loads_query},
    {.path = "/get_load", .methods = "GET", .summary = "As /v1/loads was before",
     .reply = "OldLoads"},
    {.path = "/metrics", .methods = "GET", .summary = "Prometheus text", .type = TEXT},
    {.path = "/engine/live", .methods = "GET", .summary = "What the engine does, as it does it",
     .type = "text/event-stream"},
    {.path = "/engine/history", .methods = "GET", .summary = "The figures of the last minute",
     .reply = "History"},
    {.path = "/engine/requests", .methods = "GET", .summary = "Where requests of one id stand",
     .reply = "Standing", .query = requests_query},
    {.path = "/flush_cache", .methods = "GET POST", .summary = "Forget cached prefixes",
     .type = TEXT, .query = flush_query},
    {.path = "/abort_request", .methods = "POST", .summary = "End requests by their ids",
     .free_body = "AbortBody", .type = TEXT},
    {.path = "/pause_generation", .methods = "POST", .summary = "Hold all steps",
     .free_body = "PauseBody", .reply = "Paused"},
    {.path = "/continue_generation", .methods = "POST", .summary = "Go on after a pause",
     .free_body = "NoBody", .reply = "Paused"},
    {.path = "/start_profile", .methods = "GET POST", .summary = "Record a trace",
     .free_body = "ProfileBody", .type = TEXT},
    {.path = "/stop_profile", .methods = "GET POST", .summary = "Write the trace",
     .free_body = "NoBody", .type = TEXT},
    {.path = "/", .methods = "GET", .summary = "The page", .type = "text/html"},
    {.path = "/page/{file}", .methods = "GET", .summary = "A file of the page",
     .type = "text/javascript"},
};

static const api_schema schemas[] = {
    {"Version",
     "{'type':'object','required':['version','engine'],'properties':{'version':@Text,"
     "'engine':{'const':'hadal'}}}"},
    {"ModelInfo",
     "{'type':'object','required':['model_path','served_model_name','is_generation',"
     "'model_type','max_context','weight_version'],'properties':{'model_path':@Text,"
     "'tokenizer_path':@Text,'served_model_name':@Text,'is_generation':{'const':true},"
     "'model_type':@Text,'max_context':@Count,'weight_version':@Text,"
     "'has_image_understanding':{'const':false},'has_audio_understanding':{'const':false}}}"},
    {"ServerInfo",
     "{'type':'object','required':['version','model_path','max_total_num_tokens',"
     "'max_req_input_len','startup_time','internal_states'],'properties':{'version':@Text,"
     "'model_path':@Text,'max_total_num_tokens':@Count,'max_req_input_len':@Count,"
     "'startup_time':{'type':'number'},'internal_states':{'type':'array','items':{"
     "'type':'object','required':['avg_spec_accept_length','last_gen_throughput']}}}}"},
    {"Share", "{'type':'number','minimum':0,'maximum':1}"},
    {"Load",
     "{'type':'object','required':['dp_rank'],'properties':{'dp_rank':{'const':0},"
     "'num_running_reqs':@Count,'num_waiting_reqs':@Count,'num_used_tokens':@Count,"
     "'num_total_tokens':@Count,'max_total_num_tokens':@Count,'token_usage':@Share,"
     "'cache_hit_rate':@Share,'utilization':@Share,'max_running_requests':@Count,"
     "'gen_throughput':{'type':'number'},'memory':{'type':'object'},"
     "'speculative':{'type':'object','required':['accept_length','accept_rate']},"
     "'queues':{'type':'object','required':['waiting','paused','retracted']}}}"},
    {"Loads",
     "{'type':'object','required':['timestamp','version','loads'],'properties':{"
     "'timestamp':@Count,'version':@Text,'loads':{'type':'array','items':@Load}}}"},
    {"OldLoads",
     "{'type':'array','items':{'type':'object','required':['dp_rank','num_reqs',"
     "'num_waiting_reqs','num_tokens'],'properties':{'num_reqs':@Count,"
     "'num_waiting_reqs':@Count,'num_tokens':@Count,'num_pending_tokens':@Count}}}"},
    {"Figures", "{'type':'array','maxItems':240,'items':{'type':['number','null']}}"},
    {"History",
     "{'type':'object','required':['t','tokens_s','prompt_tokens_s','ttft_p50_ms','ttft_p95_ms',"
     "'itl_p50_ms','itl_p95_ms','prompt_tokens','cached_tokens','running','waiting'],"
     "'additionalProperties':@Figures}"},
    {"Standing",
     "{'type':'object','required':['requests'],'properties':{'requests':{'type':'array',"
     "'items':{'type':'object','required':['id','answer','phase','ahead'],'properties':{"
     "'id':@Count,'answer':@Count,'phase':{'enum':['waiting','prefill','decode']},"
     "'ahead':@Count,'prompt_tokens':@Count,'cached_tokens':@Count,'done_tokens':@Count,"
     "'output_tokens':@Count}}}}}"},
    {"AbortBody",
     "{'type':'object','properties':{'rid':{'type':['string','null']},"
     "'abort_all':{'type':['boolean','null']}}}"},
    {"PauseBody",
     "{'type':'object','properties':{'mode':{'enum':['abort','retract','in_place',null]}}}"},
    {"NoBody", "{'type':'object'}"},
    {"ProfileBody",
     "{'type':'object','properties':{'num_steps':{'type':['integer','null'],'minimum':1},"
     "'profile_prefix':{'type':['string','null']}}}"},
    {"Paused",
     "{'type':'object','required':['status','message'],'properties':{"
     "'status':{'const':'ok'},'message':@Text}}"},
};
/* clang-format on */

const api_description server_description = {operations, HD_LEN(operations), schemas,
                                            HD_LEN(schemas)};
