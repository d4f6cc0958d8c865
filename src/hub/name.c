/* name.c - checks names of repositories, revisions and files, and escapes them for URLs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hub/hub_internal.h"

enum { MAX_PATH_BYTES = 1024, MAX_PART_BYTES = 255 };

static bool is_word_byte(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           c == '-' || c == '_' || c == '.';
}

/* Checks one part of a repository's name. "--" would make the cache's folders ambiguous. */
static bool is_word(const char *text, size_t n) {
    if (n == 0 || text[0] == '.' || text[0] == '-') return false;
    for (size_t i = 0; i < n; i++) {
        if (!is_word_byte(text[i])) return false;
        if (text[i] == '-' && i + 1 < n && text[i + 1] == '-') return false;
    }
    return true;
}

hd_status hub_name_parse(hub_name *out, const char *text, hd_err *err) {
    const size_t n = strcspn(text, "@");
    const char *revision = text[n] ? text + n + 1 : "main";
    const char *slash = memchr(text, '/', n);
    const size_t owner = slash ? (size_t)(slash - text) : 0;
    if (!slash || n >= HUB_NAME_BYTES || !is_word(text, owner) ||
        !is_word(slash + 1, n - owner - 1)) {
        return HD_FAIL(err, HD_EINVAL,
                       "'%.200s' is no model's name: ORG/NAME or ORG/NAME@REVISION", text);
    }
    if (!hub_path_is_plain(revision) || strlen(revision) >= HUB_NAME_BYTES) {
        return HD_FAIL(err, HD_EINVAL, "'%.200s' is no revision: a branch, a tag or a commit",
                       revision);
    }
    snprintf(out->repo, sizeof out->repo, "%.*s", (int)n, text);
    snprintf(out->revision, sizeof out->revision, "%s", revision);
    return HD_OK;
}

bool hub_path_is_plain(const char *path) {
    if (strlen(path) > MAX_PATH_BYTES) return false;
    for (const char *part = path;; part++) {
        const size_t n = strcspn(part, "/");
        const bool dots = n <= 2 && strspn(part, ".") >= n; /* "", "." and ".." */
        if (dots || n > MAX_PART_BYTES) return false;
        for (size_t i = 0; i < n; i++) {
            const unsigned char c = (unsigned char)part[i];
            if (c < 0x20 || c == 0x7f || c == '\\') return false;
        }
        part += n;
        if (!*part) return true;
    }
}

bool hub_is_hex(const char *text, size_t n) {
    return strlen(text) == n && strspn(text, "0123456789abcdef") == n;
}

char *hub_escape(const char *text, bool keep_slashes) {
    char *out = malloc(3 * strlen(text) + 1), *to = out;
    if (!out) return NULL;
    for (; *text; text++) {
        if (is_word_byte(*text) || *text == '~' || (*text == '/' && keep_slashes)) {
            *to++ = *text;
        } else {
            to += snprintf(to, 4, "%%%02X", (unsigned char)*text);
        }
    }
    *to = '\0';
    return out;
}
