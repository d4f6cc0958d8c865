/* sampling_constraint.c - builds a request's constraint: the reasoning budget, forced tool
 * calls, the schemas of their arguments, and the response format. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/json.h"
#include "engine/engine_internal.h"

static int32_t find_token(const hd_engine *e, const char *text) {
    return hd_tokenizer_find(e->tokenizer, text, strlen(text));
}

/* ---- tool calls ---- */

static bool forces_tool_call(const hd_request *g) {
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

/* Keeps the common beginning of all openings: it begins a tool call and leaves the tool
 * open. */
static void keep_common(hd_ids *common, const hd_ids *other) {
    size_t n = 0;
    while (n < common->n && n < other->n && common->ids[n] == other->ids[n]) n++;
    common->n = n;
}

static bool is_named(const hd_reply_tool *t, const char *name) {
    return strlen(name) == t->n && memcmp(name, t->name, t->n) == 0;
}

/* Forces the tokens that begin a call of the named tool, or of any tool. */
static hd_status force_opening(const hd_engine *e, engine_request *r, const hd_request *g,
                               hd_err *err) {
    const hd_reply_tools *tools = &r->reply_tools;
    const bool any = strcmp(g->tool_choice, "required") == 0;
    int32_t n = 0;
    if (tools->n_tools == 0) {
        return HD_REFUSE(err, HD_EINVAL, NULL, "tool_choice",
                         "tool_choice is '%s', but there are no tools", g->tool_choice);
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
        return HD_REFUSE(err, HD_EINVAL, NULL, "tool_choice",
                         "tool_choice: no tool is named '%s'", g->tool_choice);
    }
    r->constraint.forced = r->forced.ids;
    r->constraint.n_forced = (int32_t)r->forced.n;
    return HD_OK;
}

static bool has_strict_tool(const json_t *tools) {
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *function = json_object_get(json_array_get(tools, i), "function");
        if (json_is_true(json_object_get(function, "strict"))) return true;
    }
    return false;
}

/* What a request demands that needs token masks. */
typedef struct demands {
    bool format, call; /* the content has a response format; a call is required */
    bool calls;        /* calls may come, and only of offered tools */
    bool held; /* without masks the response format or one of the calls could be violated */
} demands;

/* If masks cannot be applied, a request that does not depend on them is not refused because
 * of its tools. */
static bool can_watch(const hd_engine *e, const engine_request *r, const hd_request *g) {
    return e->has_model && !e->forced_acceptance && !g->ignore_eos && !g->unparsed &&
           !(r->starts_in_reasoning && find_token(e, "</think>") < 0);
}

static demands find_demands(const hd_engine *e, const engine_request *r, const hd_request *g) {
    const bool can_call =
        r->reply_tools.n_tools > 0 && hd_reply_format_of(e->encoding) != HD_REPLY_PLAIN;
    demands d = {.format = g->response_format != HD_FORMAT_FREE, .call = forces_tool_call(g)};
    d.held = d.format || d.call || has_strict_tool(r->tools);
    d.calls = can_call && (d.held || can_watch(e, r, g));
    return d;
}

/* Describes the tools that may be called for a grammar of calls; the caller frees it.
 * Schemas that are not enforced are left out. */
static char *describe_tools(const engine_request *r, const char *only, bool hold) {
    json_t *list = json_array();
    bool ok = list != NULL;
    for (size_t i = 0; ok && i < json_array_size(r->tools); i++) {
        const json_t *f = json_object_get(json_array_get(r->tools, i), "function");
        json_t *name = json_object_get(f, "name");
        if (!json_is_string(name) || (only && strcmp(json_string_value(name), only) != 0)) {
            continue;
        }
        const bool strict = json_is_true(json_object_get(f, "strict"));
        json_t *parameters = hold || strict ? json_object_get(f, "parameters") : NULL;
        json_t *told = json_pack("{s:O, s:b, s:O*}", "name", name, "strict", strict,
                                 "parameters", json_is_null(parameters) ? NULL : parameters);
        ok = json_array_append_new(list, told) == 0; /* takes the reference even on failure */
    }
    char *text = ok ? hd_json_write(list, JSON_COMPACT) : NULL;
    json_decref(list);
    return text;
}

