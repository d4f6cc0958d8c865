/* replay_links.h - maps the logged ids of responses to their ids in the replay, so that a
 * response that continues another one continues the same one again. */
#ifndef HD_CLI_REPLAY_LINKS_H
#define HD_CLI_REPLAY_LINKS_H

#include <jansson.h>
#include <stdbool.h>

/* links: an object from old ids to new ones. Adds the ids of two replies, JSON or events.
 * Replies of other endpoints add nothing. */
void replay_link(json_t *links, const char *before, const char *now);

/* Rewrites a request that continues a response to its new id; *id (borrowed from links) is that
 * id, or NULL if it continues none. False: the response is not among the links. */
bool replay_relink(const json_t *links, json_t *request, const char **id);

#endif
