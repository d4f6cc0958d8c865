/* keys.c - reading, digesting and comparing keys. */
#include "http/keys.h"

#include <gnutls/crypto.h>
#include <gnutls/gnutls.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "http/key_salt.h"

enum { DIGEST_BYTES = HTTP_KEY_DIGEST, KEY_FILE_MAX_BYTES = 1 << 20 };

typedef struct key {
    uint8_t digest[DIGEST_BYTES];
    uint64_t salt;
    hd_right right;
} key;

typedef struct key_list {
    key *keys; /* [n] */
    size_t n;
    bool user, admin;
} key_list;

struct hd_keys {
    hd_key_sources sources;
    pthread_rwlock_t lock; /* guards list */
    key_list list;
};

static hd_status add_key(key_list *list, const char *text, size_t n, hd_right right,
                         const char *where, hd_err *err) {
    if (n < HD_KEY_MIN_BYTES) {
        return HD_FAIL(err, HD_EINVAL, "%s: a key has %zu characters; at least %d are needed",
                       where, n, HD_KEY_MIN_BYTES);
    }
    if (n > HD_KEY_MAX_BYTES) {
        return HD_FAIL(err, HD_EINVAL, "%s: a key has %zu characters; at most %d are allowed",
                       where, n, HD_KEY_MAX_BYTES);
    }
    for (size_t i = 0; i < n; i++) {
        if (text[i] <= ' ' || text[i] > '~') {
            return HD_FAIL(err, HD_EINVAL, "%s: a key holds a character that no header can",
                           where);
        }
    }
    if (list->n == HD_KEYS_MAX) {
        return HD_FAIL(err, HD_EINVAL, "%s: more than %d keys", where, HD_KEYS_MAX);
    }
    key *k = &list->keys[list->n];
    if (gnutls_hash_fast(GNUTLS_DIG_SHA256, text, n, k->digest) != 0) {
        return HD_FAIL(err, HD_EIO, "%s: no digest of a key can be computed", where);
    }
    k->salt = http_key_salt(k->digest);
    k->right = right;
    list->n++;
    *(right == HD_RIGHT_ADMIN ? &list->admin : &list->user) = true;
    return HD_OK;
}

static hd_status check_mode(const char *path, hd_err *err) {
    struct stat st;
    if (stat(path, &st) == 0 && (st.st_mode & S_IRWXO) != 0) {
        return HD_FAIL(err, HD_EINVAL, "%s: everyone may read these keys; chmod 600 it", path);
    }
    return HD_OK;
}

static hd_status add_file(key_list *list, const char *path, hd_right right, hd_err *err) {
    char *text = NULL;
    size_t n;
    HD_TRY(check_mode(path, err));
    HD_TRY(hd_file_read(&text, &n, path, KEY_FILE_MAX_BYTES, err));
    const size_t before = list->n;
    hd_status st = HD_OK;
    for (char *line = text; st == HD_OK && line < text + n;) {
        const size_t length = strcspn(line, "\n");
        size_t used = length;
        while (used && strchr(" \t\r", line[used - 1])) used--;
        if (used && *line != '#') st = add_key(list, line, used, right, path, err);
        line += length + 1;
    }
    explicit_bzero(text, n);
    free(text);
    if (st == HD_OK && list->n == before) {
        st = HD_FAIL(err, HD_EINVAL, "%s: holds no key", path);
    }
    return st;
}

static hd_status read_all(key_list *list, const hd_key_sources *from, hd_err *err) {
    list->keys = calloc(HD_KEYS_MAX, sizeof *list->keys);
    if (!list->keys) return HD_FAIL(err, HD_ENOMEM, "no memory for keys");
    hd_status st = HD_OK;
    if (from->file) st = add_file(list, from->file, HD_RIGHT_USER, err);
    if (st == HD_OK && from->admin_file) {
        st = add_file(list, from->admin_file, HD_RIGHT_ADMIN, err);
    }
    if (st == HD_OK && from->text) {
        st = add_key(list, from->text, strlen(from->text), HD_RIGHT_USER, "HADAL_API_KEY", err);
    }
    if (st == HD_OK && from->admin_text) {
        st = add_key(list, from->admin_text, strlen(from->admin_text), HD_RIGHT_ADMIN,
                     "HADAL_ADMIN_KEY", err);
    }
    if (st != HD_OK) {
        free(list->keys);
        *list = (key_list){0};
    }
    return st;
}

hd_status hd_keys_open(hd_keys **out, const hd_key_sources *sources, hd_err *err) {
    hd_keys *k = calloc(1, sizeof *k);
    *out = NULL;
    if (!k) return HD_FAIL(err, HD_ENOMEM, "no memory for keys");
    k->sources = *sources;
    hd_status st = read_all(&k->list, sources, err);
    if (st != HD_OK) {
        free(k);
        return st;
    }
    pthread_rwlock_init(&k->lock, NULL);
    *out = k;
    return HD_OK;
}

static void free_list(key_list *list) {
    if (list->keys) explicit_bzero(list->keys, HD_KEYS_MAX * sizeof *list->keys);
    free(list->keys);
}

void hd_keys_close(hd_keys *k) {
    if (!k) return;
    free_list(&k->list);
    pthread_rwlock_destroy(&k->lock);
    free(k);
}

hd_status hd_keys_reload(hd_keys *k, hd_err *err) {
    key_list fresh = {0};
    HD_TRY(read_all(&fresh, &k->sources, err));
    pthread_rwlock_wrlock(&k->lock);
    key_list old = k->list;
    k->list = fresh;
    pthread_rwlock_unlock(&k->lock);
    free_list(&old);
    return HD_OK;
}

/* Returns 1 if equal. Reads every byte, so its time does not depend on the content. */
static uint32_t same_digest(const uint8_t *a, const uint8_t *b) {
    uint32_t differs = 0;
    for (size_t i = 0; i < DIGEST_BYTES; i++) differs |= (uint32_t)(a[i] ^ b[i]);
    return (differs - 1) >> 31;
}

hd_right hd_keys_check(hd_keys *k, const char *text, uint64_t *salt) {
    uint8_t digest[DIGEST_BYTES];
    *salt = 0;
    if (!text || gnutls_hash_fast(GNUTLS_DIG_SHA256, text, strlen(text), digest) != 0) {
        return HD_RIGHT_NONE;
    }
    uint64_t found_salt = 0;
    uint32_t right = HD_RIGHT_NONE;
    pthread_rwlock_rdlock(&k->lock);
    /* no early exit, so that the time reveals nothing */
    for (size_t i = 0; i < k->list.n; i++) {
        const key *one = &k->list.keys[i];
        const uint32_t same = same_digest(one->digest, digest);
        found_salt |= one->salt * same;
        right |= (uint32_t)one->right * same;
    }
    pthread_rwlock_unlock(&k->lock);
    *salt = found_salt;
    return right & HD_RIGHT_ADMIN ? HD_RIGHT_ADMIN : (hd_right)right;
}

bool hd_keys_user_set(hd_keys *k) {
    pthread_rwlock_rdlock(&k->lock);
    const bool set = k->list.user;
    pthread_rwlock_unlock(&k->lock);
    return set;
}

bool hd_keys_admin_set(hd_keys *k) {
    pthread_rwlock_rdlock(&k->lock);
    const bool set = k->list.admin;
    pthread_rwlock_unlock(&k->lock);
    return set;
}
