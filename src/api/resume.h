/* resume.h - a stream that another server began and could not end: the same request computes the
 * same text, so this server computes it anew and writes what the client has not got.
 *
 * A router asks for it by the header X-Hadal-Resume. Its value is empty at first: then comments in
 * the stream say, behind the events, how far these have come. Given back as the header's value, the
 * last of them lets another server go on. It has the seed, the time and the nonce of the reply, the
 * number of its next event, and of every choice how much was written: of events that repeat all that
 * came before the tokens, otherwise the bytes and calls. Events that the client has are written again
 * and thrown away, so that those behind them are what they would have been. Not for streams whose
 * events tell of tokens without repeating them. */
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

/* A delta in two: what the client has, and what it lacks. */
typedef struct api_resume_parts {
    hd_delta had, lacks;
    bool has_had, has_lacks;
} api_resume_parts;

api_resume_parts api_resume_split(api_choice *c, hd_delta_kind kind, const hd_delta *whole);

/* Appends the comment to what is about to be sent. */
void api_resume_tell(api_job *job);

#endif
