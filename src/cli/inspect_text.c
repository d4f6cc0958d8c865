/* inspect_text.c - `hadal inspect` for people: one screen, aligned. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/terminal.h"
#include "cli/inspect_internal.h"

enum { LABEL = 14, PART = 24, NUMBER = 20, SHOWN = 10 };

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
    text out;
    hd_bytes_text(out.s, sizeof out.s, (double)bytes);
    return out;
}

static void label(const char *name) {
    printf("  %-*s", LABEL, name);
}

/* Foreign text: control characters could drive the terminal. */
static void put_safe(const char *s) {
    for (; *s; s++) {
        unsigned char b = (unsigned char)*s;
        if (b < 0x20 || b == 0x7f) {
            printf("\\x%02x", b);
        } else {
            putchar(b);
        }
    }
}

static void print_head(const inspection *in) {
    put_safe(in->path);
    if (in->checkpoint) {
        int32_t files = hd_checkpoint_shards(in->checkpoint);
        printf("\n%s: %s tensors in %s file%s, %s\n", in->spec->architecture,
               grouped(hd_checkpoint_count(in->checkpoint)).s, grouped(files).s,
               files == 1 ? "" : "s", sized(in->tensor_bytes).s);
    } else {
        printf("\n%s: from the config alone, in the formats it declares\n",
               in->spec->architecture);
    }
}

static void print_layers(const inspection *in) {
    const hd_model_spec *s = in->spec;
    const char *separator = "";
    label("layers");
    printf("%d: ", s->n_layers);
    for (int k = HD_MLP_DENSE; k <= HD_MLP_MOE_HASH; k++) {
        static const char *const names[] = {"dense", "mixture of experts", "hash routed"};
        int32_t n = inspect_count_mlp(s, (hd_mlp)k);
        if (n == 0) continue;
        printf("%s%d %s", separator, n, names[k]);
        separator = ", ";
    }
    if (s->n_mtp > 0 && in->n_mtp == s->n_mtp) printf("; %d MTP", s->n_mtp);
    if (s->n_mtp > in->n_mtp) printf("; %d of %d MTP", in->n_mtp, s->n_mtp);
    putchar('\n');
}

static void print_attention(const hd_model_spec *s) {
    label("attention");
    const char *separator = "";
    for (int k = HD_ATTN_MLA; k <= HD_ATTN_HCA; k++) {
        static const char *const names[] = {"latent (MLA)", "latent, sparse", "window only",
                                            "window + chosen compressed (CSA)",
                                            "window + all compressed (HCA)"};
        int32_t n = inspect_count_attention(s, (hd_attention)k);
        if (n == 0) continue;
        printf("%s%d %s", separator, n, names[k]);
        separator = ", ";
    }
    putchar('\n');
    label("heads");
    if (s->family == HD_FAMILY_V4) {
        printf("%d of %d (%d rotary); query rank %s; output %d groups of rank %s\n", s->n_heads,
               s->head_dim, s->rope_dim, grouped(s->q_rank).s, s->o_groups,
               grouped(s->o_rank).s);
        label("window");
        printf("%s tokens", grouped(s->window).s);
        if (s->csa_ratio > 0) printf("; CSA 1 entry per %d", s->csa_ratio);
        if (s->hca_ratio > 0) printf("; HCA 1 entry per %d", s->hca_ratio);
        putchar('\n');
    } else {
        printf("%d of %d + %d rotary, values %d; latent %d + %d; query rank ", s->n_heads,
               s->nope_dim, s->rope_dim, s->v_dim, s->kv_rank, s->rope_dim);
        puts(s->q_rank ? grouped(s->q_rank).s : "full");
    }
    if (s->index_heads == 0) return;
    label("indexer");
    printf("%d heads of %d, best %s\n", s->index_heads, s->index_dim, grouped(s->index_topk).s);
}

static void print_experts(const hd_model_spec *s) {
    const hd_route_rule *r = &s->route;
    label("experts");
    printf("%d routed, %d per token", r->n_experts, r->top_k);
    if (r->n_groups > 1) printf(" from %d of %d groups", r->top_groups, r->n_groups);
    printf(", %d shared; width %s\n", s->n_shared, grouped(s->moe_inter).s);
    if (inspect_count_mlp(s, HD_MLP_DENSE) > 0) {
        label("dense width");
        puts(grouped(s->dense_inter).s);
    }
    if (s->hc_mult == 0) return;
    label("streams");
    printf("%d hyper-connected, %d Sinkhorn rounds\n", s->hc_mult, s->hc_sinkhorn_iters);
}

static void print_declared(const hd_model_spec *s) {
    const hd_quant_spec *q = &s->quant;
    label("declared");
    if (q->method == HD_QUANT_NONE) {
        printf("%s, not quantized\n", hd_dtype_name(s->dtype));
        return;
    }
    printf("%s", inspect_quant_name(q->method));
    if (q->block_rows > 0) printf(", blocks of %d x %d", q->block_rows, q->block_cols);
    if (q->scale_ue8m0) printf(", scales powers of two");
    if (q->experts == HD_EXPERTS_FP4) printf(", experts FP4");
    if (q->experts == HD_EXPERTS_NVFP4) printf(", experts NVFP4");
    printf("; the rest %s\n", hd_dtype_name(s->dtype));
}

