/* inspect_text.c - text output of `hadal inspect`: one screen, aligned. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/terminal.h"
#include "cli/inspect/inspect_internal.h"
#include "cli/terminal/screen.h"

enum { LABEL = 14, PART = 24, NARROW = 100, SHOWN = 10, WRAPPED = 6 };

typedef struct text {
    char s[96];
} text;

/* 1234567 as 1,234,567. */
static text grouped(int64_t v) {
    text plain, out = {""};
    int n = snprintf(plain.s, sizeof plain.s, "%" PRId64, v), used = 0;
    for (int i = 0; i < n; i++) {
        if (i > 0 && (n - i) % 3 == 0 && plain.s[i - 1] != '-') out.s[used++] = ',';
        out.s[used++] = plain.s[i];
    }
    out.s[used] = '\0';
    return out;
}

/* 1234567 as 1.23 MB. */
static text sized(int64_t bytes) {
    text out = {0};
    hd_bytes_text(out.s, sizeof out.s, (double)bytes);
    return out;
}

/* Formats are then printed below the numbers, not beside them. */
static bool is_narrow(const screen *out) {
    return out->width && out->width < NARROW;
}

static int number_width(const screen *out) {
    return is_narrow(out) ? 17 : 20;
}

static void label(screen *out, const char *name) {
    screen_print(out, "  %-*s", LABEL, name);
}

/* Text of the file: control characters could change the terminal. */
static void put_safe(screen *out, const char *s) {
    for (; *s; s++) {
        unsigned char b = (unsigned char)*s;
        if (b < 0x20 || b == 0x7f) {
            screen_print(out, "\\x%02x", b);
        } else {
            screen_print(out, "%c", b);
        }
    }
}

static void print_head(screen *out, const inspection *in) {
    put_safe(out, in->path);
    if (in->checkpoint) {
        int32_t files = hd_checkpoint_shards(in->checkpoint);
        screen_print(out, "\n%s: %s tensors in %s file%s, %s\n", in->spec->architecture,
                     grouped(hd_checkpoint_count(in->checkpoint)).s, grouped(files).s,
                     files == 1 ? "" : "s", sized(in->tensor_bytes).s);
    } else {
        screen_print(out, "\n%s: from the config alone, in the formats it declares\n",
                     in->spec->architecture);
    }
}

static void print_layers(screen *out, const inspection *in) {
    const hd_model_spec *s = in->spec;
    const char *separator = "";
    label(out, "layers");
    screen_print(out, "%d: ", s->n_layers);
    for (int k = HD_MLP_DENSE; k <= HD_MLP_MOE_HASH; k++) {
        static const char *const names[] = {"dense", "mixture of experts", "hash routed"};
        int32_t n = inspect_count_mlp(s, (hd_mlp)k);
        if (n == 0) continue;
        screen_print(out, "%s%d %s", separator, n, names[k]);
        separator = ", ";
    }
    const char *drafter = s->drafter == HD_DRAFTER_DSPARK ? "DSpark" : "MTP";
    if (s->n_mtp > 0 && in->n_mtp == s->n_mtp) {
        screen_print(out, "; %d %s", s->n_mtp, drafter);
    }
    if (s->n_mtp > in->n_mtp) {
        screen_print(out, "; %d of %d %s", in->n_mtp, s->n_mtp, drafter);
    }
    screen_print(out, "\n");
}

static void print_attention(screen *out, const hd_model_spec *s) {
    label(out, "attention");
    const char *separator = "";
    for (int k = 0; k < HD_N_ATTENTION_KINDS; k++) {
        int32_t n = inspect_count_attention(s, (hd_attention)k);
        if (n == 0) continue;
        screen_print(out, "%s%d %s", separator, n, hd_attention_description((hd_attention)k));
        separator = ", ";
    }
    screen_print(out, "\n");
    label(out, "heads");
    if (hd_is_hybrid(s)) {
        screen_print(out, "%d of %d (%d rotary); query rank %s; output %d groups of rank %s\n",
                     s->n_heads, s->head_dim, s->rope_dim, grouped(s->q_rank).s, s->o_groups,
                     grouped(s->o_rank).s);
        label(out, "window");
        screen_print(out, "%s tokens", grouped(s->window).s);
        if (s->csa_ratio > 0) screen_print(out, "; CSA 1 entry per %d", s->csa_ratio);
        if (s->hca_ratio > 0) screen_print(out, "; HCA 1 entry per %d", s->hca_ratio);
        screen_print(out, "\n");
    } else {
        screen_print(out, "%d of %d + %d rotary, values %d; latent %d + %d; query rank ",
                     s->n_heads, s->nope_dim, s->rope_dim, s->v_dim, s->kv_rank, s->rope_dim);
        screen_print(out, "%s\n", s->q_rank ? grouped(s->q_rank).s : "full");
    }
    if (s->index_heads == 0) return;
    label(out, "indexer");
    screen_print(out, "%d heads of %d, best %s\n", s->index_heads, s->index_dim,
                 grouped(s->index_topk).s);
}

