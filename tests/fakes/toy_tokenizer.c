/* toy_tokenizer.c - a small tokenizer.json for tests; see toy_tokenizer.h. */
#include "fakes/toy_tokenizer.h"

#include <stdio.h>
#include <string.h>

#include "base/philox.h"
#include "tokenizer/unicode.h"
#include "tokenizer/vocab_internal.h"

const char toy_v3_pattern[] =
    "[!\\\"#$%&'()*+,\\\\-./:;<=>?@\\\\[\\\\\\\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\\\p{L}\\\\p{P}"
    "\\\\p{S}]?[\\\\p{L}\\\\p{M}]+| "
    "?[\\\\p{P}\\\\p{S}]+[\\r\\n]*|\\\\s*[\\r\\n]+|\\\\s+(?!\\\\S)"
    "|\\\\s+";

static void put(hd_bytes *out, const char *text) {
    hd_bytes_append(out, text, strlen(text), NULL);
}

static void put_or(hd_bytes *out, const char *text, const char *usual) {
    put(out, text ? text : usual);
}

static void put_symbols(hd_bytes *out, const char *skip) {
    const char *comma = "";
    for (int byte = 0; byte < 256; byte++) {
        uint8_t symbol[5] = {0};
        char entry[48];
        symbol[text_utf8_put(symbol, text_byte_character((uint8_t)byte))] = 0;
        bool quoted = symbol[0] == '"' || symbol[0] == '\\';
        if (skip && strcmp(skip, (const char *)symbol) == 0) continue;
        snprintf(entry, sizeof entry, "%s\"%s%s\":%d", comma, quoted ? "\\" : "",
                 (const char *)symbol, byte);
        put(out, entry);
        comma = ",";
    }
}

static void put_v3(hd_bytes *out) {
    static const char split[] = "\"behavior\":\"Isolated\",\"invert\":false},";
    put(out, "{\"type\":\"Sequence\",\"pretokenizers\":["
             "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\p{N}{1,3}\"},");
    put(out, split);
    put(out,
        "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[\\u4e00-\\u9fa5\\u3040-\\u30ff]+\"},");
    put(out, split);
    put(out, "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"");
    put(out, toy_v3_pattern);
    put(out, "\"},");
    put(out, split);
    put(out, "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]}");
}

void toy_document(hd_bytes *out, const toy_parts *p) {
    put(out, "{\"version\":\"1.0\",\"added_tokens\":");
    put_or(out, p->added,
           "[{\"id\":261,\"content\":\"<s>\",\"special\":true},"
           "{\"id\":262,\"content\":\"<think>\",\"special\":false},"
           "{\"id\":263,\"content\":\"</think>\",\"special\":false}]");
    put(out, ",\"normalizer\":");
    put_or(out, p->normalizer, "null");
    put(out, ",\"pre_tokenizer\":");
    if (p->pre_tokenizer) {
        put(out, p->pre_tokenizer);
    } else {
        put_v3(out);
    }
    put(out, ",\"post_processor\":");
    put_or(out, p->post_processor, "null");
    put(out, ",\"decoder\":");
    put_or(out, p->decoder, "{\"type\":\"ByteLevel\"}");
    put(out, ",\"model\":{\"type\":");
    put_or(out, p->type, "\"BPE\"");
    put_or(out, p->model_more, "");
    put(out, ",\"vocab\":{");
    put_symbols(out, p->vocab_skip);
    put(out, ",\"th\":256,\"the\":257,\"\u0120t\":258,\"\u0120the\":259,\"\u0120\u0120\":260");
    put_or(out, p->vocab_more, "");
    put(out, "},\"merges\":");
    put_or(out, p->merges,
           "[\"t h\",\"th e\",[\"\u0120\",\"t\"],\"\u0120 the\",\"\u0120 \u0120\"]");
    put(out, "}}");
}

/* A random character: mostly of the kinds that patterns tell apart. */
static uint32_t random_character(hd_philox *r, int i) {
    static const uint32_t likely[] = {
        'a',    'Z',    ' ',  ' ',  '\n', '\r', '1',    '.',    '<',    0xe9,   0x301,   0x4e00,
        0x3042, 0x20ac, 0x85, 0xa0, 't',  'h',  0x180e, 0x200b, 0xfeff, 0x0378, 0x1f642, 0x661};
    uint32_t v = r->v[i & 3] >> (i & 4 ? 16 : 0);
    if (v % 8 != 0) return likely[v / 8 % HD_LEN(likely)];
    uint32_t cp = (v * 2654435761u) % (uint32_t)TEXT_UNICODE_END;
    return cp >= 0xd800 && cp < 0xe000 ? '?' : cp;
}

size_t toy_random_text(uint8_t *out, uint64_t seed, uint64_t round, int32_t n) {
    size_t used = 0;
    for (int32_t i = 0; i < n; i += 8) {
        hd_philox r = hd_philox_at(seed, round, (uint32_t)i);
        for (int k = 0; k < 8 && i + k < n; k++) {
            used += text_utf8_put(out + used, random_character(&r, k));
        }
    }
    return used;
}
