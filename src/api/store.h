/* store.h - answers that are kept for later, two texts each: a bounded number of bytes, the
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
 * a JSON array. One that is too large is not kept. From any thread. */
void api_store_put(api_store *s, const char *id, uint64_t salt, api_text *object,
                   api_text *items);

/* Appends copies of the texts that are wanted; false: there is no such response. */
bool api_store_get(api_store *s, const char *id, uint64_t salt, api_text *object,
                   api_text *items);

#endif
