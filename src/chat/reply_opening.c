/* reply_opening.c - writes the beginning of a tool call in each format, for forced tool
 * calls. */
#include <stdlib.h>

#include "chat/chat_internal.h"
#include "chat/reply.h"

hd_status hd_reply_opening(hd_chat_prompt *out, hd_reply_format format, const char *tool,
                           size_t n, hd_err *err) {
    chat_out o = {.prompt = out, .max = HD_REPLY_MAX_NAME + 256, .err = err};
    *out = (hd_chat_prompt){0};
    switch (format) {
    case HD_REPLY_PLAIN:
        return HD_FAIL(err, HD_EUNSUPPORTED, "this model's replies have no calls");
    case HD_REPLY_V3:
        chat_control(&o, CHAT_CALLS_BEGIN CHAT_CALL_BEGIN "function" CHAT_CALL_SEP);
        chat_content_bytes(&o, tool, n);
        chat_control(&o, "\n```json\n");
        break;
    case HD_REPLY_V31:
        chat_control(&o, CHAT_CALLS_BEGIN CHAT_CALL_BEGIN);
        chat_content_bytes(&o, tool, n);
        chat_control(&o, CHAT_CALL_SEP);
        break;
    case HD_REPLY_V32:
    case HD_REPLY_V4:
        chat_control(&o, "\n\n<" CHAT_DSML);
        chat_control(&o, format == HD_REPLY_V4 ? "tool_calls" : "function_calls");
        chat_control(&o, ">\n<" CHAT_DSML "invoke name=\"");
        chat_content_bytes(&o, tool, n);
        chat_control(&o, "\">\n");
        break;
    }
    if (o.status != HD_OK) hd_chat_prompt_deinit(out);
    return o.status;
}
