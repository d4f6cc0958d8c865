/* replay_links.h - maps the logged ids of responses to their ids in the replay, so that a
 * response that continues another one continues the same one again. */
#ifndef HD_CLI_REPLAY_LINKS_H
#define HD_CLI_REPLAY_LINKS_H

#include <jansson.h>
#include <stdbool.h>

/* links: an object from old ids to new ones, which grows by what these two answers, of JSON or
 * events, are. Answers of other endpoints change nothing. */
void replay_link(json_t *links, const char *before, const char *now);

/* The request continues a response by its id of now; *id (borrowed from links) is that, or NULL if
 * it continues none. False: the response is not among the links. */
bool replay_relink(const json_t *links, json_t *request, const char **id);

#endif
