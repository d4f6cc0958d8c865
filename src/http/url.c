/* url.c - strict in-place parsers of request targets, Host and Origin. */
#include "http/url.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int hex_value(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

bool http_url_decode(char *text, bool plus) {
    char *to = text;
    for (const char *from = text; *from; from++) {
        unsigned char c = (unsigned char)*from;
        if (c == '%') {
            const int high = hex_value(from[1]);
            const int low = high < 0 ? -1 : hex_value(from[2]);
            if (low < 0) return false;
            c = (unsigned char)(high << 4 | low);
            from += 2;
        } else if (plus && c == '+') {
            c = ' ';
        }
        if (c < 0x20 || c == 0x7f) return false;
        *to++ = (char)c;
    }
    *to = '\0';
    return true;
}

bool http_number_parse(const char *text, long low, long high, long *out) {
    const size_t n = strspn(text, "0123456789");
    errno = 0;
    const long v = strtol(text, NULL, 10);
    if (n == 0 || text[n] || errno || v < low || v > high) return false;
    *out = v;
    return true;
}

/* Checks escapes without decoding them. A route never matches an escaped spelling of its
 * path, so only code that needs the bytes decodes. */
static bool path_is_good(const char *path) {
    for (const char *p = path; *p; p++) {
        const unsigned char c = (unsigned char)*p;
        if (c <= 0x20 || c >= 0x7f) return false;
        if (c != '%') continue;
        const int high = hex_value(p[1]);
        const int low = high < 0 ? -1 : hex_value(p[2]);
        if (low < 0 || (high == 0 && low == 0)) return false;
    }
    return true;
}

http_target_fault http_target_parse(http_target *out, char *text, http_query_arg *args,
                                    size_t max_args) {
    *out = (http_target){.path = text, .args = args};
    if (*text != '/') {
        const bool absolute =
            strncmp(text, "http://", 7) == 0 || strncmp(text, "https://", 8) == 0;
        const bool any = strcmp(text, "*") == 0; /* OPTIONS * */
        return absolute ? HTTP_TARGET_FOREIGN : any ? HTTP_TARGET_GOOD : HTTP_TARGET_BAD;
    }
    char *query = strpbrk(text, "?#");
    if (query && *query == '#') return HTTP_TARGET_BAD;
    if (query) *query++ = '\0';
    if (!path_is_good(text)) return HTTP_TARGET_BAD;
    for (size_t n = 0; query && *query; n++) {
        char *next = strchr(query, '&');
        if (next) *next++ = '\0';
        if (n == max_args) return HTTP_TARGET_TOO_MANY; /* an empty argument counts too */
        if (*query) {
            char *value = strchr(query, '=');
            if (value) *value++ = '\0';
            if (!http_url_decode(query, true)) return HTTP_TARGET_BAD;
            if (value && !http_url_decode(value, true)) return HTTP_TARGET_BAD;
            args[out->n_args++] = (http_query_arg){query, value ? value : ""};
        }
        query = next;
    }
    return HTTP_TARGET_GOOD;
}

static bool is_port(const char *text) {
    long port;
    return *text == '\0' || http_number_parse(text, 0, 65535, &port);
}

bool http_host_parse(const char *text, char *host, size_t size) {
    const bool bracket = *text == '[';
    const char *start = text + bracket;
    const size_t n = strcspn(start, bracket ? "]" : ":");
    struct in6_addr v6;
    const char *rest = start + n;
    if (n == 0 || n >= size) return false;
    if (bracket && *rest++ != ']') return false;
    if (*rest == ':' ? !is_port(rest + 1) : *rest != '\0') return false;
    for (size_t i = 0; i < n; i++) {
        const char c = start[i];
        const bool upper = c >= 'A' && c <= 'Z';
        const bool plain = upper || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
                           strchr("-._", c) || (bracket && c == ':');
        if (!plain) return false;
        host[i] = (char)(upper ? c + 32 : c);
    }
    host[n] = '\0';
    return !bracket || inet_pton(AF_INET6, host, &v6) == 1;
}

bool http_host_is_loopback(const char *host) {
    struct in_addr v4;
    struct in6_addr v6;
    if (inet_pton(AF_INET, host, &v4) == 1) return ntohl(v4.s_addr) >> 24 == IN_LOOPBACKNET;
    if (inet_pton(AF_INET6, host, &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
    return strcmp(host, "localhost") == 0;
}

bool http_origin_is_valid(const char *origin) {
    char host[256];
    const char *host_text = strstr(origin, "://");
    const size_t n = host_text ? (size_t)(host_text - origin) : 0;
    return n > 0 && strspn(origin, "abcdefghijklmnopqrstuvwxyz0123456789+-.") == n &&
           http_host_parse(host_text + 3, host, sizeof host);
}

bool http_origin_is_own(const char *origin, const char *host_header, bool tls) {
    const char *scheme = tls ? "https://" : "http://";
    const size_t n = strlen(scheme);
    return strncmp(origin, scheme, n) == 0 && strcmp(origin + n, host_header) == 0;
}
