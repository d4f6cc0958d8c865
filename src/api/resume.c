/* resume.c - see resume.h. The value is "SEED CREATED NONCE EVENT PLACE,PLACE,...": a place is how much
 * of a choice was written, -1 before its first chunk; an f behind it: its finish reason was written,
 * too. */
#include "api/resume.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DIGITS = 20 };

static bool take_number(const char **at, char end, uint64_t *out) {
    char *stop;
    if (**at < '0' || **at > '9') return false;
    *out = strtoull(*at, &stop, 10);
    if (stop - *at > MOST_DIGITS || (end && *stop != end)) return false;
    *at = stop + (end != 0);
    return true;
}

bool api_resume_seed(const char *header, uint64_t *seed) {
    uint64_t value;
    if (!header || !take_number(&header, ' ', &value)) return false;
    *seed = value;
    return true;
}

/* Returns whether so many places follow; then the choices have them. */
static bool take_places(api_job *job, const char *at) {
    for (int32_t i = 0; i < job->n_choices; i++) {
        api_choice *c = &job->choices[i];
        uint64_t place = 0;
        c->opened = *at != '-';
        if (c->opened) {
            if (!take_number(&at, 0, &place)) return false;
        } else if (strncmp(at, "-1", 2) == 0) {
            at += 2;
        } else {
            return false;
        }
        c->written = (int64_t)(place & INT64_MAX);
        c->skip = job->format->cumulative ? 0 : c->written;
        c->finish_written = *at == 'f';
        at += c->finish_written;
        if (*at != (i + 1 < job->n_choices ? ',' : '\0')) return false;
        at += *at == ',';
    }
    return true;
}

static void forget_places(api_job *job) {
    for (int32_t i = 0; i < job->n_choices; i++) {
        api_choice *c = &job->choices[i];
        c->opened = c->finish_written = false;
        c->skip = c->written = 0;
    }
}

void api_resume_begin(api_job *job, const char *header) {
    const api_wishes *w = &job->w;
    uint64_t seed, created, nonce, sequence;
    const bool by_token = w->logprobs || w->token_ids || w->prompt_ids || w->sampling_mask;
    job->tells = header && w->stream && !w->background &&
                 (job->format->cumulative || (!w->echo && !by_token));
    if (!job->tells || !take_number(&header, ' ', &seed) ||
        !take_number(&header, ' ', &created) || !take_number(&header, ' ', &nonce) ||
        !take_number(&header, ' ', &sequence) || sequence > INT32_MAX) {
        return;
    }
    if (!take_places(job, header)) {
        forget_places(job);
        return;
    }
    job->created = (int64_t)(created & INT64_MAX);
    job->nonce = nonce;
    job->sequence = (int32_t)sequence;
    job->resumed = true;
}

api_resume_parts api_resume_split(api_choice *c, hd_delta_kind kind, const hd_delta *whole) {
    const bool is_text = kind != HD_DELTA_CALL && kind != HD_DELTA_CALL_END;
    const int64_t size = (int64_t)whole->n + !is_text;
    const int64_t had = c->skip < size ? c->skip : size;
    api_resume_parts p = {*whole, *whole, had > 0, had < size || size == 0};
    c->collected += size;
    c->skip -= had;
    if (is_text) {
        p.had.n = (size_t)had;
        p.lacks.text += had;
        p.lacks.n -= (size_t)had;
    } else if (had < size) {
        p.has_had = false;
    }
    return p;
}

void api_resume_tell(api_job *job) {
    char text[96];
    if (!job->tells || job->out.n == 0) return;
    snprintf(text, sizeof text, API_RESUME_COMMENT "%llu %lld %llu %d ",
             (unsigned long long)job->seed, (long long)job->created,
             (unsigned long long)job->nonce, job->sequence);
    api_puts(&job->out, text);
    for (int32_t i = 0; i < job->n_choices; i++) {
        const api_choice *c = &job->choices[i];
        snprintf(text, sizeof text, "%s%lld%s", i ? "," : "",
                 c->opened ? (long long)c->written : -1LL, c->finish_written ? "f" : "");
        api_puts(&job->out, text);
    }
    api_puts(&job->out, "\n\n");
}