static void print_experts(screen *out, const hd_model_spec *s) {
    const hd_router_rule *r = &s->route;
    label(out, "experts");
    screen_print(out, "%d routed, %d per token", r->n_experts, r->top_k);
    if (r->n_groups > 1) screen_print(out, " from %d of %d groups", r->top_groups, r->n_groups);
    screen_print(out, ", %d shared; width %s\n", s->n_shared, grouped(s->moe_inter).s);
    if (inspect_count_mlp(s, HD_MLP_DENSE) > 0) {
        label(out, "dense width");
        screen_print(out, "%s\n", grouped(s->dense_inter).s);
    }
    if (s->hc_mult == 0) return;
    label(out, "streams");
    screen_print(out, "%d hyper-connected, %d Sinkhorn rounds\n", s->hc_mult,
                 s->hc_sinkhorn_iters);
}

static void print_declared(screen *out, const hd_model_spec *s) {
    const hd_quant_spec *q = &s->quant;
    label(out, "declared");
    if (q->method == HD_QUANT_NONE) {
        screen_print(out, "%s, not quantized\n", hd_dtype_name(s->dtype));
        return;
    }
    screen_print(out, "%s", inspect_quant_name(q->method));
    if (q->block_rows > 0)
        screen_print(out, ", blocks of %d x %d", q->block_rows, q->block_cols);
    if (q->scale_ue8m0) screen_print(out, ", scales powers of two");
    if (q->experts != HD_FORMAT_NONE)
        screen_print(out, ", experts %s", hd_formats[q->experts].name);
    screen_print(out, "; the rest %s\n", hd_dtype_name(s->dtype));
}

static void print_model(screen *out, const inspection *in) {
    const hd_model_spec *s = in->spec;
    screen_print(out, "\nmodel\n");
    label(out, "family");
    screen_print(out, "%s\n", hd_family_name(s->family));
    print_layers(out, in);
    label(out, "hidden");
    screen_print(out, "%s\n", grouped(s->hidden).s);
    label(out, "vocabulary");
    screen_print(out, "%s%s\n", grouped(s->vocab).s,
                 s->tied_embeddings ? ", head tied to it" : "");
    label(out, "context");
    screen_print(out, "%s\n", grouped(s->max_positions).s);
    print_attention(out, s);
    print_experts(out, s);
    print_declared(out, s);
}

/* "F8_E4M3 3.21 GB, F32 0.78 MB", the largest first. */
static void print_formats(screen *out, const hd_param_group_sum *p) {
    bool done[HD_N_DTYPES] = {false};
    const char *separator = is_narrow(out) ? "\n      " : "  ";
    for (;;) {
        int best = -1;
        for (int t = 0; t < HD_N_DTYPES; t++) {
            if (done[t] || p->bytes_by_type[t] == 0) continue;
            if (best < 0 || p->bytes_by_type[t] > p->bytes_by_type[best]) best = t;
        }
        if (best < 0) break;
        done[best] = true;
        char pair[128];
        snprintf(pair, sizeof pair, "%s %s", hd_dtype_name((hd_dtype)best),
                 sized(p->bytes_by_type[best]).s);
        screen_print(out, "%s", separator);
        screen_word(out, pair);
        separator = ", ";
    }
    screen_print(out, "\n");
}

static void print_sum(screen *out, const char *name, const hd_param_group_sum *p) {
    const int number = number_width(out);
    screen_print(out, "  %-*s%*s%*s%*s", PART, name, number, grouped(p->params).s, number,
                 grouped(p->active).s, number, grouped(p->bytes).s);
    print_formats(out, p);
}

static void print_parts(screen *out, const hd_param_group_sum *parts) {
    for (int p = 0; p < HD_N_PARAM_GROUPS; p++) {
        if (parts[p].bytes > 0)
            print_sum(out, hd_param_group_name((hd_param_group)p), &parts[p]);
    }
}

static void print_weights(screen *out, const inspection *in) {
    const int number = number_width(out);
    screen_print(out, "\n%-*s%*s%*s%*s%s\n", PART + 2, "weights", number, "parameters", number,
                 "active per token", number, "bytes", is_narrow(out) ? "" : "  formats");
    print_parts(out, in->summary.main);
    const hd_param_group_sum main = hd_summary_main(&in->summary);
    print_sum(out, "total", &main);
    const hd_param_group_sum mtp = hd_summary_mtp(&in->summary);
    if (mtp.bytes == 0) return;
    screen_print(out, "\n%s\n",
                 in->spec->drafter == HD_DRAFTER_DSPARK ? "DSpark stages" : "MTP layers");
    print_parts(out, in->summary.mtp);
    print_sum(out, "total", &mtp);
}

