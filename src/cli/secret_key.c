/* secret_key.c - see secret_key.h. */
#include "cli/secret_key.h"

#include <stdlib.h>
#include <string.h>

#include "base/file.h"

enum { MAX_KEY = 4096, MIN_KEY = 16 };

hd_status secret_key_read(char **key, const char *file, const char *variable, const char *of,
                          hd_err *err) {
    const char *given = getenv(variable);
    size_t n;
    *key = NULL;
    if (file) {
        HD_TRY(hd_file_read(key, &n, file, MAX_KEY, err));
    } else if (given) {
        *key = strdup(given);
        if (!*key) return HD_FAIL(err, HD_ENOMEM, "no memory for the key of the %s", of);
    }
    if (!*key) return HD_OK;
    (*key)[strcspn(*key, "\r\n")] = 0;
    if (strlen(*key) >= MIN_KEY) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "the key of the %s has %zu characters; at least %d", of,
                   strlen(*key), MIN_KEY);
}
