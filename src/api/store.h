/* store.h - answers that are kept for later, a few texts each: a bounded number of bytes, the
 * oldest leave first, and each is seen only with the salt it was stored under. */
#ifndef HD_API_STORE_H
#define HD_API_STORE_H

#include <stddef.h>
#include <stdint.h>

#include "api/text.h"

typedef struct api_store api_store;

api_store *api_store_open(size_t max_bytes); /* NULL: no memory */
void api_store_close(api_store *s);          /* NULL is fine */

/* Takes the two texts. Of /v1/responses: the response's object, and all items up to its end as
 * a JSON array. What had the id before is replaced. One that is too large is not kept. From
 * any thread, as the others. */
void api_store_put(api_store *s, const char *id, uint64_t salt, api_text *object,
                   api_text *items);

/* Appends copies of the texts that are wanted; false: there is no such response. */
bool api_store_get(api_store *s, const char *id, uint64_t salt, api_text *object,
                   api_text *items);

/* The events of a stream that ended, taken; and read back. Without the response nothing is. */
void api_store_attach(api_store *s, const char *id, uint64_t salt, api_text *events);
bool api_store_get_events(api_store *s, const char *id, uint64_t salt, api_text *events);

bool api_store_remove(api_store *s, const char *id,
                      uint64_t salt); /* false: it was not there */

#endif
