/* rows_ref.c - reference row-wise operators in plain C: embedding, norms, RoPE, KV store,
 * SwiGLU. */
#include <string.h>

#include "ops/ref/act_internal.h"
#include "ops/ref/ref_internal.h"

void hd_embed_ref(hd_stream *s, const hd_embed_args *a) {
    (void)s;
    const int32_t cols = a->table->cols;
    for (int32_t r = 0; r < a->rows; r++) {
        for (int32_t i = 0; i < a->copies; i++) {
            float *out = act(a->out) + ((int64_t)r * a->copies + i) * cols;
            for (int32_t c = 0; c < cols; c++) out[c] = hd_weight_at(a->table, a->tokens[r], c);
        }
    }
}

void hd_gather_ref(hd_stream *s, const hd_gather_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        memcpy(act(a->out) + (int64_t)r * a->cols,
               act_in(a->x) + (int64_t)a->index[r] * a->cols, (size_t)a->cols * sizeof(float));
    }
}

void hd_add_ref(hd_stream *s, const hd_add_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        float *x = act(a->x) + (int64_t)r * a->cols;
        const float *y = act_in(a->y) + (int64_t)(r / a->repeat) * a->cols;
        for (int32_t c = 0; c < a->cols; c++) x[c] += y[c];
    }
}

void hd_rms_norm_ref(hd_stream *s, const hd_rms_norm_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        const float *x = act_in(a->x) + r * stride_of(a->x, a->cols);
        float *out = act(a->out) + r * stride_of(a->out, a->cols);
        double sum = 0.0;
        for (int32_t c = 0; c < a->cols; c++) sum += (double)x[c] * (double)x[c];
        float scale = (float)(1.0 / sqrt(sum / a->cols + (double)a->eps));
        for (int32_t c = 0; c < a->cols; c++) {
            out[c] = x[c] * scale * (a->weight ? a->weight[c] : 1.0f);
        }
    }
}

void hd_layer_norm_ref(hd_stream *s, const hd_layer_norm_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        const float *x = act_in(a->x) + (int64_t)r * a->cols;
        float *out = act(a->out) + (int64_t)r * a->cols;
        double mean = 0.0, var = 0.0;
        for (int32_t c = 0; c < a->cols; c++) mean += (double)x[c];
        mean /= a->cols;
        for (int32_t c = 0; c < a->cols; c++) {
            double off = (double)x[c] - mean;
            var += off * off;
        }
        double scale = 1.0 / sqrt(var / a->cols + (double)a->eps);
        for (int32_t c = 0; c < a->cols; c++) {
            out[c] = (float)(((double)x[c] - mean) * scale) * a->weight[c] + a->bias[c];
        }
    }
}

void hd_rope_table_ref(hd_stream *s, const hd_rope_table_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        float *cosine = a->out + (int64_t)r * 2 * a->pairs;
        float *sine = cosine + a->pairs;
        for (int32_t i = 0; i < a->pairs; i++) {
            float angle = rope_angle(a->position[r], a->freq[i]);
            cosine[i] = cosf(angle) * a->scale;
            sine[i] = sinf(angle) * a->scale;
        }
    }
}

void hd_rope_ref(hd_stream *s, const hd_rope_args *a) {
    const int64_t x_row = stride_of(a->x, (int64_t)a->heads * a->x_head);
    const int64_t out_row = stride_of(a->out, (int64_t)a->heads * a->out_head);
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        const float *cosine = a->cos_sin + (int64_t)r * 2 * a->pairs;
        const float *sine = cosine + a->pairs;
        for (int32_t h = 0; h < a->heads; h++) {
            const float *x = act_in(a->x) + r * x_row + (int64_t)h * a->x_head;
            float *out = act(a->out) + r * out_row + (int64_t)h * a->out_head;
            for (int32_t i = 0; i < a->pairs; i++) {
                int64_t first = a->half_split ? i : 2 * i;
                int64_t second = a->half_split ? i + a->pairs : 2 * i + 1;
                rotate_pair(out, x, first, second, cosine[i], a->inverse ? -sine[i] : sine[i]);
            }
        }
    }
}

void hd_kv_store_ref(hd_stream *s, const hd_kv_store_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        ops_write_entry(&a->pool, a->seq[r], a->pos[r],
                        act_in(a->x) + r * stride_of(a->x, a->pool.width));
    }
}

void hd_swiglu_ref(hd_stream *s, const hd_swiglu_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        int64_t row = (int64_t)r * a->cols, to = r * stride_of(a->out, a->cols);
        float weight = a->weight ? a->weight[a->assignment ? a->assignment[r] : r] : 1.0f;
        for (int32_t c = 0; c < a->cols; c++) {
            float g = act_in(a->gate)[row + c], u = act_in(a->up)[row + c];
            if (a->limit > 0.0f) { /* comparisons, so that NaN stays NaN */
                g = g > a->limit ? a->limit : g;
                u = u > a->limit ? a->limit : u < -a->limit ? -a->limit : u;
            }
            act(a->out)[to + c] = silu(g) * u * weight;
        }
    }
}
