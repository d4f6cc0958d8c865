/* fuzz_handover.c - any bytes as a page message of kv/handover.h, as they are and with a head
 * that is right but for what the first byte says. The cache stays whole, and a page enters it
 * only with its digest. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kv/handover.h"

enum { PAGES = 2, TOKENS = 64 * PAGES + 1, MAX_INPUT = 1 << 16 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static hd_layer_spec layers[] = {{.attention = HD_ATTN_MLA}};
static const hd_model_spec spec = {
    .family = HD_FAMILY_V3, .n_layers = 1, .kv_rank = 4, .rope_dim = 2, .layers = layers};
static int32_t tokens[TOKENS];

static void must(bool good) {
    if (!good) abort();
}

static hd_handover open_side(hd_device *device) {
    hd_handover h = {
        .page_tokens = hd_kv_shape_of(&spec).page_tokens, .tokens = tokens, .n_tokens = TOKENS};
    const hd_kv_options kv = {
        .n_pages = {PAGES, PAGES},
          .n_host = {PAGES, 0    }
    };
    const hd_cache_options cache = {
        .page_tokens = h.page_tokens,
        .n_pages = {PAGES, PAGES},
        .n_host = {PAGES, 0    },
        .max_seqs = 1,
        .seq_pages = PAGES
    };
    must(hd_stream_open(&h.stream, device, NULL) == HD_OK);
    must(hd_kv_open(&h.kv, &spec, 1, device, &kv, NULL) == HD_OK);
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        hd_kv_host_page(h.kv, (hd_kv_group)g, (hd_host_page){0}, &h.page_bytes[g]);
    }
    must(hd_cache_open(&h.cache, &cache, NULL) == HD_OK);
    return h;
}

/* Reports whether the message was taken. */
static bool take(const hd_handover *h, const uint8_t *message, size_t n) {
    const bool taken = hd_handover_import(h, message, n, NULL) == HD_OK;
    must(hd_cache_check(h->cache, true, NULL) == HD_OK);
    must(hd_cache_read_stats(h->cache).nodes == taken);
    return taken;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static hd_device *device;
    static hd_handover h;
    static uint8_t message[MAX_INPUT];
    if (!device) {
        must(hd_device_open_cpu(&device, &(hd_cpu_options){.n_threads = 1}, NULL) == HD_OK);
        h = open_side(device);
    }
    hd_cache_flush(h.cache);
    if (take(&h, data, n)) return 0;
    const size_t size = hd_handover_bytes(&h, HD_KV_FULL);
    hd_page_head head = {.group = HD_KV_FULL, .bytes = size - sizeof head};
    must(size <= sizeof message);
    if (n > 0 && data[0] & 1) head.page = data[0];
    if (n > 0 && data[0] & 2) head.bytes += data[0];
    memset(message, 0, size);
    memcpy(message, &head, sizeof head);
    if (n > size - sizeof head) n = size - sizeof head;
    memcpy(message + sizeof head, data, n);
    take(&h, message, size);
    return 0;
}
