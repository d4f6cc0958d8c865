/* pin.c - pins the experts that lie in host memory: of each file the bytes from its first expert to its
 * last. */
#include <stdlib.h>

#include "weights/safetensors.h"
#include "weights/weights.h"

typedef struct file_part {
    const uint8_t *begin, *end; /* NULL: no expert is in the file */
} file_part;

static void widen(file_part *files, const hd_tensor *t) {
    const uint8_t *begin = t ? t->data : NULL;
    if (!begin) return;
    file_part *f = &files[t->shard];
    if (!f->begin || begin < f->begin) f->begin = begin;
    if (begin + t->bytes > f->end) f->end = begin + t->bytes;
}

hd_status hd_weights_pin_experts(const hd_weights *w, hd_device *d, size_t *bytes,
                                 hd_err *err) {
    const hd_schema *schema = hd_weights_schema(w);
    const int32_t n = hd_checkpoint_shards(hd_weights_checkpoint(w));
    file_part *files = calloc((size_t)n + 1, sizeof *files);
    hd_status st = HD_OK;
    *bytes = 0;
    if (!files) return HD_FAIL(err, HD_ENOMEM, "no memory for a list of %d files", n);
    for (int32_t i = 0; i < schema->n; i++) {
        if (schema->decls[i].expert < 0 || !hd_weights_stored(w, i)) continue;
        widen(files, hd_weights_tensor(w, i));
        widen(files, hd_weights_scale_tensor(w, i));
    }
    for (int32_t i = 0; i < n && st == HD_OK; i++) {
        const size_t part = (size_t)(files[i].end - files[i].begin);
        if (part) st = hd_device_pin_host(d, files[i].begin, part, err);
        if (st == HD_OK) *bytes += part;
    }
    free(files);
    return st;
}
