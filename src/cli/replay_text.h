/* replay_text.h - extracts the model's text from a reply of any endpoint of the server. */
#ifndef HD_CLI_REPLAY_TEXT_H
#define HD_CLI_REPLAY_TEXT_H

/* answer: a JSON object, or server-sent events. All texts of a kind and a choice, joined, one
 * line each; the caller's (free). NULL: no JSON, no memory. Where tokens were cut into events
 * makes no difference. */
char *replay_text(const char *path, const char *answer);

#endif
