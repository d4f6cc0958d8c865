/* fuzz_examples.c - foreign training data: lines are read or refused, and of what is read every
 * token is one of the model, the first has no loss, and some has one. */
#include <assert.h>
#include <stdint.h>
#include <stdlib.h>

#include "train/examples.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static hd_tokenizer *tokenizer;
    hd_examples e;
    hd_err err = {0};
    if (!tokenizer && hd_tokenizer_open(&tokenizer, "models/tiny-v3", NULL) != HD_OK) abort();
    const hd_example_rules rules = {.tokenizer = tokenizer,
                                    .encoding = HD_CHAT_V31,
                                    .eos = 1,
                                    .vocab = 4096,
                                    .context = 128};
    if (hd_examples_read(&e, (const char *)data, n, "data", &rules, &err) != HD_OK) {
        assert(!e.all && err.msg[0]);
        return 0;
    }
    for (int32_t i = 0; i < e.n; i++) {
        const hd_example *x = &e.all[i];
        int32_t n_loss = 0;
        assert(x->n >= 2 && x->n <= rules.context && x->mask[0] == 0);
        for (int32_t k = 0; k < x->n; k++) {
            assert(x->tokens[k] >= 0 && x->tokens[k] < rules.vocab);
            n_loss += x->mask[k];
        }
        assert(n_loss == x->n_loss && n_loss > 0 && x->mask[x->first]);
    }
    hd_examples_deinit(&e);
    return 0;
}
