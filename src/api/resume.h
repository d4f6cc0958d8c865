/* resume.h - a stream that another server began and could not end: the same request computes the
 * same text, so this server computes it anew and writes what the client has not got.
 *
 * A router asks for it by the header X-Hadal-Resume. Its value is empty at first: then comments in
 * the stream say, behind the events, how far these have come. Given back as the header's value, the
 * last of them lets another server go on. It has the seed, the time and the nonce of the reply, and
 * of every choice how much was written. Only for OpenAI's streams of text and calls. */
#ifndef HD_API_RESUME_H
#define HD_API_RESUME_H

#include "api/job.h"

#define API_RESUME_HEADER  "X-Hadal-Resume"
#define API_RESUME_COMMENT ": hadal "

/* Returns whether the header names a seed, which the request then has. */
bool api_resume_seed(const char *header, uint64_t *seed);

/* Before the first event of a job: whether it says how far it has come, and from where it goes on.
 * A malformed value is like an empty one. */
void api_resume_begin(api_job *job, const char *header);

/* Takes from a delta what the client has. Returns false if nothing of it is left. */
bool api_resume_keep(api_choice *c, hd_delta_kind kind, hd_delta *part);

/* Appends the comment to what is about to be sent. */
void api_resume_tell(api_job *job);

#endif
