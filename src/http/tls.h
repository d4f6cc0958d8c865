/* tls.h - the certificate that connections are greeted with; it can be replaced while they live. */
#ifndef HD_HTTP_TLS_H
#define HD_HTTP_TLS_H

#include <gnutls/abstract.h>
#include <stdbool.h>

#include "base/status.h"

typedef struct http_tls http_tls;

/* PEM files: a chain with the server's own certificate first, and its key. Both names are the
 * caller's and outlive the result. */
hd_status http_tls_open(http_tls **out, const char *certificate, const char *private_key,
                        hd_err *err);
void http_tls_close(http_tls *t); /* NULL is fine; no session may be left */

/* Reads the files again, for handshakes from now on. On failure the old pair stays. One thread
 * at a time. */
hd_status http_tls_reload(http_tls *t, hd_err *err);

/* What we know of one session, where its connection keeps it. */
typedef struct http_tls_state {
    http_tls *tls;
    bool established; /* its handshake is complete */
} http_tls_state;

/* Before the handshake. The state is written by the thread that shakes hands. */
void http_tls_attach(http_tls_state *state, http_tls *t, gnutls_session_t session);

/* For gnutls_certificate_set_retrieve_function2, and attached sessions. */
int http_tls_retrieve(gnutls_session_t session, const gnutls_datum_t *authorities,
                      int n_authorities, const gnutls_pk_algorithm_t *algorithms,
                      int n_algorithms, gnutls_pcert_st **chain, unsigned *n_chain,
                      gnutls_privkey_t *key);

#endif
