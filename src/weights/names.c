/* names.c - finds a tensor under the different names it has in files.
 *
 * The schema has the names of the releases. Models that the Hugging Face library made or
 * saved have others. V4's are the library's own (models.md 3.6) or, from its
 * save_pretrained, a mixture of both. Experts may be stacked in one tensor per layer, and a
 * prefix may be missing. A spelling is a list of replacements, applied in order. */
#include <stdio.h>
#include <string.h>

#include "weights/bind_internal.h"

enum { MAX_NAME = 160 };

/* "^" in front: only at the beginning of the name. */
typedef struct replacement {
    const char *ours, *theirs;
} replacement;

/* The library's names of V4's tensors. */
static const replacement library_v4[] = {
    {"^head.",                     "lm_head."                                    },
    {"^embed.",                    "model.embed_tokens."                         },
    {"^norm.",                     "model.norm."                                 },
    {"^hc_head_",                  "model.hc_head.hc_"                           },
    {"^layers.",                   "model.layers."                               },
    {".attn_norm.",                ".input_layernorm."                           },
    {".ffn_norm.",                 ".post_attention_layernorm."                  },
    {".hc_attn_",                  ".attn_hc."                                   },
    {".hc_ffn_",                   ".ffn_hc."                                    },
    {".attn.attn_sink",            ".attn.sinks"                                 },
    {".attn.q_norm.",              ".attn.q_a_norm."                             },
    {".compressor.norm.",          ".compressor.kv_norm."                        },
    {".attn.indexer.compressor.",  ".attn.compressor.indexer."                   },
    {".attn.indexer.wq_b.",        ".attn.compressor.indexer.q_b_proj."          },
    {".attn.indexer.weights_proj", ".attn.compressor.indexer.scorer.weights_proj"},
    {".ape",                       ".position_bias"                              },
    {".wq_a.",                     ".q_a_proj."                                  },
    {".wq_b.",                     ".q_b_proj."                                  },
    {".wkv.",                      ".kv_proj."                                   },
    {".wgate.",                    ".gate_proj."                                 },
    {".wo_a.",                     ".o_a_proj."                                  },
    {".wo_b.",                     ".o_b_proj."                                  },
    {".attn.",                     ".self_attn."                                 },
    {".gate.bias",                 ".gate.e_score_correction_bias"               },
    {".ffn.",                      ".mlp."                                       },
    {".w1.",                       ".gate_proj."                                 },
    {".w2.",                       ".down_proj."                                 },
    {".w3.",                       ".up_proj."                                   },
};

/* The names that save_pretrained writes: it does not reverse the above exactly. */
static const replacement saved_v4[] = {
    {"^embed.",        "model.embed_tokens."},
    {"^norm.",         "model.norm."        },
    {"^hc_head_",      "model.hc_head.hc_"  },
    {"^layers.",       "model.layers."      },
    {".attn.kv_norm.", ".attn.norm."        },
};

/* V2, V3 and V3.2 use the library's names; a bare model has no prefix. */
static const replacement bare[] = {
    {"^model.", ""},
};

typedef struct spelling {
    const replacement *list;
    size_t n;
} spelling;

static const spelling of_v4[] = {
    {library_v4, HD_LEN(library_v4)},
    {saved_v4,   HD_LEN(saved_v4)  },
};
static const spelling of_mla[] = {
    {bare, HD_LEN(bare)},
};

static void replace(char *name, const replacement *r) {
    const bool first = r->ours[0] == '^';
    const char *ours = r->ours + first;
    const size_t n = strlen(ours), m = strlen(r->theirs);
    char *at = strstr(name, ours);
    if (!at || (first && at != name) || strlen(name) - n + m >= MAX_NAME) return;
    memmove(at + m, at + n, strlen(at + n) + 1);
    memcpy(at, r->theirs, m);
}

/* ".experts.7.gate_proj.weight" to ".experts.gate_up_proj"; up likewise, down alone. */
static const hd_tensor *find_stacked(const hd_checkpoint *c, const hd_tensor_decl *d,
                                     char *name) {
    static const char word[] = ".experts.";
    char *end = strstr(name, word);
    if (d->expert < 0 || !end) return NULL;
    snprintf(end + strlen(word), MAX_NAME - (size_t)(end - name) - strlen(word), "%s",
             d->role == HD_EXPERT_DOWN ? "down_proj" : "gate_up_proj");
    return hd_checkpoint_find(c, name);
}

const hd_tensor *weights_find_tensor(const hd_checkpoint *c, const hd_model_spec *spec,
                                     const hd_tensor_decl *d) {
    const bool v4 = hd_is_hybrid(spec);
    const spelling *others = v4 ? of_v4 : of_mla;
    const size_t n = v4 ? HD_LEN(of_v4) : HD_LEN(of_mla);
    char name[MAX_NAME];
    const hd_tensor *t = hd_checkpoint_find(c, d->name);
    for (size_t i = 0; i <= n && !t; i++) {
        snprintf(name, sizeof name, "%s", d->name);
        for (size_t k = 0; i > 0 && k < others[i - 1].n; k++) {
            replace(name, &others[i - 1].list[k]);
        }
        if (i > 0) t = hd_checkpoint_find(c, name);
        if (!t) t = find_stacked(c, d, name);
    }
    return t;
}
