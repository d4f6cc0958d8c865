/* fuzz_saved.c - any bytes as a saved conversation: refused, or its head, tokens and pages are right. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/checksum.h"
#include "kv/saved.h"

enum { PAGE = 4, BYTES = 16 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool good) {
    if (!good) abort();
}

static void read_pages(hd_saved_file *f, const hd_saved_head *head, const int32_t *tokens) {
    uint8_t message[sizeof(hd_page_head) + BYTES];
    const hd_handover side = {
        .page_tokens = PAGE,
        .page_bytes = {BYTES, BYTES},
        .salt = head->salt,
        .tokens = tokens,
        .n_tokens = (int32_t)head->n_tokens + 1
    };
    must(head->n_tokens == PAGE * head->n[HD_KV_FULL] && tokens[head->n_tokens] == 0);
    for (uint32_t i = 0; i < head->n[HD_KV_FULL] + head->n[HD_KV_WINDOW]; i++) {
        must(hd_saved_next(f, message, sizeof message, NULL) ==
             HD_OK); /* the length is right */
        (void)hd_handover_check(&side, message, sizeof message, NULL);
    }
    must(hd_saved_next(f, message, 1, NULL) == HD_EFORMAT);
}

/* The first byte says whether the head's constants and its checksum are made right, and its counts and
 * the length of the file. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    const hd_saved_head own = {
        .page_tokens = PAGE, .page_bytes = {BYTES, BYTES},
             .identity = "fuzz"
    };
    hd_saved_head head;
    hd_saved_file f;
    int32_t *tokens;
    const int fd = memfd_create("saved", MFD_CLOEXEC);
    if (fd < 0 || n < 1) {
        if (fd >= 0) close(fd);
        return 0;
    }
    must(write(fd, data + 1, n - 1) == (ssize_t)n - 1);
    if (data[0] & 1 && n - 1 >= sizeof head) {
        memcpy(&head, data + 1, sizeof head);
        memcpy(head.magic, "hadalKV", sizeof head.magic);
        head.version = 1;
        head.page_tokens = PAGE;
        memcpy(head.page_bytes, own.page_bytes, sizeof own.page_bytes);
        memcpy(head.identity, own.identity, sizeof own.identity);
        if (data[0] & 2) {
            head.n[HD_KV_FULL] = 1 + head.n[HD_KV_FULL] % 3;
            head.n[HD_KV_WINDOW] %= head.n[HD_KV_FULL] + 1;
            head.n_tokens = PAGE * head.n[HD_KV_FULL];
            const uint32_t pages = head.n[HD_KV_FULL] + head.n[HD_KV_WINDOW];
            const size_t bytes = sizeof head + head.n_tokens * sizeof(int32_t) +
                                 pages * (sizeof(hd_page_head) + BYTES);
            must(ftruncate(fd, (off_t)bytes) == 0);
        }
        const size_t rest = n - 1 - sizeof head, m = (size_t)head.n_tokens * sizeof(int32_t);
        head.check = hd_checksum(0, &head, offsetof(hd_saved_head, check));
        head.check = hd_checksum(head.check, data + 1 + sizeof head, m < rest ? m : rest);
        must(pwrite(fd, &head, sizeof head, 0) == (ssize_t)sizeof head);
    }
    must(lseek(fd, 0, SEEK_SET) == 0);
    if (hd_saved_take(&f, fd, &own, &head, &tokens, NULL) != HD_OK) return 0;
    read_pages(&f, &head, tokens);
    hd_saved_end(&f);
    free(tokens);
    return 0;
}
