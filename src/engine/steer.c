/* steer.c - what a request asks beside numbers becomes a guide: its reasoning's end, calls that
 * it must make or whose arguments have a schema, the form of its content. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/json.h"
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
static hd_status force_opening(const hd_engine *e, engine_record *r, const hd_generation *g,
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
    if (n == 0) {
        return HD_FAIL(err, HD_EINVAL, "tool_choice: no tool is named '%s'", g->tool_choice);
    }
    r->guide.forced = r->forced.ids;
    r->guide.n_forced = (int32_t)r->forced.n;
    return HD_OK;
}

static bool has_strict_tool(const json_t *tools) {
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *function = json_object_get(json_array_get(tools, i), "function");
        if (json_is_true(json_object_get(function, "strict"))) return true;
    }
    return false;
}

static bool holds_calls(const engine_record *r, const hd_generation *g) {
    return g->form == HD_FORM_FREE && (engine_forces_call(g) || has_strict_tool(r->tools));
}

/* What a grammar of calls wants to know of the tools that may be called: the caller's. */
static char *describe_tools(const engine_record *r, const char *only) {
    static const char *const keys[] = {"name", "strict", "parameters"};
    json_t *list = json_array();
    bool ok = list != NULL;
    for (size_t i = 0; ok && i < json_array_size(r->tools); i++) {
        const json_t *f = json_object_get(json_array_get(r->tools, i), "function");
        const char *name = json_string_value(json_object_get(f, "name"));
        if (!name || (only && strcmp(name, only) != 0)) continue;
        json_t *told = json_object();
        for (size_t k = 0; ok && k < HD_LEN(keys); k++) {
            json_t *value = json_object_get(f, keys[k]);
            ok = !value || json_is_null(value) || json_object_set(told, keys[k], value) == 0;
        }
        ok = json_array_append_new(list, told) == 0 && ok;
    }
    char *text = ok ? hd_json_write(list, JSON_COMPACT) : NULL;
    json_decref(list);
    return text;
}

/* The grammar of the calls that may come, or must. */
static hd_status hold_calls(const hd_engine *e, engine_record *r, const hd_generation *g,
                            hd_err *err) {
    const hd_reply_format format = hd_reply_format_of(e->encoding);
    const bool dsml = format == HD_REPLY_V32 || format == HD_REPLY_V4;
    const bool forced = engine_forces_call(g);
    const bool named = forced && strcmp(g->tool_choice, "required") != 0;
    const hd_grammar_calls calls = {.format = format,
                                    .marks = hd_grammar_vocab_marks(e->vocab),
                                    .flagged = e->flagged && (!dsml || e->dsml_flagged),
                                    .optional = !forced,
                                    .most = named || g->one_call ? 1 : HD_REPLY_MAX_CALLS};
    char *tools = describe_tools(r, named ? g->tool_choice : NULL);
    if (!tools) return HD_FAIL(err, HD_ENOMEM, "no memory for the tools of a request");
    const hd_status st = engine_forms_take_calls(e->forms, &r->form, tools, &calls, err);
    free(tools);
    r->parse.own_spelling = true;
    return st;
}

/* ---- the guide ---- */

static hd_status check_possible(const hd_engine *e, const hd_generation *g, bool behind,
                                hd_err *err) {
    if (!e->executor) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "the null backend has no model to give forms, calls and bounds to");
    }
    if (e->forced_acceptance) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "forced acceptance leaves no room for forms, calls and bounds");
    }
    if (behind && g->ignore_eos) {
        return HD_FAIL(err, HD_EINVAL,
                       "an answer with a form, or calls that keep to one, ends where that "
                       "does: no ignore_eos");
    }
    if (g->form != HD_FORM_FREE && engine_forces_call(g)) {
        return HD_FAIL(err, HD_EINVAL, "an answer cannot both have a form and begin a call");
    }
    return HD_OK;
}

hd_status engine_steer(hd_engine *e, engine_record *r, const hd_generation *g, hd_err *err) {
    const bool calls = holds_calls(r, g);
    const bool behind = g->form != HD_FORM_FREE || calls || engine_forces_call(g);
    const bool relaxed = g->relaxed_top > 0 && g->relaxed_delta > 0;
    if (!behind && !relaxed && !g->max_reasoning) return HD_OK;
    HD_TRY(check_possible(e, g, behind, err));
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
    if (engine_forces_call(g)) HD_TRY(force_opening(e, r, g, err));
    if (calls) HD_TRY(hold_calls(e, r, g, err));
    if (g->form != HD_FORM_FREE) HD_TRY(engine_forms_take(e->forms, &r->form, g, err));
    if (r->form) r->guide.grammar = engine_form_grammar(r->form);
    r->steered = true;
    return HD_OK;
}
