/* sockets.c - listening sockets: one for every address of the host's name, all on one port.
 * libmicrohttpd takes one listening socket per daemon, so each has its own daemon. */
#define _GNU_SOURCE
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/log.h"
#include "http/http_internal.h"

enum { BACKLOG = 1024, KERNEL_LATER_S = 5, KERNEL_SEND_BYTES = 256 << 10, PORT_TRIES = 16 };

static bool is_loopback_address(const struct sockaddr *a) {
    if (a->sa_family == AF_INET) {
        const struct sockaddr_in *v4 = (const void *)a;
        return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
    }
    const struct sockaddr_in6 *v6 = (const void *)a;
    return a->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
}

static void set_port(struct sockaddr_storage *a, int32_t port) {
    if (a->ss_family == AF_INET) {
        ((struct sockaddr_in *)a)->sin_port = htons((uint16_t)port);
    } else if (a->ss_family == AF_INET6) {
        ((struct sockaddr_in6 *)a)->sin6_port = htons((uint16_t)port);
    }
}

/* Accepted sockets inherit these options. Keep-alive probes detect a peer that vanished
 * silently. */
static void set_socket_options(int fd, const http_limits *limits) {
    const int on = 1, probe_s = limits->stall_s, again_s = KERNEL_LATER_S;
    /* the most unread bytes that the kernel buffers for a slow reader */
    const int send_bytes = KERNEL_SEND_BYTES;
    /* later than our own deadline */
    const int patience_ms = (limits->stall_s + KERNEL_LATER_S) * 1000;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &send_bytes, sizeof send_bytes);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &probe_s, sizeof probe_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &again_s, sizeof again_s);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &patience_ms, sizeof patience_ms);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/* If any port will do, the first socket determines it. */
static hd_status read_port(http_server *h, int fd, hd_err *err) {
    struct sockaddr_storage bound = {0};
    socklen_t n = sizeof bound;
    char port[16] = "";
    if (getsockname(fd, (struct sockaddr *)&bound, &n) ||
        getnameinfo((struct sockaddr *)&bound, n, NULL, 0, port, sizeof port, NI_NUMERICSERV)) {
        return HD_FAIL(err, HD_EIO, "cannot tell the port: %s", strerror(errno));
    }
    h->port = (int32_t)strtol(port, NULL, 10);
    return HD_OK;
}

