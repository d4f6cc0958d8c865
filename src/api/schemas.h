/* schemas.h - JSON schemas of what is sent back, in which ' stands for " and @Name for a
 * reference to the schema of that name. */
#ifndef HD_API_SCHEMAS_H
#define HD_API_SCHEMAS_H

#include <stddef.h>

typedef struct api_schema {
    const char *name, *text;
} api_schema;

extern const api_schema api_schemas[];
extern const size_t api_n_schemas;

#endif
