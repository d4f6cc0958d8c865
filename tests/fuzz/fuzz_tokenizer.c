/* fuzz_tokenizer.c - foreign tokenizer files and foreign text.
 *
 * Input that starts with '{' is a tokenizer.json: it opens or is refused, and what opens must
 * encode. Any other input is text for a tokenizer with all kinds of parts: ids stay in range,
 * plain text gives no added token, and decoding gives the text back. */
#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "fakes/toy_tokenizer.h"
#include "tokenizer/unicode.h"
#include "tokenizer/vocab_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static const char document_end[] =
    "\"th\":256,\"the\":257,\"\u0120\u0120\":258,\"\u010a\u010a\":259},"
    "\"merges\":[\"t h\",\"th e\",\"\u0120 \u0120\",\"\u010a \u010a\"]},"
    "\"added_tokens\":[{\"id\":260,\"content\":\"<s>\",\"special\":true},"
    "{\"id\":261,\"content\":\"<think>\"},{\"id\":262,\"content\":\"<think\"},"
    "{\"id\":256,\"content\":\"th\"}],"
    "\"decoder\":{\"type\":\"ByteLevel\"},\"pre_tokenizer\":{\"type\":\"Sequence\","
    "\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\p{N}{1,3}\"},"
    "\"behavior\":\"Isolated\"},{\"type\":\"Split\",\"pattern\":{\"Regex\":"
    "\"[^\\r\\n\\\\p{L}\\\\p{P}\\\\p{S}]?[\\\\p{L}\\\\p{M}]+| ?[\\\\p{P}\\\\p{S}]+[\\r\\n]*|"
    "\\\\s*[\\r\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"},\"behavior\":\"MergedWithNext\"},"
    "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(?i:the)|\\\\s+?x|(?<=a)b\"},\"behavior\":"
    "\"Contiguous\"},{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}]}}";

static void put(hd_bytes *out, const char *text) {
    if (hd_bytes_append(out, text, strlen(text), NULL) != HD_OK) abort();
}

static hd_tokenizer *open_fixed(void) {
    hd_bytes text = {0};
    hd_tokenizer *t = NULL;
    put(&text, "{\"model\":{\"type\":\"BPE\",\"vocab\":{");
    for (int byte = 0; byte < 256; byte++) {
        char symbol[5] = {0}, id[4] = {0};
        symbol[text_utf8_put((uint8_t *)symbol, text_byte_character((uint8_t)byte))] = 0;
        put(&text, symbol[0] == '"' || symbol[0] == '\\' ? "\"\\" : "\"");
        put(&text, symbol);
        put(&text, "\":");
        id[0] = (char)('0' + byte / 100);
        id[1] = (char)('0' + byte / 10 % 10);
        id[2] = (char)('0' + byte % 10);
        put(&text, byte >= 100 ? id : byte >= 10 ? id + 1 : id + 2);
        put(&text, ",");
    }
    put(&text, document_end);
    hd_err err = {0};
    if (toy_open(&t, text.data, text.n, NULL, &err) != HD_OK) abort();
    hd_bytes_deinit(&text);
    return t;
}

static void check_text(const hd_tokenizer *t, const char *text, size_t n, uint32_t flags,
                       bool exact) {
    hd_ids ids = {.max = 1 << 22};
    hd_bytes back = {.max = 1 << 24};
    hd_err err = {0};
    bool valid = text_utf8_valid(text, n) == n;
    hd_status st = hd_tokenizer_encode(t, text, n, flags, &ids, &err);
    if (!valid && st == HD_OK) abort();
    if (exact && valid && st != HD_OK) abort();
    for (size_t i = 0; i < ids.n; i++) {
        size_t length;
        if (!hd_tokenizer_piece(t, ids.ids[i], &length)) abort();
        if (length > 1 && !flags && hd_tokenizer_is_added(t, ids.ids[i])) abort();
    }
    if (st == HD_OK && hd_tokenizer_decode(t, ids.ids, ids.n, false, &back, &err) == HD_OK) {
        if (text_utf8_valid(back.data, back.n) != back.n) abort();
        if (exact && (back.n != n || (n && memcmp(back.data, text, n) != 0))) abort();
    }
    hd_ids_deinit(&ids);
    hd_bytes_deinit(&back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static hd_tokenizer *fixed;
    if (!fixed) fixed = open_fixed();
    if (n > 0 && data[0] == '{') {
        static const char sample[] = "The 1234 \xe4\xbd\xa0\xe5\xa5\xbd\n\n  x <s>";
        hd_tokenizer *t;
        hd_err err = {0};
        if (toy_open(&t, (const char *)data, n, NULL, &err) == HD_OK) {
            check_text(t, sample, sizeof sample - 1, HD_ENCODE_SPECIAL, false);
            hd_tokenizer_close(t);
        } else if (!err.msg[0]) {
            abort();
        }
        return 0;
    }
    check_text(fixed, (const char *)data, n, 0, true);
    check_text(fixed, (const char *)data, n, HD_ENCODE_SPECIAL, true);
    return 0;
}