/* Compiles the grammar of the response format, of calls, or of both. */
static hd_status open_grammar(const hd_engine *e, engine_request *r, const hd_request *g,
                              demands d, hd_err *err) {
    const hd_reply_format format = hd_reply_format_of(e->encoding);
    const bool dsml = format >= HD_REPLY_V32;
    const bool named = d.call && strcmp(g->tool_choice, "required") != 0;
    char *tools = d.calls ? describe_tools(r, named ? g->tool_choice : NULL, d.call) : NULL;
    if (d.calls && !tools) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for the tools of a request");
    }
    const hd_grammar_calls calls = {.tools = tools,
                                    .n_tools = tools ? strlen(tools) : 0,
                                    .format = format,
                                    .marks = hd_grammar_vocab_marks(e->vocab),
                                    .flagged = e->flagged && (!dsml || e->dsml_flagged),
                                    .hold = d.call,
                                    .most = named || g->one_call ? 1 : HD_CHAT_MAX_CALLS};
    hd_request what = *g;
    /* a required call leaves no place for formatted content */
    if (d.call) what.response_format = HD_FORMAT_FREE;
    const hd_status st =
        engine_grammar_cache_acquire(e->grammars, &r->grammar, &what, &calls, err);
    free(tools);
    if (st != HD_OK) hd_err_set_field(err, what.response_format ? "response_format" : "tools");
    HD_TRY(st);
    r->constraint.grammar = engine_grammar_of(r->grammar);
    r->constraint.free = !d.format && !d.call;
    r->parse.own_spelling = d.calls && d.held;
    return HD_OK;
}

/* ---- the constraint ---- */

static hd_status check_possible(const hd_engine *e, const hd_request *g, bool held,
                                hd_err *err) {
    if (!e->has_model) {
        return HD_FAIL(
            err, HD_EUNSUPPORTED,
            "the null backend has no model to give response formats, calls and bounds to");
    }
    if (e->forced_acceptance) {
        return HD_FAIL(
            err, HD_EUNSUPPORTED,
            "forced acceptance leaves no room for response formats, calls and bounds");
    }
    if (held && g->ignore_eos) {
        return HD_FAIL(err, HD_EINVAL,
                       "a choice with a response format, or calls that keep to one, ends where "
                       "that does: no ignore_eos");
    }
    return HD_OK;
}

static hd_status build_constraint(const hd_engine *e, engine_request *r, const hd_request *g,
                                  demands d, hd_err *err) {
    const bool relaxed = g->relaxed_top > 0 && g->relaxed_delta > 0;
    if (!d.held && !d.calls && !relaxed && !g->max_reasoning) return HD_OK;
    HD_TRY(check_possible(e, g, d.held, err));
    const bool may_begin = r->is_chat && e->encoding == HD_CHAT_R1_0528;
    r->constraint = (hd_constraint){.reasoning = r->starts_in_reasoning,
                                    .think = may_begin ? find_token(e, "<think>") : -1,
                                    .unthink = r->is_chat ? find_token(e, "</think>") : -1,
                                    .max_reasoning = g->max_reasoning,
                                    .relaxed_top = relaxed ? g->relaxed_top : 0,
                                    .relaxed_delta = relaxed ? g->relaxed_delta : 0,
                                    .ban = r->ban,
                                    .n_ban = g->min_tokens ? r->request.n_stop : 0,
                                    .ban_until = r->n_prompt + g->min_tokens};
    if (r->constraint.reasoning && r->constraint.unthink < 0) {
        return HD_FAIL(
            err, HD_EUNSUPPORTED,
            "the tokenizer has no token </think>, so reasoning has no end to be seen");
    }
    if (d.call) HD_TRY(force_opening(e, r, g, err));
    if (d.format || d.calls) HD_TRY(open_grammar(e, r, g, d, err));
    r->constrained = true;
    return HD_OK;
}

hd_status engine_build_constraint(hd_engine *e, engine_request *r, const hd_request *g,
                                  hd_err *err) {
    const demands d = find_demands(e, r, g);
    const hd_status st = build_constraint(e, r, g, d, err);
    if (st != HD_OK && d.format) hd_err_set_field(err, "response_format");
    return st;
}
