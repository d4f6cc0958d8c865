/* fuzz_record.c - any bytes as an expert record: refused with a sentence, or read to its end, and
 * written again with the same bytes. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "moe/traffic.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool ok) {
    if (!ok) abort();
}

static FILE *open_bytes(const uint8_t *data, size_t size) {
    FILE *in = fmemopen((void *)(uintptr_t)data, size, "rb");
    check(in != NULL);
    return in;
}

/* Rows that were read are written with the bytes that they had. */
static void check_rows(const uint8_t *data, size_t size) {
    hd_record_reader r;
    hd_err err = {0};
    FILE *in = open_bytes(data, size);
    if (hd_record_open(&r, in, "it", &err) == HD_OK) {
        const size_t head = hd_record_head_bytes(&r.head), each = hd_record_row_bytes(&r.head);
        uint8_t *bytes = malloc(head > each ? head : each);
        check(bytes && head <= size);
        hd_record_head_write(&r.head, bytes);
        /* 44 to 47 are unused; a map may name no expert by numbers that no expert has */
        check(memcmp(bytes, data, 44) == 0 && memcmp(bytes + 48, data + 48, head - 48) == 0);
        while (hd_record_next(&r, &err) == HD_OK && !r.ended) {
            hd_record_row_write(&r.head, &r.row, bytes);
            check(memcmp(bytes, data + head + (r.n_read - 1) * each, each) == 0);
        }
        check(err.status == HD_OK || err.msg[0]);
        free(bytes);
    } else {
        check(err.msg[0] != '\0');
    }
    hd_record_close(&r);
    fclose(in);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    hd_traffic traffic;
    hd_record_head head;
    hd_err err = {0};
    bool cut;
    if (size == 0) return 0;
    check_rows(data, size);
    FILE *in = open_bytes(data, size);
    if (hd_traffic_read(&traffic, &head, &cut, in, "it", HD_TRAFFIC_STEPS, &err) == HD_OK) {
        hd_traffic_close(&traffic);
    } else {
        check(err.msg[0] != '\0');
    }
    free(head.slot_expert);
    fclose(in);
    return 0;
}
