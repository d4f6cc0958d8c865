/* wire.c - checks of what another server sent. */
#include "pd/wire.h"

#include <string.h>

static bool is_text(const char *text, size_t size) {
    return memchr(text, 0, size) != NULL;
}

/* Printable, and without what labels of metrics would have to escape. */
static bool is_name(const char *text, size_t size) {
    if (!is_text(text, size)) return false;
    for (const char *c = text; *c; c++) {
        if (*c <= ' ' || *c > '~' || *c == '"' || *c == '\\') return false;
    }
    return *text != 0;
}

const char *pd_facts_difference(const pd_facts *a, const pd_facts *b) {
    if (memcmp(a->version, b->version, sizeof a->version) != 0) return "version";
    if (memcmp(a->family, b->family, sizeof a->family) != 0) return "model family";
    if (memcmp(a->number_format, b->number_format, sizeof a->number_format) != 0) {
        return "number format";
    }
    if (a->weights != b->weights) return "weights";
    if (memcmp(a->sums, b->sums, sizeof a->sums) != 0) return "order of sums (--sum-in-ranks)";
    const bool same = a->page_tokens == b->page_tokens &&
                      memcmp(a->page_bytes, b->page_bytes, sizeof a->page_bytes) == 0;
    return same ? NULL : "page size";
}

hd_status pd_hello_read(pd_hello *out, const void *payload, size_t before, size_t n,
                        hd_err *err) {
    if (n != before + sizeof *out) {
        return HD_FAIL(err, HD_EFORMAT, "a greeting of %zu bytes; it has %zu", n,
                       before + sizeof *out);
    }
    memcpy(out, (const char *)payload + before, sizeof *out);
    const pd_facts *f = &out->facts;
    const bool texts = is_text(f->version, sizeof f->version) &&
                       is_text(f->family, sizeof f->family) &&
                       is_text(f->number_format, sizeof f->number_format);
    if (!texts || !is_name(out->name, sizeof out->name) || out->epoch == 0) {
        return HD_FAIL(err, HD_EFORMAT, "a greeting without a name, or of no epoch");
    }
    return HD_OK;
}

hd_status pd_lease_read(hd_lease_message *out, pd_frame_kind frame, const void *payload,
                        size_t n, hd_err *err) {
    const size_t least = sizeof *out + (frame == PD_FRAME_RESERVE ? sizeof(pd_prompt)
                                        : frame == PD_FRAME_PAGE  ? sizeof(hd_page_head)
                                                                  : 0);
    if (n < least || (frame == PD_FRAME_LEASE && n != least)) {
        return HD_FAIL(err, HD_EFORMAT, "a message of %zu bytes in a frame of kind %d", n,
                       frame);
    }
    memcpy(out, payload, sizeof *out);
    const bool reserves = out->kind == HD_LEASE_MSG_RESERVE;
    const bool brings = out->kind == HD_LEASE_MSG_PAGE;
    if (reserves != (frame == PD_FRAME_RESERVE) || brings != (frame == PD_FRAME_PAGE)) {
        return HD_FAIL(err, HD_EFORMAT, "a message of kind %u in a frame of kind %d", out->kind,
                       frame);
    }
    return HD_OK;
}

static bool are_pages(const pd_prompt *p, int32_t page_tokens) {
    const int32_t all = (p->n_tokens - 1) / page_tokens;
    return p->n_tokens >= 1 && (p->n_tokens - 1) % page_tokens == 0 &&
           hd_page_range_fits(&p->pages, all);
}

hd_status pd_prompt_read(pd_prompt *out, const int32_t **tokens, const void *payload, size_t n,
                         int32_t page_tokens, int32_t vocab, hd_err *err) {
    hd_lease_message m;
    const size_t before = sizeof m + sizeof *out;
    HD_TRY(pd_lease_read(&m, PD_FRAME_RESERVE, payload, n, err));
    memcpy(out, (const char *)payload + sizeof m, sizeof *out);
    if (!are_pages(out, page_tokens) || m.n_pages != hd_page_range_size(&out->pages) ||
        m.n_tokens != (uint32_t)out->n_tokens) {
        return HD_FAIL(err, HD_EFORMAT, "a prompt of %d tokens and %u pages", out->n_tokens,
                       m.n_pages);
    }
    if (!is_text(out->trace_id, sizeof out->trace_id)) {
        return HD_FAIL(err, HD_EFORMAT, "a trace id without an end");
    }
    if (n - before != (size_t)out->n_tokens * sizeof **tokens) {
        return HD_FAIL(err, HD_EFORMAT, "%zu bytes for %d tokens", n - before, out->n_tokens);
    }
    *tokens = (const int32_t *)(const void *)((const char *)payload + before);
    for (int32_t i = 0; i < out->n_tokens; i++) {
        if ((*tokens)[i] >= 0 && (*tokens)[i] < vocab) continue;
        return HD_FAIL(err, HD_EFORMAT, "token %d of the prompt is %d", i, (*tokens)[i]);
    }
    return HD_OK;
}
