/* format.c - what the reply formats share: finish reasons, ids, usage, blocks, and the end
 * of OpenAI's SSE streams. */
#include <stdio.h>
#include <string.h>

#include "api/job.h"
#include "base/progress.h"

const char *api_finish_reason(const api_choice *c) {
    switch (c->finish_reason) {
    case HD_FINISH_STOP:
        return c->n_calls > 0 ? "tool_calls" : "stop";
    case HD_FINISH_LENGTH:
        return "length";
    case HD_FINISH_NONE:
    case HD_FINISH_ABORT:
    case HD_FINISH_TIMEOUT:
    case HD_FINISH_ERROR:
        return "abort";
    }
    return "abort";
}

static uint64_t mix(uint64_t x) { /* splitmix64 */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

void api_call_id(const api_job *job, const api_choice *c, int32_t call, const char *prefix,
                 char out[40]) {
    const uint64_t place = (uint64_t)c->index << 32 | (uint32_t)call;
    snprintf(out, 40, "%s%016llx", prefix, (unsigned long long)mix(job->nonce ^ mix(place)));
}

const char *api_piece_text(const api_choice *c, const api_piece *p) {
    return p->n > 0 ? c->text.data + p->start : "";
}

void api_put_joined(api_text *out, const api_choice *c, hd_delta_kind kind, int32_t call) {
    api_put(out, "\"", 1);
    for (size_t i = 0; i < c->n_pieces; i++) {
        const api_piece *p = &c->pieces[i];
        if (p->kind != kind || p->call != call) continue;
        api_put_escaped(out, api_piece_text(c, p), p->n);
    }
    api_put(out, "\"", 1);
}

api_totals api_job_totals(const api_job *job) {
    api_totals t = {0};
    for (int32_t i = 0; i < job->n_subs; i++) t.prompt += job->subs[i].prompt_tokens;
    for (int32_t i = 0; i < job->n_choices; i++) {
        const api_choice *c = &job->choices[i];
        if (i == job->subs[c->prompt].first_choice) t.cached += c->cached_tokens;
        t.output += c->output_tokens;
        t.reasoning += c->reasoning_tokens;
        t.drafted += c->drafted;
        t.accepted += c->accepted;
        t.draft_steps += c->draft_steps;
    }
    return t;
}

void api_put_usage(api_text *out, const api_job *job) {
    const api_totals t = api_job_totals(job);
    api_write(out,
              "{'prompt_tokens':%lld,'completion_tokens':%lld,'total_tokens':%lld,"
              "'reasoning_tokens':%lld,'prompt_tokens_details':{'cached_tokens':%lld},"
              "'completion_tokens_details':{'reasoning_tokens':%lld,"
              "'accepted_prediction_tokens':%lld,'rejected_prediction_tokens':%lld,"
              "'draft_steps':%lld}}",
              (long long)t.prompt, (long long)t.output, (long long)(t.prompt + t.output),
              (long long)t.reasoning, (long long)t.cached, (long long)t.reasoning,
              (long long)t.accepted, (long long)(t.drafted - t.accepted),
              (long long)t.draft_steps);
}

static void put_span(api_text *out, const api_version_span *s) {
    api_comma(out);
    api_write(out, "{'version':%s,'start':%d,'end':%d}", s->version, s->start, s->end);
}

void api_put_version_spans(api_text *out, const api_choice *c) {
    const api_version_span last = {c->weight_version, c->version_start, c->output_tokens};
    api_version_span s;
    api_puts(out, ",\"weight_versions\":[");
    for (size_t at = 0; at + sizeof s <= c->earlier_versions.n; at += sizeof s) {
        memcpy(&s, c->earlier_versions.data + at, sizeof s);
        put_span(out, &s);
    }
    if (last.end > last.start) put_span(out, &last);
    api_puts(out, "]");
}

const char *api_last_version(const api_choice *c) {
    return c->weight_version ? c->weight_version : "default";
}

void api_put_metadata(api_text *out, const api_choice *c) {
    api_write(out, ",'metadata':{'weight_version':%s}", api_last_version(c));
}

void api_put_matched_stop(api_text *out, const api_choice *c) {
    if (c->stop_text.n > 0) {
        api_put_string(out, c->stop_text.data, c->stop_text.n);
    } else if (c->finish_reason == HD_FINISH_STOP && c->stop_token >= 0) {
        api_put_int(out, c->stop_token);
    } else {
        api_puts(out, "null");
    }
}

void api_put_token(api_text *out, const api_context *ctx, int32_t token) {
    hd_bytes text = {0};
    const hd_tokenizer *t = hd_engine_tokenizer(ctx->engine);
    if (hd_tokenizer_decode(t, &token, 1, false, &text, NULL) != HD_OK) out->failed = true;
    api_put_string(out, text.data, text.n);
    hd_bytes_deinit(&text);
}

/* OpenAI's error object of the failure. */
static void put_error(api_text *out, const api_job *job) {
    const api_refusal *why = &job->failure;
    api_write(out, "{'error':{'message':%s,'type':%s,'param':null,'code':%s}}", why->message,
              api_error_type(HTTP_OPENAI, why->status), why->code);
}

void api_put_progress(api_text *out, const hd_event *e) {
    const int64_t ns = e->admitted_ns ? hd_now_ns() - e->admitted_ns : 0;
    api_write(out, ",'prompt_progress':{'total':%d,'cache':%d,'processed':%d,'time_ms':%lld}",
              e->prompt_tokens, e->step.n_cached, e->step.n_prefilled,
              (long long)(ns / 1000000));
}

void api_put_list(api_text *out, const char *key, const api_text *items) {
    api_write(out, ",%s:[", key);
    api_put(out, items->data, items->n);
    api_puts(out, "]");
}

void api_data_begin(api_job *job, const char *event) {
    if (event) {
        api_puts(&job->out, "event: ");
        api_puts(&job->out, event);
        api_puts(&job->out, "\n");
    }
    api_puts(&job->out, "data: ");
}

void api_data_end(api_job *job) {
    api_puts(&job->out, "\n\n");
}

/* ---- OpenAI's streams ---- */

void api_openai_end(api_job *job) {
    if (job->w.include_usage) {
        api_data_begin(job, NULL);
        api_put(&job->out, job->head.data, job->head.n);
        api_puts(&job->out, "],\"usage\":");
        api_put_usage(&job->out, job);
        api_puts(&job->out, "}");
        api_data_end(job);
    }
    api_puts(&job->out, "data: [DONE]\n\n");
}

void api_openai_fail(api_job *job) {
    api_data_begin(job, NULL);
    put_error(&job->out, job);
    api_data_end(job);
    api_puts(&job->out, "data: [DONE]\n\n");
}

/* ---- blocks ---- */

void api_close_block(api_job *job, api_choice *c, const api_block_writer *w) {
    if (!c->open_block) return;
    w->close(job, c, (hd_delta_kind)(c->open_block - 1), c->open_block - 1 != HD_DELTA_CALL);
    c->open_block = 0;
}

static void open_block(api_job *job, api_choice *c, const api_block_writer *w,
                       const api_piece *p) {
    api_close_block(job, c, w);
    c->open_block = (int32_t)p->kind + 1;
    c->n_blocks++;
    w->open(job, c, p);
}

void api_walk_blocks(api_job *job, api_choice *c, const api_block_writer *w) {
    for (size_t i = 0; i < c->n_pieces; i++) {
        const api_piece *p = &c->pieces[i];
        switch (p->kind) {
        case HD_DELTA_CALL:
            open_block(job, c, w, p);
            break;
        case HD_DELTA_ARGUMENTS:
            w->delta(job, c, p);
            break;
        case HD_DELTA_CALL_END:
            w->close(job, c, HD_DELTA_CALL, p->whole);
            c->open_block = 0;
            break;
        case HD_DELTA_REASONING:
        case HD_DELTA_CONTENT:
            if (c->open_block != (int32_t)p->kind + 1) open_block(job, c, w, p);
            w->delta(job, c, p);
            break;
        case HD_DELTA_NOTE:
            break;
        }
    }
}
