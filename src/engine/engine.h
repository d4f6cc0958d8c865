/* engine.h - what the floors above need of an engine beyond include/hadal.h: prompts that are
 * parsed already, and the parts that read text. */
#ifndef HD_ENGINE_ENGINE_H
#define HD_ENGINE_ENGINE_H

#include "base/status.h"
#include "hadal.h"
#include "chat/chat.h"
#include "tokenizer/tokenizer.h"
#include "weights/spec.h"

/* As hd_engine_submit(), with an error code: HD_EAGAIN for a full queue, HD_EINVAL for a
 * request that can never run. conversation: the prompt, in place of g->messages and g->tools;
 * or NULL. */
hd_status hd_engine_submit_chat(hd_engine *e, uint64_t *id, const hd_request *g,
                                const hd_conversation *conversation, hd_err *err);

/* The prompt of a conversation as text; release with hd_chat_prompt_deinit(). */
hd_status hd_engine_render(const hd_engine *e, hd_chat_prompt *out, const hd_request *g,
                           const hd_conversation *conversation, hd_err *err);

/* Its ids, as hd_engine_submit_chat() would take them, appended to out. */
hd_status hd_engine_encode(const hd_engine *e, hd_ids *out, const hd_request *g,
                           const hd_conversation *conversation, hd_err *err);

const hd_tokenizer *hd_engine_tokenizer(const hd_engine *e); /* NULL with dummy weights */
const hd_model_spec *hd_engine_spec(const hd_engine *e);
hd_chat_encoding hd_engine_encoding(const hd_engine *e);
bool hd_engine_thinks(const hd_engine *e); /* unless told otherwise */

#endif