static void print_model(const inspection *in) {
    const hd_model_spec *s = in->spec;
    puts("\nmodel");
    label("family");
    puts(hd_family_name(s->family));
    print_layers(in);
    label("hidden");
    puts(grouped(s->hidden).s);
    label("vocabulary");
    printf("%s%s\n", grouped(s->vocab).s, s->tied_embeddings ? ", head tied to it" : "");
    label("context");
    puts(grouped(s->max_positions).s);
    print_attention(s);
    print_experts(s);
    print_declared(s);
}

/* "F8_E4M3 3.21 GB, F32 0.78 MB", the largest first. */
static void print_formats(const hd_part_sum *p) {
    bool done[HD_N_DTYPES] = {false};
    const char *separator = "  ";
    for (;;) {
        int best = -1;
        for (int t = 0; t < HD_N_DTYPES; t++) {
            if (done[t] || p->bytes_by_type[t] == 0) continue;
            if (best < 0 || p->bytes_by_type[t] > p->bytes_by_type[best]) best = t;
        }
        if (best < 0) break;
        done[best] = true;
        printf("%s%s %s", separator, hd_dtype_name((hd_dtype)best),
               sized(p->bytes_by_type[best]).s);
        separator = ", ";
    }
    putchar('\n');
}

static void print_sum(const char *name, const hd_part_sum *p) {
    printf("  %-*s%*s%*s%*s", PART, name, NUMBER, grouped(p->params).s, NUMBER,
           grouped(p->active).s, NUMBER, grouped(p->bytes).s);
    print_formats(p);
}

static void print_parts(const hd_part_sum *parts) {
    for (int p = 0; p < HD_N_PARTS; p++) {
        if (parts[p].bytes > 0) print_sum(hd_part_name((hd_part)p), &parts[p]);
    }
}

static void print_weights(const inspection *in) {
    printf("\n%-*s%*s%*s%*s  formats\n", PART + 2, "weights", NUMBER, "parameters", NUMBER,
           "active per token", NUMBER, "bytes");
    print_parts(in->summary.main);
    const hd_part_sum main = hd_summary_main(&in->summary);
    print_sum("total", &main);
    const hd_part_sum mtp = hd_summary_mtp(&in->summary);
    if (mtp.bytes == 0) return;
    printf("\n%s\n", "MTP layers");
    print_parts(in->summary.mtp);
    print_sum("total", &mtp);
}

static void print_missing(const inspection *in) {
    if (in->n_missing == 0) return;
    int32_t shown = 0;
    printf("\nmissing: %s tensor%s\n", grouped(in->n_missing).s, in->n_missing == 1 ? "" : "s");
    for (int32_t i = 0; i < in->schema->n && shown < SHOWN; i++) {
        if (!hd_weights_missing(in->weights, i)) continue;
        printf("  %s\n", in->schema->decls[i].name);
        shown++;
    }
    if (in->n_missing > shown) printf("  and %s more\n", grouped(in->n_missing - shown).s);
}

static void print_unknown(const inspection *in) {
    if (in->n_unknown == 0) return;
    int32_t shown = 0, decl;
    printf("\nunknown: %s tensor%s, not read\n", grouped(in->n_unknown).s,
           in->n_unknown == 1 ? "" : "s");
    for (int32_t i = 0; i < hd_checkpoint_count(in->checkpoint) && shown < SHOWN; i++) {
        if (hd_weights_use(in->weights, i, &decl) != HD_USE_UNKNOWN) continue;
        printf("  %s\n", hd_checkpoint_at(in->checkpoint, i)->name);
        shown++;
    }
    if (in->n_unknown > shown) printf("  and %s more\n", grouped(in->n_unknown - shown).s);
}

static void print_notices(const inspection *in) {
    const hd_checkpoint *c = in->checkpoint;
    bool left_out = in->n_mtp < in->spec->n_mtp;
    int32_t n = in->spec->n_notices + (c ? hd_checkpoint_notices(c) : 0);
    if (n == 0 && !left_out && in->n_ignored == 0) return;
    puts("\nnotices");
    for (int32_t i = 0; i < in->spec->n_notices; i++) {
        fputs("  ", stdout);
        put_safe(in->spec->notices[i]);
        putchar('\n');
    }
    for (int32_t i = 0; c && i < hd_checkpoint_notices(c); i++) {
        printf("  %s\n", hd_checkpoint_notice(c, i));
    }
    if (left_out) {
        printf("  the config declares %d MTP layer%s, the files hold %d\n", in->spec->n_mtp,
               in->spec->n_mtp == 1 ? "" : "s", in->n_mtp);
    }
    if (in->n_ignored > 0) {
        printf("  %s tensors are known and not needed\n", grouped(in->n_ignored).s);
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

static void print_tensors(const inspection *in) {
    int width = 6;
    int32_t n = inspect_n_rows(in);
    for (int32_t i = 0; i < n; i++) {
        int len = (int)strlen(inspect_row_at(in, i).name);
        if (len > width && len <= 80) width = len;
    }
    printf("\n%-*s  %-8s  %-16s  %16s  %-16s  %s\n", width, "tensor", "dtype", "shape", "bytes",
           "role", in->checkpoint ? "file" : "");
    for (int32_t i = 0; i < n; i++) {
        const inspect_row row = inspect_row_at(in, i);
        printf("%-*s  %-8s  %-16s  %16s  %-16s  %s\n", width, row.name, row.dtype,
               shape_of(&row).s, grouped(row.bytes).s, row.role, row.file);
    }
}

void inspect_print_text(const inspection *in, bool tensors) {
    print_head(in);
    print_model(in);
    print_weights(in);
    if (in->weights) {
        print_missing(in);
        print_unknown(in);
    }
    print_notices(in);
    if (tensors) print_tensors(in);
}
