/* describe.c - describes the routes of src/server and their replies for /openapi.json. */
#include "api/openapi.h"
#include "server/server_internal.h"

static const char *const flush_query[] = {"timeout", NULL};
static const char *const requests_query[] = {"request_id", NULL};
static const char *const name_query[] = {"name", NULL};
static const char *const action_query[] = {"action", NULL};
static const char *const loads_query[] = {"include", "dp_rank", "format", "prefixes", NULL};

#define TEXT "text/plain"

/* clang-format off */
static const api_operation operations[] = {
    {.path = "/health", .methods = "GET", .summary = "Whether it serves: ok, also while paused, or 503 and why not",
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
    {.path = "/update_weights_from_disk", .methods = "POST",
     .summary = "Replace the weights by those of a folder", .free_body = "DiskBody",
     .reply = "Updated"},
    {.path = "/update_weights_from_tensor", .methods = "POST",
     .summary = "Replace weights by tensors in memory", .free_body = "TensorBody",
     .reply = "Updated"},
    {.path = "/begin_weight_update", .methods = "POST",
     .summary = "Begin an update in parts", .free_body = "BeginBody", .reply = "Updated"},
    {.path = "/end_weight_update", .methods = "POST", .summary = "Apply all parts",
     .free_body = "EndBody", .reply = "Updated"},
    {.path = "/abort_weight_update", .methods = "POST", .summary = "Drop all parts",
     .free_body = "AbortUpdateBody", .reply = "Updated"},
    {.path = "/update_weight_version", .methods = "POST", .summary = "Name the weights anew",
     .free_body = "VersionBody", .reply = "Updated"},
    {.path = "/get_weight_version", .methods = "GET POST", .summary = "The weights' name",
     .free_body = "NoBody", .reply = "WeightVersion"},
    {.path = "/get_weights_by_name", .methods = "GET POST",
     .summary = "The first rows of a tensor", .free_body = "WeightsByNameBody",
     .reply = "Values", .query = name_query},
    {.path = "/weights_checker", .methods = "GET POST",
     .summary = "Checksums of all tensors, or random values", .free_body = "CheckerBody",
     .reply = "Checked", .query = action_query},
    {.path = "/release_memory_occupation", .methods = "GET POST",
     .summary = "Give memory back to the system", .free_body = "MemoryBody",
     .reply = "Updated"},
    {.path = "/resume_memory_occupation", .methods = "GET POST",
     .summary = "Take memory again", .free_body = "MemoryBody", .reply = "Updated"},
    {.path = "/init_weights_update_group", .methods = "POST", .summary = "Refused: no NCCL",
     .free_body = "NoBody", .reply = "Updated"},
    {.path = "/destroy_weights_update_group", .methods = "POST", .summary = "Refused: no NCCL",
     .free_body = "NoBody", .reply = "Updated"},
    {.path = "/update_weights_from_distributed", .methods = "POST",
     .summary = "Refused: no NCCL", .free_body = "NoBody", .reply = "Updated"},
    {.path = "/start_profile", .methods = "GET POST", .summary = "Record a trace",
     .free_body = "ProfileBody", .type = TEXT},
    {.path = "/stop_profile", .methods = "GET POST", .summary = "Write the trace",
     .free_body = "NoBody", .type = TEXT},
    {.path = "/start_expert_distribution_record", .methods = "GET POST",
     .summary = "Record which experts rows choose", .type = TEXT},
    {.path = "/stop_expert_distribution_record", .methods = "GET POST",
     .summary = "Record no more rows", .type = TEXT},
    {.path = "/dump_expert_distribution_record", .methods = "GET POST",
     .summary = "Write the expert record", .type = TEXT},
    {.path = "/kv/save", .methods = "POST",
     .summary = "Save the cached pages of a conversation under a name",
     .body = &kv_save_family, .reply = "KvSaved"},
    {.path = "/kv/restore", .methods = "POST",
     .summary = "Bring the pages of a saved conversation back",
     .body = &kv_restore_family, .reply = "KvSaved"},
    {.path = "/kv/delete", .methods = "POST", .summary = "Delete a saved conversation",
     .body = &kv_delete_family, .reply = "KvDeleted"},
    {.path = "/kv/saved", .methods = "GET", .summary = "The saved conversations",
     .reply = "KvList"},
    {.path = "/rebalance", .methods = "POST",
     .summary = "Move experts between ranks to the best places"},
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
    {"DiskBody",
     "{'type':'object','required':['model_path'],'properties':{'model_path':@Text,"
     "'load_format':{'enum':['auto','safetensors',null]},'weight_version':{'type':['string',"
     "'null']},'abort_all_requests':{'type':['boolean','null']},'flush_cache':{'type':["
     "'boolean','null']},'keep_pause':{'type':['boolean','null']},'selector':{'enum':['all',"
     "'target','draft',null]}}}"},
    {"TensorBody",
     "{'type':'object','properties':{'sha256':{'type':['string','null']},"
     "'update':{'type':['integer','null'],'minimum':0},'safetensors':{'type':['string','null']},'shared_memory':{"
     "'type':['string','null']},'serialized_named_tensors':{'type':['array','null'],'items':@Text,"
     "'minItems':1,'maxItems':1},'cuda_ipc':{'type':['array','null'],'items':{'type':'object',"
     "'required':['name','dtype','shape','handle'],'properties':{'name':@Text,'dtype':@Text,"
     "'shape':{'type':'array','items':@Count},'handle':@Text,'offset':@Count}}},"
     "'base_version':{'type':['string','null']},"
     "'load_format':{'type':['string','null']},'weight_version':{"
     "'type':['string','null']},'abort_all_requests':{'type':['boolean','null']},'flush_cache':{"
     "'type':['boolean','null']},'disable_draft_model':{'type':['boolean','null']},"
     "'selector':{'enum':['all','target','draft',null]}}}"},
    {"BeginBody",
     "{'type':'object','properties':{'selector':{'enum':['all','target','draft',null]}}}"},
    {"AbortUpdateBody",
     "{'type':'object','properties':{'update':{'type':['integer','null'],'minimum':0}}}"},
    {"EndBody",
     "{'type':'object','properties':{'weight_version':{'type':['string','null']},"
     "'update':{'type':['integer','null'],'minimum':0},"
     "'parts':{'type':['integer','null'],'minimum':0},"
     "'abort_all_requests':{'type':['boolean','null']},'flush_cache':{'type':['boolean',"
     "'null']}}}"},
    {"MemoryBody",
     "{'type':'object','properties':{'tags':{'type':['array','null'],'items':{'enum':["
     "'weights','kv_cache','cuda_graph']}}}}"},
    {"VersionBody",
     "{'type':'object','required':['new_version'],'properties':{'new_version':@Text,"
     "'abort_all_requests':{'type':['boolean','null']}}}"},
    {"Updated",
     "{'type':'object','required':['success','message'],'properties':{'success':{'type':"
     "'boolean'},'message':@Text,'num_paused_requests':@Count,'update':@Count,'new_version':@Text}}"},
    {"WeightVersion",
     "{'type':'object','required':['weight_version'],'properties':{'weight_version':@Text}}"},
    {"WeightsByNameBody",
     "{'type':'object','properties':{'name':@Text,'truncate_size':{'type':['integer','null'],"
     "'minimum':1}}}"},
    {"Values", "{}"},
    {"CheckerBody",
     "{'type':'object','properties':{'action':{'enum':['checksum','snapshot','compare',"
     "'reset_tensors']},'skip_tensor_list':{'type':['array','null'],'items':@Text}}}"},
    {"Checked",
     "{'type':'object','required':['success','message'],'properties':{'success':{'type':"
     "'boolean'},'message':@Text,'ranks':{'type':'array'},'per_gpu_checksum':@Text,"
     "'per_engine_checksum':@Text}}"},
    {"KvSaved",
     "{'type':'object','required':['status','name','tokens','pages','window_pages','bytes',"
     "'milliseconds'],'properties':{'status':{'const':'ok'},'name':@Text,'tokens':@Count,"
     "'pages':@Count,'window_pages':@Count,'bytes':@Count,'milliseconds':{'type':'number'},"
     "'not_cached_tokens':@Count,'input_ids':@Integers}}"},
    {"KvDeleted",
     "{'type':'object','required':['status','name'],'properties':{'status':{'const':'ok'},"
     "'name':@Text}}"},
    {"KvList",
     "{'type':'object','required':['saved','bytes','limit_bytes'],'properties':{"
     "'saved':{'type':'array','items':{'type':'object','required':['name','bytes','saved'],"
     "'properties':{'name':@Text,'bytes':@Count,'saved':@Count}}},'bytes':@Count,"
     "'limit_bytes':@Count}}"},
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
