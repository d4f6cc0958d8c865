/* hub_env.c - see hub_env.h. An empty variable counts as unset. */
#include "cli/hub_env.h"

#include <stdlib.h>
#include <string.h>

#include "base/file.h"

enum { MAX_TOKEN_BYTES = 4096 };

static const char *variable(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

/* Returns the path in a variable, with "~/" as the home. malloc'ed; NULL: no memory, or no
 * home. */
static char *expanded(const char *path) {
    const char *home = variable("HOME");
    if (strncmp(path, "~/", 2) != 0) return strdup(path);
    return home ? hd_path_join(home, path + 2) : NULL;
}

static char *joined_and_freed(char *folder, const char *name) {
    char *path = folder ? hd_path_join(folder, name) : NULL;
    free(folder);
    return path;
}

/* HF_HOME or its default. */
static char *hub_home(void) {
    const char *home = variable("HF_HOME"), *caches = variable("XDG_CACHE_HOME");
    if (home) return expanded(home);
    return joined_and_freed(expanded(caches ? caches : "~/.cache"), "huggingface");
}

static char *cache_root(void) {
    const char *cache = variable("HF_HUB_CACHE");
    return cache ? expanded(cache) : joined_and_freed(hub_home(), "hub");
}

static char *read_token(void) {
    const char *given = variable("HF_TOKEN"), *file = variable("HF_TOKEN_PATH");
    if (given) return strdup(given);
    char *path = file ? expanded(file) : joined_and_freed(hub_home(), "token"), *text = NULL;
    size_t n;
    if (path) hd_file_read(&text, &n, path, MAX_TOKEN_BYTES, NULL); /* most have none */
    free(path);
    if (text) text[strcspn(text, " \t\r\n")] = '\0';
    if (text && *text) return text;
    free(text);
    return NULL;
}

hd_status hub_env_read(hub_env *out, hd_err *err) {
    const char *endpoint = variable("HF_ENDPOINT");
    *out = (hub_env){.cache = cache_root(),
                     .token = read_token(),
                     .endpoint = endpoint ? endpoint : "https://huggingface.co",
                     .ca_file = variable("SSL_CERT_FILE")};
    if (out->cache) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "HOME is not set: say by HF_HOME where models are kept");
}

void hub_env_deinit(hub_env *e) {
    free(e->cache);
    free(e->token);
    *e = (hub_env){0};
}
