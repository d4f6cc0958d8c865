/* fuzz_safetensors.c - any bytes as a safetensors file. What is accepted is checked again the
 * slow way: every byte of the data area must belong to exactly one tensor. */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "weights/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool good) {
    if (!good) abort();
}

static uint64_t header_length(const uint8_t *file) {
    uint64_t n = 0;
    for (int i = 7; i >= 0; i--) n = n << 8 | file[i];
    return n;
}

/* Bits by adding up one row after the other: slow, and it cannot wrap unseen. */
static uint64_t bits_of(const hd_tensor *t, uint64_t limit) {
    static const struct {
        const char *name;
        uint64_t bits;
    } sizes[] = {
        {"F4",   4 },
        {"F6_",  6 },
        {"F8_",  8 },
        {"I8",   8 },
        {"U8",   8 },
        {"BOOL", 8 },
        {"F16",  16},
        {"BF16", 16},
        {"I16",  16},
        {"U16",  16},
        {"F32",  32},
        {"I32",  32},
        {"U32",  32},
        {"F64",  64},
        {"I64",  64},
        {"U64",  64},
        {"C64",  64},
    };
    uint64_t total = 0;
    for (size_t i = 0; i < HD_LEN(sizes); i++) {
        size_t n = strlen(sizes[i].name);
        if (strncmp(t->dtype_name, sizes[i].name, n) == 0) total = sizes[i].bits;
    }
    must(total > 0 && t->rank >= 0 && t->rank <= HD_MAX_RANK);
    for (int32_t r = 0; r < t->rank; r++) {
        must(t->shape[r] >= 0);
        if (t->shape[r] == 0) return 0;
    }
    for (int32_t r = 0; r < t->rank; r++) {
        uint64_t row = total;
        total = 0;
        for (int64_t k = 0; k < t->shape[r]; k++) {
            total += row;
            must(total <= limit);
        }
    }
    return total;
}

static void check_again(const hd_safetensors *s, const uint8_t *data, size_t size) {
    uint64_t n = header_length(data);
    must(n >= 2 && n <= size - 8);
    const uint8_t *area = data + 8 + n;
    size_t area_bytes = size - 8 - (size_t)n;
    uint8_t *owners = calloc(1, area_bytes + 1);
    must(owners != NULL);
    for (int32_t i = 0; i < s->n; i++) {
        const hd_tensor *t = &s->tensors[i];
        must(t->name[0] != '\0');
        must(bits_of(t, 8 * (uint64_t)area_bytes) == 8 * (uint64_t)t->bytes);
        for (size_t k = 0; k < t->bytes; k++) {
            size_t at = (size_t)(t->data - area) + k;
            must(at < area_bytes && owners[at] == 0);
            owners[at] = 1;
        }
    }
    for (size_t k = 0; k < area_bytes; k++) must(owners[k] == 1);
    free(owners);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    hd_safetensors s;
    hd_err err = {0};
    if (hd_safetensors_init(&s, data, size, "fuzz.safetensors", &err) == HD_OK) {
        must(err.status == HD_OK);
        check_again(&s, data, size);
    } else {
        must(err.status != HD_OK && strncmp(err.msg, "fuzz.safetensors: ", 18) == 0);
    }
    hd_safetensors_deinit(&s);
    return 0;
}
