/* engine.h - the engine's interface for API, server and CLI beyond include/hadal.h: prompts
 * that are already parsed, chat template rendering, and the tokenizer. */
#ifndef HD_ENGINE_ENGINE_H
#define HD_ENGINE_ENGINE_H

#include "base/status.h"
#include "hadal.h"
#include "chat/chat.h"
#include "ops/ops.h"
#include "tokenizer/tokenizer.h"
#include "weights/parallel_config.h"
#include "weights/spec.h"

/* Like hd_engine_submit(), but returns a status: HD_EAGAIN if the queue is full, HD_EINVAL
 * for a request that can never run. conversation, unless NULL, replaces g->messages and
 * g->tools. */
hd_status hd_engine_submit_chat(hd_engine *e, uint64_t *id, const hd_request *g,
                                const hd_conversation *conversation, hd_err *err);

/* Renders a conversation by the model's chat template. Release *out with
 * hd_chat_prompt_deinit(). */
hd_status hd_engine_render(const hd_engine *e, hd_chat_prompt *out, const hd_request *g,
                           const hd_conversation *conversation, hd_err *err);

/* Appends the token ids of the prompt to out, as hd_engine_submit_chat() would encode them. */
hd_status hd_engine_encode(const hd_engine *e, hd_ids *out, const hd_request *g,
                           const hd_conversation *conversation, hd_err *err);

const hd_tokenizer *hd_engine_tokenizer(const hd_engine *e); /* NULL with dummy weights */
const hd_model_spec *hd_engine_spec(const hd_engine *e);
hd_chat_encoding hd_engine_encoding(const hd_engine *e);
/* The number format of activations in products, "bfloat16", and the precision that has it. NULL
 * on the null runner. */
const char *hd_engine_activations(const hd_engine *e, hd_precision *precision);
/* The ranks that run the model; their number is hd_parallel_world(). */
const hd_parallel_config *hd_engine_parallel(const hd_engine *e);
bool hd_engine_thinks(const hd_engine *e); /* whether the model reasons by default */

#endif
