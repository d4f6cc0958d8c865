/* schemas.c - JSON schemas of replies and events for /openapi.json. The end-to-end tests
 * validate real replies against them. */
#include "api/schemas.h"

/* clang-format off */
const api_schema api_schemas[] = {
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
     "'choices':{'type':'array','items':{'type':'object',"
     "'required':['index','message','logprobs','finish_reason'],'properties':{'index':@Count,"
     "'message':@ChatMessage,'logprobs':@ChatScores,'finish_reason':@FinishReason,"
     "'matched_stop':@MatchedStop,'token_ids':@Integers}}}}}"},
    {"ChatCompletionChunk",
     "{'type':'object','required':['id','object','created','model','choices'],"
     "'properties':{'id':@Text,'object':{'const':'chat.completion.chunk'},'created':@Count,"
     "'model':@Text,'usage':@Usage,'prompt_token_ids':@Integers,"
     "'choices':{'type':'array','items':{'type':'object',"
     "'required':['index','delta','finish_reason'],'properties':{'index':@Count,"
     "'delta':@ChatDelta,'logprobs':@ChatScores,'finish_reason':@FinishReason,"
     "'matched_stop':@MatchedStop,'token_ids':@Integers}}}}}"},
    {"TextScores",
     "{'type':['object','null'],"
     "'required':['tokens','token_logprobs','top_logprobs','text_offset'],'properties':{"
     "'tokens':{'type':'array','items':@Text},'text_offset':@Integers,"
     "'token_logprobs':{'type':'array','items':{'type':['number','null']}},"
     "'top_logprobs':{'type':'array','items':{'type':['object','null']}}}}"},
    {"Completion",
     "{'type':'object','required':['id','object','created','model','choices'],"
     "'properties':{'id':@Text,'object':{'const':'text_completion'},'created':@Count,"
     "'model':@Text,'usage':@Usage,'system_fingerprint':@Text,"
     "'choices':{'type':'array','items':{'type':'object',"
     "'required':['index','text','logprobs','finish_reason'],'properties':{'index':@Count,"
     "'text':@Text,'logprobs':@TextScores,'finish_reason':@FinishReason,"
     "'matched_stop':@MatchedStop,'token_ids':@Integers,'prompt_token_ids':@Integers}}}}}"},
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
const size_t api_n_schemas = sizeof api_schemas / sizeof api_schemas[0];
