/* fuzz_hub.c - any bytes as a hub's listing, and as a model's name: refused with a sentence, or
 * all paths stay inside their folder and all digests are names of files. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hub/hub_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "accepted although %s\n", what);
    abort();
}

/* Walks the path as a file system would. */
static void check_path(const char *path) {
    int depth = 0;
    must(path[0] && path[0] != '/', "the path is absolute or empty");
    for (const char *part = path;; part++) {
        const size_t n = strcspn(part, "/");
        const bool up = n == 2 && memcmp(part, "..", 2) == 0;
        depth += up ? -1 : 1;
        must(depth > 0, "the path leads outside");
        part += n;
        if (!*part) return;
    }
}

static void check_listing(const hub_listing *l) {
    must(hub_is_hex(l->commit, 40), "the commit is none");
    for (int32_t i = 0; i < l->n; i++) {
        const hub_file *f = &l->files[i];
        check_path(f->path);
        must(f->bytes >= -1, "a size is negative");
        must(f->kind == hub_digest_kind_of(f->digest), "a digest is none");
        must((f->kind == HUB_NO_DIGEST) == !f->digest[0], "there is half a digest");
        char *escaped = hub_escape(f->path, true);
        must(!escaped || !strpbrk(escaped, " \r\n?#"), "a URL ends early");
        free(escaped);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    hub_listing l;
    hub_name name;
    hd_err err = {0};
    char *text = malloc(n + 1);
    if (!text) return 0;
    memcpy(text, data, n);
    text[n] = '\0';
    if (hub_listing_parse(&l, text, n, "fuzz", &err) == HD_OK) {
        check_listing(&l);
        if (hub_listing_select(&l, "a/b", &err) == HD_OK) check_listing(&l);
    } else {
        must(err.msg[0], "there is no sentence");
    }
    hub_listing_deinit(&l);
    if (hub_name_parse(&name, text, NULL) == HD_OK) {
        check_path(name.repo);
        check_path(name.revision);
    }
    char *repo = hub_cache_repo_of(text);
    free(repo);
    free(text);
    return 0;
}
