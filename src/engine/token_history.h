/* token_history.h - remembers the tokens of generated answers, to reuse them when a client
 * sends the answer's text back.
 *
 * Tokens can spell a text in many ways, and a model may generate another spelling than the
 * tokenizer would. So the tokens of an answer are stored with its texts, under a hash of its
 * prompt. When a later prompt begins with that prompt and continues with the same answer, it
 * is encoded with the stored tokens, and the prefix cache matches. Any thread may call. */
#ifndef HD_ENGINE_TOKEN_HISTORY_H
#define HD_ENGINE_TOKEN_HISTORY_H

#include "chat/chat.h"
#include "chat/reply.h"
#include "tokenizer/tokenizer.h"

typedef struct engine_token_history engine_token_history;

/* One answer, collected while it is generated. */
typedef struct engine_answer_tokens {
    hd_ids tokens; /* without the token that ended it */
    hd_bytes reasoning, content;
    hd_bytes calls; /* name, NUL, arguments, NUL, ... */
    int32_t n_calls;
    bool thought; /* there are reasoning tokens, perhaps without text */
    bool in_call; /* the last call is incomplete */
    /* the texts do not account for all of the tokens; such an answer is not stored */
    bool lost;
} engine_answer_tokens;

void engine_answer_tokens_event(engine_answer_tokens *s, const hd_reply_event *e);
void engine_answer_tokens_push(engine_answer_tokens *s, int32_t token);
void engine_answer_tokens_deinit(engine_answer_tokens *s); /* an all-zero one is fine */

hd_status engine_token_history_open(engine_token_history **out, size_t max_bytes, hd_err *err);
void engine_token_history_close(engine_token_history *r); /* NULL is fine */

/* Stores an answer to the prompt of this key; its contents are moved or freed. */
void engine_token_history_keep(engine_token_history *r, uint64_t salt, uint64_t key,
                               engine_answer_tokens *answer);

/* Sets the tokens of those blocks of p that match stored answers of the same salt. c is what
 * p was rendered from. *key is set to the key of an answer to p. */
hd_status engine_token_history_fill(engine_token_history *r, uint64_t salt,
                                    const hd_conversation *c, hd_chat_prompt *p, uint64_t *key,
                                    hd_err *err);

#endif
