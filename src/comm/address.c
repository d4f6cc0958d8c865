/* address.c - see address.h. */
#include "comm/address.h"

#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BACKLOG = 128 };

/* getaddrinfo() would take 70000 as 4464. */
static bool is_port(const char *text) {
    const size_t n = strspn(text, "0123456789");
    return n >= 1 && n <= 5 && !text[n] && strtol(text, NULL, 10) <= UINT16_MAX;
}

static bool divide(const char *at, char host[256], const char **port) {
    const char *colon = strrchr(at, ':');
    const char *first = at, *end = colon;
    if (!colon || !is_port(colon + 1)) return false;
    if (*first == '[') {
        if (end[-1] != ']') return false;
        first++;
        end--;
    }
    if (end <= first || end - first > 255) return false;
    memcpy(host, first, (size_t)(end - first));
    host[end - first] = 0;
    *port = colon + 1;
    return true;
}

bool hd_address_is_valid(const char *at) {
    char host[256];
    const char *port;
    return divide(at, host, &port) && strtol(port, NULL, 10) > 0;
}

bool hd_address_is_loopback(const char *at) {
    char host[256];
    const char *port;
    return divide(at, host, &port) &&
           (strncmp(host, "127.", 4) == 0 || strcmp(host, "::1") == 0 ||
            strcmp(host, "localhost") == 0);
}

hd_status hd_address_resolve(const char *at, bool listens, struct addrinfo **out, hd_err *err) {
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
                                   .ai_flags = listens ? AI_PASSIVE : 0};
    char host[256];
    const char *port;
    if (!divide(at, host, &port)) return HD_FAIL(err, HD_EINVAL, "%s is no HOST:PORT", at);
    const int rc = getaddrinfo(host, port, &hints, out);
    if (rc) return HD_FAIL(err, HD_EIO, "cannot find %s: %s", at, gai_strerror(rc));
    return HD_OK;
}

bool hd_address_is_here_alone(const char *at) {
    struct addrinfo *found;
    bool loopback = false;
    if (hd_address_is_loopback(at) || hd_address_resolve(at, false, &found, NULL) != HD_OK)
        return false;
    if (found->ai_family == AF_INET) {
        const struct sockaddr_in *a = (const void *)found->ai_addr;
        loopback = ntohl(a->sin_addr.s_addr) >> 24 == 127;
    } else if (found->ai_family == AF_INET6) {
        const struct sockaddr_in6 *a = (const void *)found->ai_addr;
        loopback = IN6_IS_ADDR_LOOPBACK(&a->sin6_addr);
    }
    freeaddrinfo(found);
    return loopback;
}

/* Whether two addresses have the same bytes, without their ports. */
static bool is_same_host(const struct sockaddr *a, const struct sockaddr *b) {
    if (!a || a->sa_family != b->sa_family) return false;
    if (a->sa_family == AF_INET) {
        const struct sockaddr_in *x = (const void *)a, *y = (const void *)b;
        return x->sin_addr.s_addr == y->sin_addr.s_addr;
    }
    const struct sockaddr_in6 *x = (const void *)a, *y = (const void *)b;
    return a->sa_family == AF_INET6 &&
           memcmp(&x->sin6_addr, &y->sin6_addr, sizeof x->sin6_addr) == 0;
}

/* The address from which packets to another one would leave: none does. */
static bool find_source(const char *at, struct sockaddr_storage *out) {
    struct addrinfo *found;
    socklen_t n = sizeof *out;
    if (hd_address_resolve(at, false, &found, NULL) != HD_OK) return false;
    const int fd = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    const bool ok = fd >= 0 && connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
                    getsockname(fd, (struct sockaddr *)out, &n) == 0;
    if (fd >= 0) close(fd);
    freeaddrinfo(found);
    return ok;
}

bool hd_address_interface(const char *at, char *name) {
    struct sockaddr_storage source = {0};
    struct ifaddrs *all;
    bool is = false;
    if (!find_source(at, &source) || getifaddrs(&all) != 0) return false;
    for (const struct ifaddrs *i = all; i && !is; i = i->ifa_next) {
        is = is_same_host(i->ifa_addr, (const struct sockaddr *)&source);
        if (is) snprintf(name, IF_NAMESIZE, "%s", i->ifa_name);
    }
    freeifaddrs(all);
    return is;
}

hd_status hd_address_bind(int *out, const char *who, const char *at, hd_err *err) {
    struct addrinfo *found;
    HD_TRY(hd_address_resolve(at, true, &found, err));
    const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool ok = fd >= 0;
    if (ok) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    ok = ok && bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0;
    freeaddrinfo(found);
    if (!ok) {
        const int why = errno;
        if (fd >= 0) close(fd);
        return HD_FAIL(err, HD_EIO, "%s cannot listen at %s: %s", who, at, strerror(why));
    }
    *out = fd;
    return HD_OK;
}

void hd_address_no_delay(int fd) {
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
}
