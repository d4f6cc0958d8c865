/* schemas.h - JSON schemas of replies, in which ' stands for " and @Name for a reference to
 * that schema. */
#ifndef HD_API_SCHEMAS_H
#define HD_API_SCHEMAS_H

#include <stddef.h>

typedef struct api_schema {
    const char *name, *text;
} api_schema;

extern const api_schema api_schemas[];
extern const size_t api_n_schemas;

#endif
