/* toy_tokenizer.h - a tokenizer.json small enough to write down, for unit tests and fuzzing. */
#ifndef HD_TESTS_FAKES_TOY_TOKENIZER_H
#define HD_TESTS_FAKES_TOY_TOKENIZER_H

#include <stdbool.h>
#include <string.h>

#include "base/json.h"
#include "tokenizer/tokenizer_internal.h"

/* The parts of the document; NULL takes the usual one. */
typedef struct toy_parts {
    const char *vocab_more; /* further entries: ",\"x y\":300" */
    const char *vocab_skip; /* a byte symbol to leave out, as JSON key */
    const char *merges;     /* the array */
    const char *added;      /* the array */
    const char *pre_tokenizer, *normalizer, *decoder, *post_processor;
    const char *model_more; /* further members: ",\"dropout\":0.5" */
    const char *type;       /* of the model */
} toy_parts;

/* Ids 0..255 are the bytes in order; "th" 256, "the" 257, " t" 258, " the" 259, "  " 260;
 * added "<s>" 261 special, "<think>" 262, "</think>" 263. The text is the caller's. */
void toy_document(hd_bytes *out, const toy_parts *parts);

/* Opens documents in memory; config may be NULL. */
static inline hd_status toy_open(hd_tokenizer **out, const char *json, size_t n,
                                 const char *config, hd_err *err) {
    static const char path[] = "tokenizer.json", config_path[] = "tokenizer_config.json";
    json_t *root = NULL, *settings = NULL;
    *out = NULL;
    hd_status st = hd_json_parse(&root, json, n, path, err);
    if (st == HD_OK && config) {
        st = hd_json_parse(&settings, config, strlen(config), config_path, err);
    }
    if (st == HD_OK) st = text_tokenizer_open(out, root, path, settings, config_path, err);
    json_decref(root);
    json_decref(settings);
    return st;
}

/* n characters of the kinds that patterns tell apart, as UTF-8; out has room for 4 n bytes.
 * Returns the bytes written. */
size_t toy_random_text(uint8_t *out, uint64_t seed, uint64_t round, int32_t n);

/* The pattern of the DeepSeek tokenizers' last Split as a JSON string's inside. */
extern const char toy_v3_pattern[];

#endif
