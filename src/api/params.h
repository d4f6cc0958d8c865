/* params.h - what a body may hold, as data: parsing, range errors and the OpenAPI
 * description all read the same tables.
 *
 * A family is what one endpoint understands: sections of parameters, some of them shared with
 * other endpoints. Every parameter the field's clients know is listed: one that works, one that
 * is accepted because leaving it out changes nothing here, or one that is refused by name. */
#ifndef HD_API_PARAMS_H
#define HD_API_PARAMS_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum api_kind {
    API_BOOL,
    API_BOOL_NOT, /* stored as its opposite */
    API_SWITCH,   /* int32_t: true 1, false -1, absent 0 */
    API_INT,
    API_LONG,   /* 64 bits */
    API_NUMBER, /* float */
    API_STRING, /* without NUL; at most high bytes */
    API_OBJECT, /* json_t *, as are the next four */
    API_ARRAY,
    API_TEXTS, /* a string or an array of strings */
    API_INTS,  /* an array of integers */
    API_ANY,
    API_NESTED,      /* an object with a table of its own */
    API_ONE_OR_MANY, /* such an object, or an array of them: a json_t *, read by the endpoint */
    API_NOTED,       /* accepted; it changes nothing here */
    API_ONLY,        /* accepted as true where low is 1, as false where it is 0; else refused */
    API_ONE,         /* accepted as the number 1; else refused */
    API_REFUSED      /* unless null or false */
} api_kind;

typedef struct api_family api_family;

typedef struct api_param {
    const char *name;
    api_kind kind;
    size_t at;        /* in api_request */
    double low, high; /* of numbers; high also bytes of a string. Both 0: all the type holds */
    size_t limit;     /* offset in api_limits of what high is, plus one; 0: high */
    const char *about;
    const char *const *words; /* of a string: all that it may be, NULL at the end */
    const api_family *nested; /* of API_NESTED */
    const char *code;         /* of a refusal by name; NULL: unsupported_parameter */
    bool costly;              /* what it asks for can take long, however small the body */
} api_param;

enum { API_MAX_SECTIONS = 6, API_MAX_STRING = 4096 /* bytes, where a table has no bound */ };

typedef struct api_section {
    const api_param *params;
    size_t n;
} api_section;

struct api_family {
    const char *name;                              /* "ChatCompletionRequest" */
    const char *endpoint;                          /* for metrics: "/v1/chat/completions" */
    const char *const *required;                   /* NULL at the end; for the description */
    const api_section *sections[API_MAX_SECTIONS]; /* the first that has a name counts */
    bool closed;                                   /* unknown names are refused */
};

#define API_SECTION(table) \
    { (table), sizeof(table) / sizeof((table)[0]) }

/* Shared sections. */
extern const api_section api_sampling_section; /* temperature to stop, by their common names */
extern const api_section api_openai_section;   /* what chat and completions share beyond that */
extern const api_section api_identity_section; /* rid, priority, cache_salt, ... */
extern const api_section api_absent_section;   /* what no endpoint has: refused by name */
extern const api_section api_conversation_section; /* messages, tools, thinking */
extern const api_family api_thinking_family, api_reasoning_options_family,
    api_template_options_family;

struct api_request;
struct api_limits;

/* Of a number; false: as far as its type goes. */
bool api_param_range(const api_param *p, const struct api_limits *limits, double *low,
                     double *high);
const api_param *api_params_find(const api_family *family, const char *name);

/* A costly parameter is given, at any depth. */
bool api_params_cost(const api_family *family, const json_t *object);

/* Reads every member of object. False: refused. path is "" or "sampling_params." */
bool api_params_read(struct api_request *r, const api_family *family, json_t *object,
                     const char *path);

#endif
