/* store.h - stores responses for later retrieval (/v1/responses with store: true). The bytes
 * are limited, the oldest are evicted first, and each is visible only with the salt it was
 * stored under. */
#ifndef HD_API_STORE_H
#define HD_API_STORE_H

#include <stddef.h>
#include <stdint.h>

#include "api/text.h"

typedef struct api_store api_store;

api_store *api_store_open(size_t max_bytes); /* NULL: no memory */
void api_store_close(api_store *s);          /* NULL is fine */

/* Takes ownership of two texts: the response object, and all items up to its end as a JSON
 * array. Replaces an earlier entry of the same id. An entry that is too large is not stored.
 * Any thread may call this and the functions below. */
void api_store_put(api_store *s, const char *id, uint64_t salt, api_text *object,
                   api_text *items);

/* Appends copies of the texts whose buffers are not NULL; false: no such response. */
bool api_store_get(api_store *s, const char *id, uint64_t salt, api_text *object,
                   api_text *items);

/* Stores the events of a finished stream and reads them back. Does nothing if the response
 * is not stored. */
void api_store_attach(api_store *s, const char *id, uint64_t salt, api_text *events);
bool api_store_get_events(api_store *s, const char *id, uint64_t salt, api_text *events);

bool api_store_remove(api_store *s, const char *id, uint64_t salt); /* false: not found */

#endif
