/* tls.c - see tls.h. A replaced pair is kept until the end, because handshakes that began
 * with it may still use it. Reading unchanged files creates no new pair. */
#include "http/tls.h"

#include <gnutls/crypto.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"

enum { PEM_MAX_BYTES = 1 << 20, CHAIN_MAX = 16, DIGEST_BYTES = 32 };

typedef struct tls_pair {
    struct tls_pair *older;
    uint8_t digest[2 * DIGEST_BYTES]; /* of both files */
    gnutls_pcert_st chain[CHAIN_MAX];
    unsigned n_chain;
    gnutls_privkey_t key;
} tls_pair;

struct http_tls {
    const char *certificate, *private_key; /* names of files */
    _Atomic(tls_pair *) pair;              /* the newest pair */
};

static void pair_close(tls_pair *p) {
    for (unsigned i = 0; i < p->n_chain; i++) gnutls_pcert_deinit(&p->chain[i]);
    if (p->key) gnutls_privkey_deinit(p->key);
    free(p);
}

/* The library compares certificate and key only when it creates credentials. */
static int check_pair(const gnutls_datum_t *certificate, const gnutls_datum_t *key) {
    gnutls_certificate_credentials_t trial;
    int code = gnutls_certificate_allocate_credentials(&trial);
    if (code < 0) return code;
    code = gnutls_certificate_set_x509_key_mem(trial, certificate, key, GNUTLS_X509_FMT_PEM);
    gnutls_certificate_free_credentials(trial);
    return code < 0 ? code : 0;
}

static int fill_pair(tls_pair *p, const gnutls_datum_t *certificate,
                     const gnutls_datum_t *key) {
    unsigned n = CHAIN_MAX;
    int code = check_pair(certificate, key);
    if (code == 0) {
        code = gnutls_pcert_list_import_x509_raw(p->chain, &n, certificate, GNUTLS_X509_FMT_PEM,
                                                 0);
    }
    if (code == 0) p->n_chain = n;
    if (code == 0) code = gnutls_privkey_init(&p->key);
    if (code == 0) {
        code = gnutls_privkey_import_x509_raw(p->key, key, GNUTLS_X509_FMT_PEM, NULL, 0);
    }
    return code;
}

static hd_status adopt(http_tls *t, const gnutls_datum_t *certificate,
                       const gnutls_datum_t *key, hd_err *err) {
    tls_pair *p = calloc(1, sizeof *p), *old = atomic_load(&t->pair);
    if (!p) return HD_FAIL(err, HD_ENOMEM, "no memory for a certificate");
    gnutls_hash_fast(GNUTLS_DIG_SHA256, certificate->data, certificate->size, p->digest);
    gnutls_hash_fast(GNUTLS_DIG_SHA256, key->data, key->size, p->digest + DIGEST_BYTES);
    if (old && memcmp(old->digest, p->digest, sizeof p->digest) == 0) {
        pair_close(p);
        return HD_OK;
    }
    const int code = fill_pair(p, certificate, key);
    if (code != 0) {
        pair_close(p);
        return HD_FAIL(err, HD_EINVAL, "--tls-cert %s, --tls-key %s: %s", t->certificate,
                       t->private_key, gnutls_strerror(code));
    }
    p->older = old;
    atomic_store(&t->pair, p);
    return HD_OK;
}

hd_status http_tls_reload(http_tls *t, hd_err *err) {
    char *certificate, *key;
    size_t n, n_key;
    HD_TRY(hd_file_read(&certificate, &n, t->certificate, PEM_MAX_BYTES, err));
    hd_status st = hd_file_read(&key, &n_key, t->private_key, PEM_MAX_BYTES, err);
    if (st == HD_OK) {
        const gnutls_datum_t certificate_text = {(unsigned char *)certificate, (unsigned)n};
        const gnutls_datum_t key_text = {(unsigned char *)key, (unsigned)n_key};
        st = adopt(t, &certificate_text, &key_text, err);
        gnutls_memset(key, 0, n_key);
        free(key);
    }
    free(certificate);
    return st;
}

hd_status http_tls_open(http_tls **out, const char *certificate, const char *private_key,
                        hd_err *err) {
    *out = calloc(1, sizeof **out);
    if (!*out) return HD_FAIL(err, HD_ENOMEM, "no memory for a certificate");
    (*out)->certificate = certificate;
    (*out)->private_key = private_key;
    return http_tls_reload(*out, err);
}

void http_tls_close(http_tls *t) {
    if (!t) return;
    for (tls_pair *p = atomic_load(&t->pair), *older; p; p = older) {
        older = p->older;
        pair_close(p);
    }
    free(t);
}

static int on_finished(gnutls_session_t session, unsigned type, unsigned when,
                       unsigned incoming, const gnutls_datum_t *message) {
    http_tls_state *state = gnutls_session_get_ptr(session);
    (void)type, (void)when, (void)message;
    if (incoming) state->established = true;
    return 0;
}

void http_tls_attach(http_tls_state *state, http_tls *t, gnutls_session_t session) {
    *state = (http_tls_state){.tls = t, .session = session};
    gnutls_session_set_ptr(session, state);
    gnutls_handshake_set_hook_function(session, GNUTLS_HANDSHAKE_FINISHED, GNUTLS_HOOK_POST,
                                       on_finished);
}

int http_tls_retrieve(gnutls_session_t session, const gnutls_datum_t *authorities,
                      int n_authorities, const gnutls_pk_algorithm_t *algorithms,
                      int n_algorithms, gnutls_pcert_st **chain, unsigned *n_chain,
                      gnutls_privkey_t *key) {
    const http_tls_state *state = gnutls_session_get_ptr(session);
    tls_pair *p = atomic_load(&state->tls->pair);
    (void)authorities, (void)n_authorities, (void)algorithms, (void)n_algorithms;
    *chain = p->chain;
    *n_chain = p->n_chain;
    *key = p->key;
    return 0;
}
