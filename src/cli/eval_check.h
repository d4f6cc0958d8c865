/* eval_check.h - does an answer satisfy a task's checker?
 *
 * {"type": T, "expect": E} with T one of
 *     exact         the answer, trimmed, is E
 *     contains      E is in it
 *     final_number  its last whole number is E
 *     regex         the pattern E is found in it (PCRE2, dot matches line feeds)
 *     tool_call     its calls are E: [{"name": ..., "arguments": {...}}, ...]
 * Only what is said after the reasoning is judged. */
#ifndef HD_CLI_EVAL_CHECK_H
#define HD_CLI_EVAL_CHECK_H

#include <jansson.h>
#include <stdbool.h>

#include "base/status.h"
#include "chat/chat.h"

/* Refuses a checker that cannot be used; where names it in the error. */
hd_status eval_check_valid(const json_t *checker, const char *where, hd_err *err);

typedef struct eval_verdict {
    bool right;
    bool finished; /* the reasoning ended, and calls are well formed */
} eval_verdict;

/* text[n]: the whole reply, special tokens spelled out. */
hd_status eval_check(eval_verdict *out, const json_t *checker, const char *text, size_t n,
                     hd_chat_encoding encoding, bool thinking, hd_err *err);

#endif
