/* url.h - parses request targets, Host and Origin headers. Input is untrusted; independent
 * of the HTTP library. */
#ifndef HD_HTTP_URL_H
#define HD_HTTP_URL_H

#include <stdbool.h>
#include <stddef.h>

/* Decodes "%2F" and the like in place, and '+' to a space if plus is true. Returns the new
 * length. Returns false for a broken escape, a NUL or another control character. */
bool http_url_decode(char *text, bool plus);

typedef struct http_query_arg {
    const char *name, *value;
} http_query_arg;

typedef struct http_target {
    char *path; /* as sent, without the query, undecoded */
    http_query_arg *args;
    size_t n_args;
} http_target;

typedef enum http_target_fault {
    HTTP_TARGET_GOOD,
    HTTP_TARGET_BAD,      /* not a path, a broken escape, a control character */
    HTTP_TARGET_TOO_MANY, /* arguments */
    HTTP_TARGET_FOREIGN   /* absolute form: names a server */
} http_target_fault;

/* Parses a number of digits only, from low to high. On failure returns false and leaves *out
 * unchanged. */
bool http_number_parse(const char *text, long low, long high, long *out);

/* Parses text in place: path and arguments point into it. The caller owns args[max_args]. */
http_target_fault http_target_parse(http_target *out, char *text, http_query_arg *args,
                                    size_t max_args);

/* Extracts the host of "host", "host:port" or "[v6]:port" in lower case without brackets.
 * Brackets must contain an IPv6 address, and the port must be valid. */
bool http_host_parse(const char *text, char *host, size_t size);

/* Whether a parsed host is this computer: "localhost" or a loopback address. A name that
 * only looks like an address may resolve to anything. */
bool http_host_is_loopback(const char *host);

/* Accepts what browsers send: "https://host" or "https://host:port", any scheme, nothing
 * behind. */
bool http_origin_is_valid(const char *origin);

/* Whether Origin has the same scheme, host and port as the server's Host. */
bool http_origin_is_own(const char *origin, const char *host_header, bool tls);

#endif
