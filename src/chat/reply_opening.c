/* reply_opening.c - writes the beginning of a tool call in each format, for forced tool
 * calls. */
#include <stdlib.h>

#include "chat/chat_internal.h"
#include "chat/reply.h"

#define DSML_OPENING(block, invoke) \
    { "\n\n<" CHAT_DSML block ">\n<" CHAT_DSML invoke " name=\"", "\">\n" }

/* What stands around the tool's name. */
static const struct {
    const char *before, *after;
} openings[] = {
    [HD_REPLY_V3] = {CHAT_CALLS_BEGIN CHAT_CALL_BEGIN "function" CHAT_CALL_SEP, "\n```json\n"},
    [HD_REPLY_V31] = {CHAT_CALLS_BEGIN CHAT_CALL_BEGIN,                          CHAT_CALL_SEP},
    [HD_REPLY_V32] = DSML_OPENING("function_calls", "invoke"),
    [HD_REPLY_V4] = DSML_OPENING("tool_calls", "invoke"),
    [HD_REPLY_V41] = DSML_OPENING(" calls", " invoke"),
};

hd_status hd_reply_opening(hd_chat_prompt *out, hd_reply_format format, const char *tool,
                           size_t n, hd_err *err) {
    chat_out o = {.prompt = out, .max = HD_REPLY_MAX_NAME + 256, .err = err};
    *out = (hd_chat_prompt){0};
    if (format == HD_REPLY_PLAIN) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "this model's replies have no calls");
    }
    chat_control(&o, openings[format].before);
    chat_content_bytes(&o, tool, n);
    chat_control(&o, openings[format].after);
    if (o.status != HD_OK) hd_chat_prompt_deinit(out);
    return o.status;
}
