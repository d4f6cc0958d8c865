/* memory.c - see memory.h. */
#include "train/memory.h"

#include "train/trainer_internal.h"
#include "weights/summary.h"

static int64_t scratch_of(const hd_stream *s) {
    return (int64_t)hd_stream_workers(s) * (int64_t)hd_stream_scratch_bytes(s);
}

static int64_t pages_of(const hd_trainer *t) {
    size_t bytes = 0;
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        bytes += hd_kv_page_bytes(t->o.spec, trainer_layers(t), (hd_kv_group)g, HD_F32, 0);
    }
    return (int64_t)bytes * trainer_pages(t);
}

static int64_t stored_bytes(const hd_trainer *t) {
    hd_summary all;
    hd_summarize(&all, t->o.spec, hd_weights_schema(t->o.weights));
    return hd_summary_main(&all).bytes + hd_summary_mtp(&all).bytes;
}

/* Of rank 0: the new weights, and the masters of several ranks. */
static int64_t update_bytes(const hd_trainer *t, const hd_trainer_memory *m) {
    return m->weights + (t->o.n_ranks > 1 ? m->trained * (int64_t)sizeof(float) : 0);
}

void hd_trainer_memory_now(hd_trainer_memory *out, const hd_trainer *t) {
    int64_t first, own, summed;
    hd_gradients_all(hd_parameters_gradients(t->parameters), &summed);
    hd_parameters_slice(t->parameters, HD_PARAMETER_MASTER, &first, &own);
    *out = (hd_trainer_memory){.trained = hd_parameters_count(t->parameters),
                               .weights = stored_bytes(t),
                               .gradients = summed * (int64_t)sizeof(float),
                               .masters = own * HD_N_PARAMETER_ARRAYS * (int64_t)sizeof(float),
                               .activations = (int64_t)(hd_model_bytes(t->model) +
                                                        hd_backward_bytes(t->backward) +
                                                        2 * t->batch.bytes) +
                                              pages_of(t) + scratch_of(t->optimizer.stream)};
    if (hd_device_is_host(t->device)) out->update = update_bytes(t, out);
}

hd_status hd_trainer_memory_of(hd_trainer_memory *out, const hd_trainer_options *o,
                               hd_err *err) {
    hd_trainer *t;
    hd_trainer_options shapes = *o;
    shapes.shapes_only = true;
    HD_TRY(trainer_open_rank(&t, &shapes, NULL, err));
    hd_trainer_memory_now(out, t);
    hd_trainer_close(t);
    return HD_OK;
}

int64_t hd_trainer_memory_peak(const hd_trainer_memory *m) {
    return m->weights + m->gradients + m->masters + m->activations + m->update;
}
