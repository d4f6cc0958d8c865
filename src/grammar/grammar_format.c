/* grammar_format.c - patterns for the string formats of JSON schema that are supported. */
#include "grammar/grammar_schema_internal.h"

#include <string.h>

#define DATE                                                     \
    "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|" \
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
#define TIME                                                       \
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?" \
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
#define BYTE  "(?:[0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])"
#define LABEL "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define HOST  LABEL "(?:\\." LABEL "){0,8}"
#define HEX4  "[0-9A-Fa-f]{1,4}"
#define WORD  "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
#define PART  "(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*"

static const struct {
    const char *name, *pattern;
} formats[] = {
    {"date",      "^" DATE "$"                                            },
    {"time",      "^" TIME "$"                                            },
    {"date-time", "^" DATE "T" TIME "$"                                   },
    {"uuid",      "^[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}$"},
    {"ipv4",      "^" BYTE "(?:\\." BYTE "){3}$"                          },
    {"ipv6",      "^" HEX4 "(?::" HEX4 "){7}$"                            },
    {"hostname",  "^" HOST "$"                                            },
    {"email",     "^" WORD "(?:\\." WORD ")*@" HOST "$"                   },
    {"uri",       "^[A-Za-z][A-Za-z0-9+.-]*:" PART "(?:#" PART ")?$"      },
};

const char *gram_format_pattern(const char *format) {
    for (size_t i = 0; i < HD_LEN(formats); i++) {
        if (strcmp(formats[i].name, format) == 0) return formats[i].pattern;
    }
    return NULL;
}
