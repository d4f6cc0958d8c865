/* eval_check.h - decides whether an answer satisfies a task's checker.
 *
 * {"type": T, "expect": E} with T one of
 *     exact         the trimmed answer is E
 *     contains      E is in it
 *     final_number  its last integer is E
 *     regex         pattern E matches in it (PCRE2, dot matches line feeds)
 *     tool_call     its calls are E: [{"name": ..., "arguments": {...}}, ...], all well-formed
 *     countdown     its last line is an expression that makes E.target of E.numbers (countdown.h)
 * Reasoning is not checked. */
#ifndef HD_CLI_EVAL_CHECK_H
#define HD_CLI_EVAL_CHECK_H

#include <jansson.h>
#include <stdbool.h>

#include "base/status.h"
#include "chat/chat.h"

/* Refuses an invalid checker; `where` names it in the error. */
hd_status eval_check_valid(const json_t *checker, const char *where, hd_err *err);

typedef struct eval_verdict {
    bool right;
    bool finished; /* the reasoning ended, and all calls are well-formed */
} eval_verdict;

/* text[n]: the complete reply, with special tokens as text. */
hd_status eval_check(eval_verdict *out, const json_t *checker, const char *text, size_t n,
                     hd_chat_encoding encoding, bool thinking, hd_err *err);

#endif
