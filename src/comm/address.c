/* address.c - see address.h. */
#include "comm/address.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BACKLOG = 128 };

static bool divide(const char *at, char host[256], const char **port) {
    const char *colon = strrchr(at, ':');
    const char *first = at, *end = colon;
    if (!colon || !colon[1]) return false;
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
    return divide(at, host, &port);
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
    if (!divide(at, host, &port)) return HD_FAIL(err, HD_EINVAL, "no HOST:PORT: %s", at);
    const int rc = getaddrinfo(host, port, &hints, out);
    if (rc) return HD_FAIL(err, HD_EIO, "cannot find %s: %s", at, gai_strerror(rc));
    return HD_OK;
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
