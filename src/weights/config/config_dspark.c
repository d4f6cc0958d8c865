/* config_dspark.c - reads the DSpark drafter of V4's dated releases.
 *
 * Any dspark_* key makes the layers after the main ones stages of one DSpark drafter. Their
 * number is that of the compress_ratios after the main layers'; num_nextn_predict_layers of
 * these releases still counts the MTP layer, which they do not have. */
#include "weights/config/config_internal.h"

static const char block_key[] = "dspark_block_size", filler_key[] = "dspark_noise_token_id",
                  rank_key[] = "dspark_markov_rank", taps_key[] = "dspark_target_layer_ids",
                  experts_key[] = "dspark_n_routed_experts",
                  top_k_key[] = "dspark_num_experts_per_tok";

enum { MAX_STAGES = 16 };

static bool is_given(const weights_view *v) {
    return weights_find(v, block_key) || weights_find(v, filler_key) ||
           weights_find(v, rank_key) || weights_find(v, taps_key);
}

static hd_status read_taps(hd_model_spec *s, const weights_view *v) {
    hd_dspark_spec *d = &s->dspark;
    const json_t *taps;
    HD_TRY(weights_array(v, taps_key, &taps));
    const size_t n = json_array_size(taps);
    bool good = n >= 1 && n <= HD_MAX_TAPS;
    for (size_t i = 0; good && i < n; i++) {
        const json_t *entry = json_array_get(taps, i);
        const int64_t layer = json_integer_value(entry), least = i ? d->taps[i - 1] + 1 : 0;
        good = json_is_integer(entry) && layer >= least && layer < s->n_layers;
        if (good) d->taps[i] = (int32_t)layer;
    }
    d->n_taps = (int32_t)n;
    if (good) return HD_OK;
    return weights_refuse(v, HD_EFORMAT, taps_key, taps,
                          "must be 1 to 16 layers, ascending, below num_hidden_layers");
}

/* Returns the ratios after the main layers'; 0 without compress_ratios. */
static int32_t ratios_after(const hd_model_spec *s, const weights_view *v) {
    const size_t n = json_array_size(weights_find(v, "compress_ratios"));
    const size_t main = (size_t)s->n_layers;
    return n > main && n <= main + MAX_STAGES ? (int32_t)(n - main) : 0;
}

static void drop_drafter(hd_model_spec *s) {
    s->n_mtp = 0;
    s->drafter = HD_DRAFTER_NONE;
}

/* Missing or 0: as in the main layers. */
static hd_status read_experts(hd_model_spec *s, const weights_view *v) {
    int32_t experts, top_k;
    HD_TRY(weights_int_or(v, experts_key, 0, s->route.n_experts, 0, &experts));
    if (experts) s->draft_experts = experts;
    HD_TRY(weights_int_or(v, top_k_key, 0, s->draft_experts, 0, &top_k));
    if (top_k) s->draft_top_k = top_k;
    if (s->draft_top_k <= s->draft_experts) return HD_OK;
    return weights_refuse(v, HD_EFORMAT, experts_key, weights_find(v, experts_key),
                          "fewer experts than a token chooses");
}

hd_status weights_config_dspark(hd_model_spec *s, const weights_view *v) {
    const int32_t stages = ratios_after(s, v);
    if (!is_given(v)) {
        const bool has_mtp = s->family == HD_FAMILY_V4; /* V4.1 has no MTP layer */
        if (stages <= (has_mtp ? s->n_mtp : 0)) {
            if (!has_mtp) drop_drafter(s);
            return HD_OK;
        }
        weights_notice(s,
                       "config.json: compress_ratios has %d drafter layers, which no "
                       "dspark_* key describes: nothing drafts",
                       stages);
        drop_drafter(s);
        return HD_OK;
    }
    hd_dspark_spec *d = &s->dspark;
    HD_TRY(weights_int(v, block_key, 1, HD_MAX_DRAFTS, &d->block));
    HD_TRY(weights_int(v, filler_key, 0, s->vocab - 1, &d->filler));
    HD_TRY(weights_int(v, rank_key, 1, 65536, &d->rank));
    HD_TRY(read_taps(s, v));
    s->n_mtp = stages ? stages : d->n_taps;
    s->drafter = HD_DRAFTER_DSPARK;
    d->side = s->family == HD_FAMILY_V41 ? HD_TAP_INPUT : HD_TAP_OUTPUT;
    return s->family == HD_FAMILY_V41 ? read_experts(s, v) : HD_OK;
}
