/* pieces.c - see pieces.h: requests for pieces of experts, checked; frames and key of both ends. */
#include "comm/pieces.h"

#include <string.h>

#include "base/checked.h"

static const uint32_t most_to_server[HD_N_PIECE_FRAMES] = {
    [HD_PIECE_JOIN] = HD_CHANNEL_NONCE, [HD_PIECE_ASK] = sizeof(hd_piece)};
static const uint32_t most_to_reader[HD_N_PIECE_FRAMES] = {
    [HD_PIECE_CHALLENGE] = HD_CHANNEL_NONCE, [HD_PIECE_BYTES] = HD_PIECE_MOST_BYTES};

hd_frame_limits hd_piece_limits(bool to_server) {
    return (hd_frame_limits){to_server ? most_to_server : most_to_reader, HD_N_PIECE_FRAMES};
}

/* Another key than that of the ranks' other connections: no frame of one is one of the others. */
void hd_piece_key(uint64_t key[2], const char *secret) {
    hd_channel_key(key, secret);
    key[0] ^= 0x7069656365730000; /* "pieces" */
}

hd_status hd_piece_check(hd_piece *out, const void **bytes, const void *payload,
                         uint32_t n_payload, const hd_piece_source *source, hd_err *err) {
    size_t all;
    if (n_payload != sizeof *out) {
        return HD_FAIL(err, HD_EFORMAT, "a request for a piece has %u bytes, not %zu",
                       n_payload, sizeof *out);
    }
    memcpy(out, payload, sizeof *out);
    if (!hd_is_within(out->layer, 0, source->n_layers - 1) ||
        !hd_is_within(out->expert, 0, source->n_experts - 1) ||
        !hd_is_within(out->array, 0, HD_PIECE_ARRAYS - 1)) {
        return HD_FAIL(err, HD_EFORMAT, "there is no array %d of expert %d in layer %d",
                       out->array, out->expert, out->layer);
    }
    const uint8_t *from = source->find(source->ctx, out->layer, out->expert, out->array, &all);
    if (!from) {
        return HD_FAIL(err, HD_EFORMAT, "there is no array %d of expert %d in layer %d",
                       out->array, out->expert, out->layer);
    }
    if (out->n == 0 || out->n > HD_PIECE_MOST_BYTES || out->at > all ||
        out->n > all - out->at) {
        return HD_FAIL(err, HD_EFORMAT, "%u bytes from %llu on of an array of %zu", out->n,
                       (unsigned long long)out->at, all);
    }
    *bytes = from + out->at;
    return HD_OK;
}
