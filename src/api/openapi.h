/* openapi.h - what a route is for, as data: /openapi.json is written from these tables, each of
 * which stands beside the routes it describes. */
#ifndef HD_API_OPENAPI_H
#define HD_API_OPENAPI_H

#include "api/params.h"
#include "api/schemas.h"

typedef struct api_operation {
    const char *path;    /* a route's; {name} where that has a '*' */
    const char *methods; /* a route's */
    const char *summary;
    const api_family *body;    /* NULL: none, or: */
    const char *free_body;     /* a schema's name; the body may be missing */
    const char *reply, *event; /* schemas; NULL: refused always; never a stream */
    const char *type;          /* of a reply that is no JSON; then reply is not looked at */
    const char *const *query;  /* names, NULL at the end; or NULL */
} api_operation;

/* What another room adds. */
typedef struct api_description {
    const api_operation *operations;
    size_t n_operations;
    const api_schema *schemas;
    size_t n_schemas;
} api_description;

#endif
