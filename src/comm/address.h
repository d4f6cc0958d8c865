/* address.h - "HOST:PORT" of a rank or a server: TCP sockets that listen there or connect. */
#ifndef HD_COMM_ADDRESS_H
#define HD_COMM_ADDRESS_H

#include <netdb.h>
#include <stdbool.h>

#include "base/status.h"

/* Whether the text is HOST:PORT, to which one can connect: a number from 1 to 65535; an IPv6 host stands in brackets. */
bool hd_address_is_valid(const char *at);

/* True if the host of HOST:PORT is 127.0.0.0/8, ::1 or "localhost". */
bool hd_address_is_loopback(const char *at);

/* True if the host's name says nothing of it, but it is a loopback address here: other hosts, where the name means
 * this one, do not reach it. Debian gives a host's own name such an address. */
bool hd_address_is_here_alone(const char *at);

/* Fills name [IF_NAMESIZE] with the network interface from which HOST:PORT is reached. False: there is none. */
bool hd_address_interface(const char *at, char *name);

/* Finds the addresses of HOST:PORT, to listen there (at port 0: at any free one) or to connect. Free with freeaddrinfo().
 * HD_EINVAL: the text is not HOST:PORT. */
hd_status hd_address_resolve(const char *at, bool listens, struct addrinfo **out, hd_err *err);

/* Opens a socket that does not block and listens there. who: in the error, "rank 0". */
hd_status hd_address_bind(int *out, const char *who, const char *at, hd_err *err);

/* Has small messages leave at once. */
void hd_address_no_delay(int fd);

#endif
