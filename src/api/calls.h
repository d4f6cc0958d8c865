/* calls.h - the calls of answers, kept as the model wrote them. When a client sends them back
 * unchanged, the next prompt has the very tokens, so that the prefix cache knows it, however
 * oddly they were spelled. */
#ifndef HD_API_CALLS_H
#define HD_API_CALLS_H

#include "api/job.h"

/* Gathers a part of a call that is shown to the client. */
void api_calls_collect(api_choice *c, const hd_part *p);

/* With an answer's last event, before the client can know of it: stores its tokens, and as
 * items [["name","arguments"],...], under the id of its first call without the prefix. */
void api_calls_keep(api_job *job, api_choice *c, const hd_event *e);

/* Gives the messages of a parsed conversation the tokens of their calls, where these are known
 * and unchanged. False: refused. */
bool api_calls_take(api_request *r);

#endif
