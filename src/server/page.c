/* page.c - serves the web page: the files of web/, which the assembler embeds compressed; a client
 * that reads no gzip gets them unpacked. The headers allow the browser to run and load these files
 * only, so that model output cannot run as code. Frames are forbidden. A browser revalidates each
 * time, and the ETag tells it that nothing changed. */
#include "server/page.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ZLIB_CONST /* its input is not written to */
#include <zlib.h>

#define INCLUDE(symbol, path)                         \
    __asm__(".pushsection .rodata\n"                  \
            ".balign 8\n"                             \
            "page_" #symbol "_bytes: .quad 2f - 1f\n" \
            "page_" #symbol ":\n"                     \
            "1: .incbin \"" path "\"\n"               \
            "2: .popsection\n");                      \
    extern const uint64_t page_##symbol##_bytes;      \
    extern const char page_##symbol[];

#define FILES(X)                                         \
    X(index, "index.html", "text/html; charset=utf-8")   \
    X(style, "style.css", "text/css; charset=utf-8")     \
    X(icon, "icon.svg", "image/svg+xml")                 \
    X(theme, "theme.js", SCRIPT)                         \
    X(app, "app.js", SCRIPT)                             \
    X(chat, "chat.js", SCRIPT)                           \
    X(list, "list.js", SCRIPT)                           \
    X(archive, "archive.js", SCRIPT)                     \
    X(files, "files.js", SCRIPT)                         \
    X(own, "own.js", SCRIPT)                             \
    X(messages, "messages.js", SCRIPT)                   \
    X(markdown, "markdown.js", SCRIPT)                   \
    X(tex, "tex.js", SCRIPT)                             \
    X(symbols, "symbols.js", SCRIPT)                     \
    X(code, "code.js", SCRIPT)                           \
    X(tools, "tools.js", SCRIPT)                         \
    X(settings, "settings.js", SCRIPT)                   \
    X(store, "store.js", SCRIPT)                         \
    X(net, "net.js", SCRIPT)                             \
    X(dom, "dom.js", SCRIPT)                             \
    X(engine, "engine.js", SCRIPT)                       \
    X(lanes, "lanes.js", SCRIPT)                         \
    X(ranks, "ranks.js", SCRIPT)                         \
    X(plots, "plots.js", SCRIPT)                         \
    X(heatmap, "heatmap.js", SCRIPT)                     \
    X(router, "router.html", "text/html; charset=utf-8") \
    X(router_js, "router.js", SCRIPT)
#define SCRIPT "text/javascript; charset=utf-8"

/* The Makefile sets PAGE_PACKED to the folder of the compressed files. */
#define X(symbol, name, type) INCLUDE(symbol, PAGE_PACKED name ".gz")
FILES(X)
#undef X

typedef struct page_file {
    const char *name, *type;
    const char *packed; /* as gzip writes it */
    const uint64_t *n_packed;
} page_file;

#define X(symbol, name, type) {name, type, page_##symbol, &page_##symbol##_bytes},
static const page_file files[] = {FILES(X)};
#undef X

enum { N_FILES = sizeof files / sizeof files[0], ETAG_BYTES = 24 };

static const char *const headers[][2] = {
    {"Content-Security-Policy",
     "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
     "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
    {"Permissions-Policy",           "camera=(), microphone=(), geolocation=()"       },
    {"Cross-Origin-Opener-Policy",   "same-origin"                                    },
    {"Cross-Origin-Resource-Policy", "same-origin"                                    },
    {"Referrer-Policy",              "no-referrer"                                    },
    {"Cache-Control",                "private, no-cache"                              },
};

/* FNV-1a of the packed bytes, in quotes, with a letter for the form that is sent. */
static void write_etag(char etag[ETAG_BYTES], const page_file *f, bool packed) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (uint64_t i = 0; i < *f->n_packed; i++) {
        hash = (hash ^ (unsigned char)f->packed[i]) * 0x100000001b3u;
    }
    snprintf(etag, ETAG_BYTES, "\"%016" PRIx64 "%c\"", hash, packed ? 'z' : 'p');
}

/* The file as it was before gzip, which the caller frees; *n gets its bytes. NULL: no memory. */
static char *unpack(const page_file *f, size_t *n) {
    enum { LARGEST_WINDOW = 15, OF_GZIP = 16 };
    uint32_t bytes; /* gzip's last word, little-endian */
    memcpy(&bytes, f->packed + *f->n_packed - sizeof bytes, sizeof bytes);
    char *plain = malloc(bytes);
    z_stream z = {.next_in = (const Bytef *)f->packed,
                  .avail_in = (uInt)*f->n_packed,
                  .next_out = (Bytef *)plain,
                  .avail_out = (uInt)bytes};
    if (!plain || inflateInit2(&z, LARGEST_WINDOW + OF_GZIP) != Z_OK) {
        free(plain);
        return NULL;
    }
    const int end = inflate(&z, Z_FINISH);
    inflateEnd(&z);
    if (end != Z_STREAM_END) {
        free(plain);
        return NULL;
    }
    *n = bytes;
    return plain;
}

static void send_file(http_call *c, const page_file *f) {
    char etag[ETAG_BYTES];
    const char *accepted = http_header(c, "Accept-Encoding");
    const bool packed = accepted && strstr(accepted, "gzip");
    const char *known = http_header(c, "If-None-Match");
    write_etag(etag, f, packed);
    const bool same = known && strstr(known, etag);
    size_t n = same ? 0 : (size_t)*f->n_packed;
    char *plain = NULL;
    if (!packed && !same && !(plain = unpack(f, &n))) {
        http_error(c, 503, "overloaded_error", "no_memory", NULL,
                   "no memory to unpack the page");
        return;
    }
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++) {
        http_reply_header(c, headers[i][0], headers[i][1]);
    }
    http_reply_header(c, "ETag", etag);
    if (packed) http_reply_header(c, "Content-Encoding", "gzip");
    http_reply(c, same ? 304 : 200, f->type, plain ? plain : f->packed, n);
    free(plain);
}

static void get_index(http_call *c, void *server) {
    (void)server;
    send_file(c, &files[0]);
}

static void get_file(http_call *c, void *server) {
    (void)server;
    const char *name = http_path_tail(c);
    for (int32_t i = 1; i < N_FILES; i++) {
        if (strcmp(name, files[i].name) == 0) {
            send_file(c, &files[i]);
            return;
        }
    }
    http_error(c, 404, "invalid_request_error", "not_found", NULL, "the page has no such file");
}

const http_route page_routes[] = {
    {"GET", "/",       HTTP_PUBLIC, HTTP_OPENAI, get_index},
    {"GET", "/page/*", HTTP_PUBLIC, HTTP_OPENAI, get_file },
};
const size_t page_n_routes = sizeof page_routes / sizeof page_routes[0];
