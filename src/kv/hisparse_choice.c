/* hisparse_choice.c - see hisparse_choice.h. */
#include "kv/hisparse_choice.h"

#include <math.h>

#include "base/checked.h"
#include "kv/resident.h"

double hd_hisparse_miss_share(double rows, double entries, double top_k) {
    if (rows >= entries) return 0;
    return fmin(0.6 * pow(rows / top_k, -0.8), 1) * (1 - rows / entries);
}

double hd_hisparse_miss_bytes(const hd_model_spec *spec, int32_t n_layers, hd_dtype type,
                              double buffer_rows, double tokens, double rows) {
    const double page = hd_kv_shape_of(spec).page_tokens, top_k = spec->index_topk;
    double bytes = 0;
    for (int32_t l = 0; l < n_layers; l++) {
        if (hd_kv_selected_pool(spec, l) == HD_N_POOL_KINDS) continue;
        const double ratio = hd_max_i32(spec->layers[l].compress_ratio, 1),
                     entries = tokens / ratio;
        const double entry = ratio / page *
                             ((double)hd_kv_selected_bytes(spec, l + 1, type) -
                              (double)hd_kv_selected_bytes(spec, l, type));
        bytes += rows * fmin(top_k, entries) * entry *
                 hd_hisparse_miss_share(buffer_rows / rows, entries, top_k);
    }
    return bytes;
}

void hd_hisparse_decide(hd_hisparse_choice *c, double step_s, double fitting_step_s,
                        double miss_s) {
    c->miss_s = miss_s;
    c->gain_s = 0;
    if (c->fitting >= 1) c->gain_s = c->requests / c->fitting * fitting_step_s - step_s;
    c->on = c->fitting < 1 || c->miss_s < c->gain_s;
}
