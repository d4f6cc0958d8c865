/* openapi.h - descriptions of routes as data. /openapi.json is written from these tables,
 * each of which stands beside the routes it describes. */
#ifndef HD_API_OPENAPI_H
#define HD_API_OPENAPI_H

#include "api/params.h"

typedef struct api_operation {
    const char *path;    /* the route's path, with {name} in place of '*' */
    const char *methods; /* the route's methods */
    const char *summary;
    const api_family *body; /* parameters of the body; NULL: none, or free_body: */
    const char *free_body;  /* name of a schema; the body may be absent */
    /* names of schemas; reply NULL: the route always refuses; event NULL: it never streams */
    const char *reply, *event;
    const char *type; /* content type of a reply that is not JSON; reply is then ignored */
    const char *const *query; /* names of query parameters, NULL at the end; or NULL */
} api_operation;

/* The JSON schema of a reply, in which ' stands for " and @Name for a reference to that schema. */
typedef struct api_schema {
    const char *name, *text;
} api_schema;

typedef struct api_description {
    const api_operation *operations;
    size_t n_operations;
    const api_schema *schemas;
    size_t n_schemas;
} api_description;

/* The operations of src/api. */
extern const api_description api_own_description;

#endif
