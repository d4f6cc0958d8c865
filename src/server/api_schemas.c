/* api_schemas.c - the shapes of replies and events, as the description of the interface gives
 * them; the end-to-end tests hold real replies against them. */
#include "server/api_schemas.h"

#define REF(name)   "{'$ref':'#/components/schemas/" name "'}"
#define ARRAY(item) "{'type':'array','items':" item "}"
#define OBJECT(required, properties) \
    "{'type':'object','required':[" required "],'properties':{" properties "}}"
#define STRING     "{'type':'string'}"
#define INT        "{'type':'integer'}"
#define COUNT      "{'type':'integer','minimum':0}"
#define NUMBER     "{'type':'number'}"
#define BOOL       "{'type':'boolean'}"
#define TEXT       "{'type':['string','null']}"
#define ANY        "{}"
#define CONST(v)   "{'const':'" v "'}"
#define OR_NULL(s) "{'oneOf':[{'type':'null'}," s "]}"

#define REASON  "{'enum':['stop','length','tool_calls','abort',null]}"
#define MATCHED "{'type':['integer','string','null']}"
#define HEAD(object) \
    "'id':" STRING ",'object':" CONST(object) ",'created':" INT ",'model':" STRING

#define CALL                                                   \
    OBJECT("'id','type','function'",                           \
           "'id':" STRING ",'index':" COUNT                    \
           ",'type':" CONST("function") ",'function':" OBJECT( \
               "'name','arguments'", "'name':" STRING ",'arguments':" STRING))
#define CALL_DELTA                                                                   \
    OBJECT("'index','function'", "'index':" COUNT ",'id':" STRING                    \
                                 ",'type':" CONST("function") ",'function':" OBJECT( \
                                     "'arguments'", "'name':" STRING ",'arguments':" STRING))
#define SCORED                                                                 \
    OBJECT("'token','logprob','bytes'", "'token':" STRING ",'logprob':" NUMBER \
                                        ",'bytes':" ARRAY(INT) ",'top_logprobs':" ARRAY(ANY))
#define LOGPROBS OR_NULL(OBJECT("'content'", "'content':" ARRAY(REF("ScoredToken"))))

#define TRIPLE                                                                \
    "{'type':'array','prefixItems':[{'type':['number','null']}," INT "," TEXT \
    "],'minItems':3,"                                                         \
    "'maxItems':3}"

#define ITEM                                                                      \
    OBJECT("'type','id'",                                                         \
           "'type':{'enum':['message','reasoning','function_call']},'id':" STRING \
           ",'status':{'enum':['in_progress','completed','incomplete']}")
#define BLOCK OBJECT("'type'", "'type':{'enum':['text','thinking','tool_use']}")