/* HD_EUNSUPPORTED: this computer does not have the address; HD_EAGAIN: the port is in use. */
static hd_status bind_address(http_server *h, const struct addrinfo *a, bool alone,
                              hd_err *err) {
    http_listener *l = &h->listeners[h->n_listeners];
    const int on = 1;
    struct sockaddr_storage address = {0};
    memcpy(&address, a->ai_addr, a->ai_addrlen);
    getnameinfo(a->ai_addr, a->ai_addrlen, l->address, sizeof l->address, NULL, 0,
                NI_NUMERICHOST);
    l->fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (l->fd >= 0) {
        h->n_listeners++;
        set_socket_options(l->fd, &h->options.limits);
        /* A lone :: also accepts IPv4; beside an IPv4 address the two would conflict. */
        if (a->ai_family == AF_INET6 && !alone) {
            setsockopt(l->fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
        }
        set_port(&address, h->port);
        if (bind(l->fd, (struct sockaddr *)&address, a->ai_addrlen) == 0 &&
            listen(l->fd, BACKLOG) == 0) {
            h->loopback = h->loopback && is_loopback_address(a->ai_addr);
            return h->port ? HD_OK : read_port(h, l->fd, err);
        }
    }
    const int why = errno;
    if (l->fd >= 0) {
        close(l->fd);
        h->n_listeners--;
    }
    if (why == EADDRINUSE) {
        return HD_FAIL(err, HD_EAGAIN,
                       "port %d on %s is taken by another program; --port chooses another",
                       h->port, l->address);
    }
    const bool absent = why == EADDRNOTAVAIL || why == EAFNOSUPPORT;
    return HD_FAIL(err, absent ? HD_EUNSUPPORTED : HD_EIO, "cannot listen on %s port %d: %s",
                   l->address, h->port, strerror(why));
}

static bool is_repeated(const struct addrinfo *all, const struct addrinfo *a) {
    for (; all != a; all = all->ai_next) {
        if (all->ai_addrlen == a->ai_addrlen &&
            memcmp(all->ai_addr, a->ai_addr, a->ai_addrlen) == 0) {
            return true;
        }
    }
    return false;
}

/* Skips addresses that this computer does not have, with a log message, if others are left. */
static hd_status bind_all(http_server *h, const struct addrinfo *found, hd_err *err) {
    hd_err absent[HTTP_LISTENERS] = {0};
    size_t n_absent = 0;
    h->port = h->options.port;
    h->loopback = true;
    for (const struct addrinfo *a = found; a; a = a->ai_next) {
        hd_err why = {0};
        if (is_repeated(found, a)) continue;
        if (h->n_listeners + (int32_t)n_absent == HTTP_LISTENERS) {
            return HD_FAIL(err, HD_EINVAL, "--host %s has more than %d addresses",
                           h->options.host, HTTP_LISTENERS);
        }
        const hd_status st = bind_address(h, a, !found->ai_next, &why);
        if (st == HD_EUNSUPPORTED) {
            absent[n_absent++] = why;
        } else if (st != HD_OK) {
            return HD_FAIL(err, st, "%s", why.msg);
        }
    }
    if (h->n_listeners == 0) return HD_FAIL(err, HD_EIO, "%s", absent[0].msg);
    for (size_t i = 0; i < n_absent; i++) {
        HD_LOG(HD_LOG_WARN, "address_left_out", hd_log_text("why", absent[i].msg));
    }
    return HD_OK;
}

/* localhost always means the loopback addresses that exist, whatever a name server or
 * /etc/hosts says. */
static hd_status find_addresses(const char *host, struct addrinfo **found, hd_err *err) {
    const bool local = strcasecmp(host, "localhost") == 0;
    const struct addrinfo want = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = local ? 0 : AI_PASSIVE};
    const int code = getaddrinfo(local ? NULL : host, "0", &want, found);
    if (code == 0) return HD_OK;
    return HD_FAIL(err, HD_EIO, "no address for --host %s: %s", host, gai_strerror(code));
}

hd_status http_listen(http_server *h, hd_err *err) {
    struct addrinfo *found = NULL;
    HD_TRY(find_addresses(h->options.host, &found, err));
    hd_status st = HD_EAGAIN;
    hd_err why = {0};
    /* A port that is free on one address may be in use on the next; then another one is
     * tried. */
    for (int i = 0; st == HD_EAGAIN && i < (h->options.port ? 1 : PORT_TRIES); i++) {
        http_unlisten(h);
        why = (hd_err){0};
        st = bind_all(h, found, &why);
    }
    freeaddrinfo(found);
    if (st == HD_OK) return HD_OK;
    return HD_FAIL(err, st == HD_EAGAIN ? HD_EIO : st, "%s", why.msg);
}

void http_unlisten(http_server *h) {
    for (int32_t i = 0; i < h->n_listeners; i++) close(h->listeners[i].fd);
    h->n_listeners = 0;
}

bool http_is_own_name(const http_server *h, const char *host) {
    for (int32_t i = 0; i < h->n_listeners; i++) {
        if (strcmp(host, h->listeners[i].address) == 0) return true;
    }
    return strcasecmp(host, h->options.host) == 0;
}

int32_t http_port(const http_server *h) {
    return h->port;
}

bool http_is_loopback(const http_server *h) {
    return h->loopback;
}

const char *http_address(const http_server *h, int32_t i) {
    return i < h->n_listeners ? h->listeners[i].address : NULL;
}
