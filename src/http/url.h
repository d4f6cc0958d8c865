/* url.h - request targets, Host and Origin taken apart: bytes from outside, no library. */
#ifndef HD_HTTP_URL_H
#define HD_HTTP_URL_H

#include <stdbool.h>
#include <stddef.h>

/* "%2F" and the like become bytes, '+' a space where plus is true. In place; the new length.
 * false: a broken escape, or a NUL or another control character. */
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

/* A number of nothing but digits, from low to high; else false, and *out stays. */
bool http_number_parse(const char *text, long low, long high, long *out);

/* Takes text apart in place: path and arguments point into it. args[max_args] is the
 * caller's. */
http_target_fault http_target_parse(http_target *out, char *text, http_query_arg *args,
                                    size_t max_args);

/* The host of "host", "host:port" or "[v6]:port", lower case, without brackets. What stands in
 * brackets is an IPv6 address, and a port is one that exists. */
bool http_host_parse(const char *text, char *host, size_t size);

/* Whether a host that was parsed is this machine: "localhost", or an address of it. A name that
 * only looks like an address may point anywhere. */
bool http_host_is_loopback(const char *host);

/* As browsers send it: "https://host" or "https://host:port", any scheme, nothing behind. */
bool http_origin_is_valid(const char *origin);

/* Whether an Origin header names the same scheme, host and port as this server's Host. */
bool http_origin_is_own(const char *origin, const char *host_header, bool tls);

#endif
