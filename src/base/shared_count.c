/* shared_count.c - see shared_count.h. */
#include "base/shared_count.h"

#include <fcntl.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Other processes count at the same time. */
#define COUNT_DOWN(type)                                                                    \
    static int64_t count_down_##type(type *count) {                                         \
        type now = __atomic_load_n(count, __ATOMIC_ACQUIRE);                                \
        while (now > 0 && !__atomic_compare_exchange_n(count, &now, now - 1, false,         \
                                                       __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) \
            continue;                                                                       \
        return now > 0 ? now - 1 : -1;                                                      \
    }
COUNT_DOWN(int32_t)
COUNT_DOWN(int64_t)

static int64_t count_down_in(int fd, size_t at, int32_t width) {
    struct stat info;
    const size_t end = at + (size_t)width;
    if (fstat(fd, &info) != 0 || info.st_uid != geteuid() || at % (size_t)width != 0 ||
        end < at || (uint64_t)info.st_size < end) {
        return -1;
    }
    uint8_t *p = mmap(NULL, end, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) return -1;
    void *count = p + at;
    const int64_t left = width == 4 ? count_down_int32_t(count) : count_down_int64_t(count);
    munmap(p, end);
    return left;
}

int64_t hd_shared_count_down(const char *name, size_t at, int32_t width) {
    const int fd = shm_open(name, O_RDWR | O_NOFOLLOW, 0);
    if (fd < 0) return -1;
    const int64_t left = count_down_in(fd, at, width);
    close(fd);
    return left;
}
