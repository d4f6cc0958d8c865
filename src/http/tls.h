/* tls.h - TLS certificate of new connections; it can be replaced while the server runs. */
#ifndef HD_HTTP_TLS_H
#define HD_HTTP_TLS_H

#include <gnutls/abstract.h>
#include <stdbool.h>

#include "base/status.h"

typedef struct http_tls http_tls;

/* PEM files: a chain that begins with the server's certificate, and its key. Both names must
 * outlive the result. */
hd_status http_tls_open(http_tls **out, const char *certificate, const char *private_key,
                        hd_err *err);
void http_tls_close(http_tls *t); /* NULL is fine; no session may use it any more */

/* Reads the files again, for later handshakes. On failure the old pair stays. One thread at
 * a time may call. */
hd_status http_tls_reload(http_tls *t, hd_err *err);

/* State of one TLS session, stored in its connection. */
typedef struct http_tls_state {
    http_tls *tls;
    gnutls_session_t session;
    bool established; /* its handshake is complete */
} http_tls_state;

/* Called before the handshake. The thread that runs the handshake writes the state. */
void http_tls_attach(http_tls_state *state, http_tls *t, gnutls_session_t session);

/* For gnutls_certificate_set_retrieve_function2, with attached sessions. */
int http_tls_retrieve(gnutls_session_t session, const gnutls_datum_t *authorities,
                      int n_authorities, const gnutls_pk_algorithm_t *algorithms,
                      int n_algorithms, gnutls_pcert_st **chain, unsigned *n_chain,
                      gnutls_privkey_t *key);

#endif
