/* replay_text.h - extracts the model's text from a reply of any endpoint of the server. */
#ifndef HD_CLI_REPLAY_TEXT_H
#define HD_CLI_REPLAY_TEXT_H

/* answer: a JSON object, or server-sent events. Returns all texts, joined by kind and choice,
 * one line each; the caller frees it. NULL: no JSON, no memory. The division of tokens into
 * events does not matter. */
char *replay_text(const char *path, const char *answer);

#endif