static void print_elsewhere(screen *out, const inspection *in) {
    const inspect_elsewhere e = inspect_count_elsewhere(in);
    if (!e.experts) return;
    screen_print(out,
                 "\nelsewhere: %s experts of %s each may lie on disk or in host memory "
                 "(--experts-disk, --experts-host), %s together; not the other %s\n",
                 grouped(e.experts).s, sized(e.bytes / e.experts).s, sized(e.bytes).s,
                 sized(e.rest).s);
}

static void print_missing(screen *out, const inspection *in) {
    if (in->n_missing == 0) return;
    int32_t shown = 0;
    screen_print(out, "\nmissing: %s tensor%s\n", grouped(in->n_missing).s,
                 in->n_missing == 1 ? "" : "s");
    for (int32_t i = 0; i < in->schema->n && shown < SHOWN; i++) {
        if (!hd_weights_missing(in->weights, i)) continue;
        screen_print(out, "  %s\n", in->schema->decls[i].name);
        shown++;
    }
    if (in->n_missing > shown)
        screen_print(out, "  and %s more\n", grouped(in->n_missing - shown).s);
}

static void print_unknown(screen *out, const inspection *in) {
    if (in->n_unknown == 0) return;
    int32_t shown = 0, decl;
    screen_print(out, "\nunknown: %s tensor%s, not read\n", grouped(in->n_unknown).s,
                 in->n_unknown == 1 ? "" : "s");
    for (int32_t i = 0; i < hd_checkpoint_count(in->checkpoint) && shown < SHOWN; i++) {
        if (hd_weights_use(in->weights, i, &decl) != HD_USE_UNKNOWN) continue;
        screen_print(out, "  %s\n", hd_checkpoint_at(in->checkpoint, i)->name);
        shown++;
    }
    if (in->n_unknown > shown)
        screen_print(out, "  and %s more\n", grouped(in->n_unknown - shown).s);
}

static void print_notices(screen *out, const inspection *in) {
    const hd_checkpoint *c = in->checkpoint;
    bool left_out = in->n_mtp < in->spec->n_mtp;
    int32_t n = in->spec->n_notices + (c ? hd_checkpoint_notices(c) : 0);
    if (n == 0 && !left_out && in->n_ignored == 0) return;
    screen_print(out, "\nnotices\n");
    for (int32_t i = 0; i < in->spec->n_notices; i++) {
        screen_print(out, "  ");
        put_safe(out, in->spec->notices[i]);
        screen_print(out, "\n");
    }
    for (int32_t i = 0; c && i < hd_checkpoint_notices(c); i++) {
        screen_print(out, "  %s\n", hd_checkpoint_notice(c, i));
    }
    if (left_out) {
        screen_print(out, "  the config declares %d drafter layer%s, the files hold %d\n",
                     in->spec->n_mtp, in->spec->n_mtp == 1 ? "" : "s", in->n_mtp);
    }
    if (in->n_ignored > 0) {
        screen_print(out, "  %s tensors are known and not needed\n", grouped(in->n_ignored).s);
    }
}

static text shape_of(const inspect_row *row) {
    text out = {"["};
    for (int32_t i = 0; i < row->rank; i++) {
        size_t used = strlen(out.s);
        snprintf(out.s + used, sizeof out.s - used, "%s%" PRId64, i ? ", " : "", row->shape[i]);
    }
    size_t used = strlen(out.s);
    snprintf(out.s + used, sizeof out.s - used, "]");
    return out;
}

static void print_tensors(screen *out, const inspection *in) {
    int width = 6;
    int32_t n = inspect_n_rows(in);
    for (int32_t i = 0; i < n; i++) {
        int len = (int)strlen(inspect_row_at(in, i).name);
        if (len > width && len <= 80) width = len;
    }
    screen_print(out, "\n%-*s  %-8s  %-16s  %16s  %-16s  %s\n", width, "tensor", "dtype",
                 "shape", "bytes", "role", in->checkpoint ? "file" : "");
    for (int32_t i = 0; i < n; i++) {
        const inspect_row row = inspect_row_at(in, i);
        screen_print(out, "%-*s  %-8s  %-16s  %16s  %-16s  %s\n", width, row.name, row.dtype,
                     shape_of(&row).s, grouped(row.bytes).s, row.role, row.file);
    }
}

void inspect_print_text(const inspection *in, bool tensors) {
    screen terminal, *out = &terminal;
    screen_open(out, stdout);
    print_head(out, in);
    out->indent = LABEL + 2;
    print_model(out, in);
    out->indent = WRAPPED;
    print_weights(out, in);
    print_elsewhere(out, in);
    if (in->weights) {
        print_missing(out, in);
        print_unknown(out, in);
    }
    print_notices(out, in);
    if (tensors) print_tensors(out, in);
    screen_end(out);
}