const api_schema api_schemas[] = {
    {"Error",                                                                              OBJECT("'error'",                                                        "'error':" OBJECT("'message','type','param','code'",
     "'message':" STRING ",'type':" STRING
                                                  ",'param':" TEXT ",'code':" TEXT))},
    {"AnthropicError",
     OBJECT("'type','error'",                                                                                                                                            "'type':" CONST("error") ",'error':" OBJECT(
                                  "'type','message'",                                                                                                                                                                                                                                           "'type':" STRING ",'message':" STRING))},
    {"Usage",
     OBJECT("'prompt_tokens','completion_tokens','total_tokens'",
     "'prompt_tokens':" COUNT ",'completion_tokens':" COUNT ",'total_tokens':" COUNT
            ",'reasoning_tokens':" COUNT ",'prompt_tokens_details':" OBJECT(
                "'cached_tokens'","'cached_tokens':" COUNT) ",'completion_tokens_details'"
                                                             ":" OBJECT("'reasoning_tokens'",
     "'reasoning_tokens'"
                                                                        ":" COUNT))},
    {"ScoredToken",                                                         SCORED                                    },
    {"ToolCall",                                                                        CALL                                                                                },
    {"ChatCompletion",
     OBJECT("'id','object','created','model','choices','usage'",
     HEAD("chat.completion") ",'usage':" REF("Usage") ",'choices':" ARRAY(OBJECT(
                "'index','message','finish_reason'",                                                                                                                                                                                    "'index':" COUNT ",'message':" OBJECT(
                    "'role','content'", "'role':" CONST(
                        "assistant") ",'content':" TEXT ",'reasoning_content':" TEXT
                                     ",'tool_calls':" OR_NULL(ARRAY(REF(
                                         "ToolCall")))) ",'logprobs':" LOGPROBS
                                                        ",'finish_reason':" REASON
                                                        ",'matched_stop':" MATCHED
                                                        ",'token_ids':" ARRAY(
                                                            INT))) ",'prompt_token_ids'"
                                                                   ":" ARRAY(INT) ",'system_"
                                                                                  "fingerprint"
                                                                                  "'"
                                                                                  ":" STRING)},
    {"ChatCompletionChunk",
     OBJECT("'id','object','created','model','choices'",
     HEAD("chat.completion.chunk") ",'usage':" REF("Usage") ",'choices':" ARRAY(OBJECT(
                "'index','delta','finish_reason'",                                                                                                                                               "'index':" COUNT ",'delta':" OBJECT(
                    "", "'role':" CONST(
                            "assistant") ",'content':" STRING ",'reasoning_content':" STRING
                                         ",'tool_calls':" ARRAY(
                                             CALL_DELTA)) ",'logprobs':" LOGPROBS
                                                          ",'finish_reason':" REASON
                                                          ",'matched_stop':" MATCHED
                                                          ",'token_ids':" ARRAY(
                                                              INT))) ",'prompt_token_ids'"
                                                                     ":" ARRAY(INT))},
    {"Completion",
     OBJECT(
         "'id','object','created','model','choices'",                                                                                                            HEAD("text_completion") ",'usage':" REF("Usage") ",'choices':" ARRAY(OBJECT(
             "'index','text','finish_reason'",                                                                                   "'index':" COUNT ",'text':" STRING ",'finish_reason':" REASON
             ",'matched_stop':" MATCHED ",'token_ids':" ARRAY(INT) ",'prompt_token_ids':" ARRAY(INT) ",'logprobs':" OR_NULL(
                 OBJECT(
                     "'tokens','token_logprobs','top_logprobs','text_offset'", "'tokens':" ARRAY(STRING) ",'token_logprobs':" ARRAY(
                         "{'type':['number','null']}") ",'top_logprobs':" ARRAY("{'type':['"
                                                                                "object','null'"
                                                                                "]}") ",'text_"
                                                                                      "offset'"
                                                                                      ":" ARRAY(
                                                                                          COUNT))))) ",'system_fingerprint':" STRING)},
    {"GenerateAnswer",
     OBJECT("'text','output_ids','meta_info'",
     "'text':" STRING
            ",'output_ids':" ARRAY(INT) ",'index':" COUNT ",'meta_info':" OBJECT(
                "'id','finish_reason','prompt_tokens','completion_tokens','"
                "cached_tokens'",                                                                               "'id':" STRING ",'finish_reason':" OR_NULL(OBJECT(
                    "'type'", "'type':{'enum':['stop','length','abort']"
                              "}")) ",'prompt_tokens':" COUNT ",'completion_tokens':" COUNT
                                    ",'cached_tokens':" COUNT ",'reasoning_tokens':" COUNT
                                    ",'e2e_latency':" NUMBER ",'output_token_logprobs':" ARRAY(
                                        TRIPLE) ",'input_token_logprobs'"
                                                ":" ARRAY(TRIPLE)))},
    {"GenerateAnswers",
     "{'oneOf':[" REF("GenerateAnswer") "," ARRAY(REF("GenerateAnswer")) "]}"                                  },
    {"Model",                                                                     OBJECT("'id','object','created','owned_by','max_model_len'",
     "'id':" STRING ",'object':" CONST(
                         "model") ",'created':" INT ",'owned_by':" STRING ",'root':" STRING
                                  ",'parent':" TEXT ",'max_model_len':" COUNT)                                                                                                                                                                                                                     },
    {"ModelList",
     OBJECT("'object','data'",                                                                                         "'object':" CONST("list") ",'data':" ARRAY(REF("Model")))                                                                                                                                                              },
    {"Tokens",                                                                                    OBJECT("'tokens','count','max_model_len'",
     "'tokens':{'type':'array'},'count':{'type':['integer','array']},"
                      "'max_model_len':" COUNT ",'token_strs':{'type':'array'}")},
    {"DecodedTokens",                                                                                    OBJECT("'text','prompt','content'",
     "'text':{'type':['string','array']},'prompt':{'type':['string',"
                             "'array']},'content':{'type':['string','array']}")                                                                                                                                                                                                                                      },
    {"Prompt",                                                                                    OBJECT("'prompt'",                                                                                                                                                    "'prompt':" STRING)                                                                                                                                                                          },
    {"ParsedCalls",                                                                                    OBJECT("'normal_text','calls'",
     "'normal_text':" STRING
                           ",'calls':" ARRAY(OBJECT("'tool_index','name','parameters'",
     "'tool_index':" COUNT ",'name':" STRING
                                                    ",'parameters':" STRING)))},
    {"SeparatedReasoning",
     OBJECT("'reasoning_text','text'",                                                                                                                                                    "'reasoning_text':" STRING ",'text':" STRING)                                                                                                                                                                                                                                         },
    {"Message",
     OBJECT("'id','type','role','model','content','stop_reason','stop_sequence','usage'",
     "'id':" STRING ",'type':" CONST("message") ",'role':" CONST(
                "assistant") ",'model':" STRING
                             ",'content':" ARRAY(
                                 BLOCK) ",'stop_reason':{'enum':['end_turn','max_tokens','stop_"
                                        "sequence','tool_use',"
                                        "'pause_turn',null]},'stop_sequence':" TEXT
                                        ",'usage':" OBJECT(
                                            "'input_tokens','output_tokens'","'input_tokens':" COUNT ",'output_tokens':" COUNT
                                            ",'cache_read_input_tokens':" COUNT
                                            ",'cache_creation_input_tokens':" COUNT))},
    {"MessageEvent",
     OBJECT("'type'",
     "'type':{'enum':['message_start','content_block_start','content_block_delta',"
            "'content_block_stop','message_delta','message_stop','error']},'message':" REF(
                "Message") ",'index':" COUNT ",'content_block':" BLOCK
                           ",'delta':{'type':'object'},'usage':{'type':'object'}")                                                                                                                         },
    {"TokenCount",                                       OBJECT("'input_tokens'","'input_tokens':" COUNT)},
    {"Response",
     OBJECT("'id','object','created_at','status','model','output','usage','error',"
            "'incomplete_details','parallel_tool_calls','tool_choice','tools'", "'id':" STRING ",'object':" CONST(
                "response") ",'created_at':" INT ",'status':{'enum':['in_progress','completed',"
                            "'incomplete','failed','cancelled']},"
                            "'model':" STRING
                            ",'output':" ARRAY(ITEM) ",'usage':" OR_NULL(OBJECT(
                                "'input_tokens','output_tokens','total_tokens'","'input_tokens':" COUNT ",'output_tokens':" COUNT
                                ",'total_tokens':" COUNT)) ",'error':{'type':['object','null']}"
                                                           ",'incomplete_details':{'type':['"
                                                           "object','null']},"
                                                           "'tools':" ARRAY(
                                                               ANY) ",'metadata':{'type':'"
                                                                    "object'},'store':" BOOL)},
    {"ResponseEvent",                                                                      OBJECT("'type','sequence_number'",
     "'type':{'type':'string','pattern':'^response[.]'},"
                             "'sequence_number':" COUNT ",'response':" REF(
                                 "Response") ",'item':" ITEM ",'output_index':" COUNT
                                             ",'content_index':" COUNT ",'delta':" STRING)                                                                                                                                                                 },
};
const size_t api_n_schemas = sizeof api_schemas / sizeof api_schemas[0];
