/* steer.c - what a request asks beside numbers becomes a guide: its reasoning's end, a call that
 * it must begin, the form of its content. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "engine/engine_internal.h"

static int32_t find_token(const hd_engine *e, const char *text) {
    return hd_tokenizer_find(e->tokenizer, text, strlen(text));
}

/* ---- calls ---- */

bool engine_forces_call(const hd_generation *g) {
    const char *c = g->tool_choice;
    return c && strcmp(c, "auto") != 0 && strcmp(c, "none") != 0;
}

static hd_status encode_opening(const hd_engine *e, const hd_reply_tool *tool, hd_ids *out,
                                hd_err *err) {
    hd_chat_prompt text;
    HD_TRY(hd_reply_opening(&text, hd_reply_format_of(e->encoding), tool->name, tool->n, err));
    const hd_status st = hd_tokenizer_encode_spans(e->tokenizer, text.text, text.n, text.spans,
                                                   (size_t)text.n_spans, out, err);
    hd_chat_prompt_deinit(&text);
    return st;
}

/* Keeps what all openings have in common: that says "a call", and leaves open of what. */
static void keep_common(hd_ids *common, const hd_ids *other) {
    size_t n = 0;
    while (n < common->n && n < other->n && common->ids[n] == other->ids[n]) n++;
    common->n = n;
}

static bool is_named(const hd_reply_tool *t, const char *name) {
    return strlen(name) == t->n && memcmp(name, t->name, t->n) == 0;
}

/* The tokens that begin a call of the tool that is named, or of any. */
static hd_status force_call(const hd_engine *e, engine_record *r, const hd_generation *g,
                            hd_err *err) {
    const hd_reply_tools *tools = &r->reply_tools;
    const bool any = strcmp(g->tool_choice, "required") == 0;
    int32_t n = 0;
    if (tools->n_tools == 0) {
        return HD_FAIL(err, HD_EINVAL, "tool_choice is '%s', but there are no tools",
                       g->tool_choice);
    }
    for (int32_t i = 0; i < tools->n_tools; i++) {
        const hd_reply_tool *t = &tools->tools[i];
        if (!any && !is_named(t, g->tool_choice)) continue;
        hd_ids opening = {0};
        const hd_status st = encode_opening(e, t, n ? &opening : &r->forced, err);
        if (n++) keep_common(&r->forced, &opening);
        hd_ids_deinit(&opening);
        HD_TRY(st);
    }
    if (n) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "tool_choice: no tool is named '%s'", g->tool_choice);
}

/* ---- the guide ---- */

static hd_status check_possible(const hd_engine *e, const hd_generation *g, hd_err *err) {
    if (!e->executor) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "the null backend has no model to give forms, calls and bounds to");
    }
    if (e->forced_acceptance) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "forced acceptance leaves no room for forms, calls and bounds");
    }
    if (g->form != HD_FORM_FREE && g->ignore_eos) {
        return HD_FAIL(err, HD_EINVAL,
                       "an answer with a form ends where the form does: no ignore_eos");
    }
    if (g->form != HD_FORM_FREE && engine_forces_call(g)) {
        return HD_FAIL(err, HD_EINVAL, "an answer cannot both have a form and begin a call");
    }
    return HD_OK;
}

hd_status engine_steer(hd_engine *e, engine_record *r, const hd_generation *g, hd_err *err) {
    const bool behind = g->form != HD_FORM_FREE || engine_forces_call(g);
    const bool relaxed = g->relaxed_top > 0 && g->relaxed_delta > 0;
    if (!behind && !relaxed && !g->max_reasoning) return HD_OK;
    HD_TRY(check_possible(e, g, err));
    const bool may_begin = r->is_chat && e->encoding == HD_CHAT_R1_0528;
    r->guide = (hd_guide){.reasoning = r->starts_in_reasoning,
                          .think = may_begin ? find_token(e, "<think>") : -1,
                          .unthink = r->is_chat ? find_token(e, "</think>") : -1,
                          .max_reasoning = g->max_reasoning,
                          .relaxed_top = relaxed ? g->relaxed_top : 0,
                          .relaxed_delta = relaxed ? g->relaxed_delta : 0,
                          .ban = r->ban,
                          .n_ban = g->min_tokens ? r->request.n_stop : 0,
                          .ban_until = r->n_prompt + g->min_tokens};
    if (r->guide.reasoning && r->guide.unthink < 0) {
        return HD_FAIL(
            err, HD_EUNSUPPORTED,
            "the tokenizer has no token </think>, so reasoning has no end to be seen");
    }
    if (engine_forces_call(g)) {
        HD_TRY(force_call(e, r, g, err));
        r->guide.forced = r->forced.ids;
        r->guide.n_forced = (int32_t)r->forced.n;
    }
    if (g->form != HD_FORM_FREE) {
        HD_TRY(engine_forms_take(e->forms, &r->form, g, err));
        r->guide.grammar = engine_form_grammar(r->form);
    }
    r->steered = true;
    return HD_OK;
}
