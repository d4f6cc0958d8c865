/* params.h - parameters of request bodies as data: parsing, range errors and /openapi.json
 * use the same tables.
 *
 * A family is the parameter set of one endpoint: sections, some of them shared. Every
 * parameter that clients of OpenAI, vLLM, SGLang and Anthropic know is listed. It works, or
 * is accepted because its absence changes nothing here, or is refused by name. */
#ifndef HD_API_PARAMS_H
#define HD_API_PARAMS_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum api_kind {
    API_BOOL,
    API_BOOL_NOT, /* stored negated */
    API_SWITCH,   /* int32_t: true 1, false -1, absent 0 */
    API_INT,
    API_LONG,   /* 64 bits */
    API_NUMBER, /* float */
    API_STRING, /* without NUL; at most high bytes */
    API_LEVEL,  /* such a string, or an int32_t from low to high at number_at */
    API_OBJECT, /* json_t *, like the next four */
    API_ARRAY,
    API_TEXTS, /* a string or an array of strings */
    API_INTS,  /* an array of integers */
    API_ANY,
    API_NESTED,      /* an object with its own table */
    API_ONE_OR_MANY, /* such an object, or an array of them: a json_t *, read by the endpoint */
    API_NOTED,       /* accepted and ignored */
    API_ONLY,        /* accepted as true if low is 1, as false if low is 0; else refused */
    API_ONE,         /* accepted as the number 1; else refused */
    API_REFUSED      /* refused unless null, false or [] */
} api_kind;

typedef struct api_family api_family;

typedef struct api_param {
    const char *name;
    api_kind kind;
    size_t at; /* offset in api_request */
    /* Of numbers; high is also the maximum bytes of a string. Both 0: the range of the field
     * of hd_request that the parameter sets (request_ranges.h), or else the type's. */
    double low, high;
    size_t sets;      /* offset of that field, plus one; 0: at is inside of api_request.g */
    size_t limit;     /* offset in api_limits of the maximum, plus one; 0: use high */
    size_t number_at; /* of API_LEVEL: offset in api_request */
    const char *about;
    const char *const *words; /* of a string: all allowed values, NULL at the end */
    const api_family *nested; /* of API_NESTED */
    const char *code;         /* error code of a refusal by name; NULL: unsupported_parameter */
    bool costly; /* the parameter can take long to process, however small the body */
} api_param;

enum {
    API_MAX_SECTIONS = 6,
    /* bytes of a string; the last one is for those whose table has no maximum */
    API_MAX_MODEL_NAME = 256,
    API_MAX_SALT = 128,
    API_MAX_STRING = 4096,
    API_MAX_STREAM_INTERVAL = 1 << 20 /* tokens per event */
};

extern const char api_stop_about[]; /* of stop strings */

typedef struct api_section {
    const api_param *params;
    size_t n;
} api_section;

struct api_family {
    const char *name;            /* "ChatCompletionRequest" */
    const char *endpoint;        /* for metrics: "/v1/chat/completions" */
    const char *const *required; /* NULL at the end; only for /openapi.json */
    /* if two sections contain a name, the first is used */
    const api_section *sections[API_MAX_SECTIONS];
    bool closed; /* unknown names are refused */
};

#define API_SETS(field) .sets = offsetof(hd_request, field) + 1

#define API_SECTION(table) \
    { (table), sizeof(table) / sizeof((table)[0]) }

/* Shared sections. */
/* temperature to stop, by their common names */
extern const api_section api_sampling_section;
/* further parameters that chat and completions share */
extern const api_section api_openai_section;
extern const api_section api_identity_section; /* rid, priority, cache_salt, ... */
/* parameters that no endpoint supports: refused by name */
extern const api_section api_absent_section;
extern const api_section api_conversation_section; /* messages, tools, thinking */
extern const api_family api_thinking_family, api_reasoning_options_family,
    api_template_options_family;

struct api_request;
struct api_limits;

/* Range of a number; false: only the type's range. */
bool api_param_range(const api_param *p, const struct api_limits *limits, double *low,
                     double *high);
const api_param *api_params_find(const api_family *family, const char *name);

/* Whether a costly parameter is present, at any depth. */
bool api_params_cost(const api_family *family, const json_t *object);

/* Reads every member of object; returns false if it was refused. path is "" or
 * "sampling_params." */
bool api_params_read(struct api_request *r, const api_family *family, json_t *object,
                     const char *path);

#endif
