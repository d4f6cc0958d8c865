/* fuzz_pickle.c - any bytes as a pickle. What is accepted is walked completely: every text lies
 * in the pickle or is a name, and every list has as many items as it says. Then the bytes are
 * read as tensors, without a GPU and with a fake one: those that come are walked, too. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "fakes/shared_device.h"
#include "weights/torch/pickle.h"
#include "weights/torch/torch_tensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool good) {
    if (!good) abort();
}

/* A value may contain itself, so the walk has an end of its own. */
static void walk(const hd_pickle *p, const hd_pickle_value *v, int depth) {
    uint64_t sum = 0;
    switch (v->kind) {
    case HD_PICKLE_NONE:
    case HD_PICKLE_BOOL:
    case HD_PICKLE_INT:
        break;
    case HD_PICKLE_TEXT:
    case HD_PICKLE_BYTES:
    case HD_PICKLE_NAME:
        for (size_t i = 0; i < v->n; i++) sum += (uint8_t)v->text[i];
        must(sum <= 255 * (uint64_t)v->n);
        break;
    case HD_PICKLE_TUPLE:
    case HD_PICKLE_LIST:
    case HD_PICKLE_DICT:
    case HD_PICKLE_CALL: {
        int32_t at = v->first;
        size_t n = 0;
        for (const hd_pickle_value *item; (item = hd_pickle_next(p, &at)); n++) {
            if (depth < 3 && n < 16) walk(p, item, depth + 1);
        }
        must(n == v->n);
        must(v->kind != HD_PICKLE_DICT || n % 2 == 0);
        must(v->kind != HD_PICKLE_CALL || n == 2 || n == 3);
        break;
    }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static hd_device *gpu;
    hd_pickle *p;
    hd_checkpoint *c;
    hd_err err = {0};
    if (hd_pickle_open(&p, data, size, &err) == HD_OK) {
        must(err.status == HD_OK);
        walk(p, hd_pickle_root(p), 0);
        hd_pickle_close(p);
    } else {
        must(err.status != HD_OK && err.msg[0] != '\0');
    }
    if (!gpu) gpu = shared_device_open();
    for (int way = 0; gpu && way < 4; way++) {
        err = (hd_err){0};
        if (hd_torch_tensors_read(&c, data, size, way % 2, way / 2 ? gpu : NULL, &err) ==
            HD_OK) {
            for (int32_t i = 0; i < hd_checkpoint_count(c); i++) {
                const hd_tensor *t = hd_checkpoint_at(c, i);
                must(t->name[0] != '\0');
                must(!t->on_device || memcmp(t->on_device, t->data, t->bytes) == 0);
            }
            hd_checkpoint_close(c);
        } else {
            must(err.status != HD_OK && err.msg[0] != '\0');
        }
        must(shared_device_opened(gpu) == 0);
    }
    return 0;
}
