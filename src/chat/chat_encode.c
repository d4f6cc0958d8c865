/* chat_encode.c - encodes a rendered prompt as token ids. Earlier answers get the tokens
 * that the model generated, if known, so that the prefix cache matches. */
#include <stdlib.h>

#include "chat/chat.h"

/* Encodes text[begin, end) of the prompt. cut must hold all its spans. */
static hd_status encode_stretch(const hd_chat_prompt *p, size_t begin, size_t end,
                                hd_text_span *cut, const hd_tokenizer *t, hd_ids *out,
                                hd_err *err) {
    size_t n = 0;
    for (int32_t i = 0; i < p->n_spans; i++) {
        const hd_text_span *s = &p->spans[i];
        const size_t from = s->start > begin ? s->start : begin;
        const size_t to = s->start + s->n < end ? s->start + s->n : end;
        if (from >= to) continue;
        cut[n++] = (hd_text_span){from - begin, to - from, s->is_control};
    }
    if (n == 0) return HD_OK;
    return hd_tokenizer_encode_spans(t, p->text + begin, end - begin, cut, n, out, err);
}

hd_status hd_chat_encode(const hd_chat_prompt *p, const hd_tokenizer *t, hd_ids *out,
                         hd_err *err) {
    hd_text_span *cut = calloc((size_t)p->n_spans + 1, sizeof *cut);
    if (!cut) return HD_FAIL(err, HD_ENOMEM, "no memory for a prompt of %zu bytes", p->n);
    size_t begin = 0;
    hd_status st = HD_OK;
    for (int32_t i = 0; i < p->n_blocks && st == HD_OK; i++) {
        const hd_chat_block *b = &p->blocks[i];
        if (b->tokens.n == 0) continue;
        st = encode_stretch(p, begin, b->begin, cut, t, out, err);
        if (st == HD_OK) st = hd_ids_append(out, b->tokens.ids, b->tokens.n, err);
        begin = b->end;
    }
    if (st == HD_OK) st = encode_stretch(p, begin, p->n, cut, t, out, err);
    free(cut);
    return st;
}
