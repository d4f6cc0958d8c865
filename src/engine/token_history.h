/* token_history.h - answers as the model wrote them, to be known again when a client sends them back.
 *
 * Tokens can spell a text in many ways, and a model may have chosen another than a tokenizer
 * would. So the tokens of an answer are kept with what was said in it, under the prompt that it
 * answers. Where a later prompt begins like that one and goes on with the same answer, it gets
 * these very tokens, and the prefix cache knows them. Any thread may call. */
#ifndef HD_ENGINE_TOKEN_HISTORY_H
#define HD_ENGINE_TOKEN_HISTORY_H

#include "chat/chat.h"
#include "chat/reply.h"
#include "tokenizer/tokenizer.h"

typedef struct engine_token_history engine_token_history;

/* One answer, gathered while it comes. */
typedef struct engine_answer_tokens {
    hd_ids tokens; /* without the one that ended it */
    hd_bytes reasoning, content;
    hd_bytes calls; /* name, NUL, arguments, NUL, ... */
    int32_t n_calls;
    bool thought; /* there are tokens of reasoning, perhaps without text */
    bool in_call; /* the last one did not end well, or not yet */
    bool lost;    /* these texts do not tell all of the tokens */
} engine_answer_tokens;

void engine_answer_tokens_event(engine_answer_tokens *s, const hd_reply_event *e);
void engine_answer_tokens_push(engine_answer_tokens *s, int32_t token);
void engine_answer_tokens_deinit(engine_answer_tokens *s); /* an all-zero one is fine */

hd_status engine_token_history_open(engine_token_history **out, size_t max_bytes, hd_err *err);
void engine_token_history_close(engine_token_history *r); /* NULL is fine */

/* Keeps an answer to the prompt of this key; what it said is moved in or dropped. */
void engine_token_history_keep(engine_token_history *r, uint64_t salt, uint64_t key,
                               engine_answer_tokens *answer);

/* Gives the blocks of p that are known, from answers under this very salt, their tokens; c is what
 * p was rendered from. *key is the one of an answer to p. */
hd_status engine_token_history_fill(engine_token_history *r, uint64_t salt,
                                    const hd_conversation *c, hd_chat_prompt *p, uint64_t *key,
                                    hd_err *err);

#endif
