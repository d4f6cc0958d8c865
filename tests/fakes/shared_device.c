/* shared_device.c - see shared_device.h. */
#include "fakes/shared_device.h"

#include <string.h>

#include "device/device_internal.h"

/* Embeds no device: the CPU's own has this table in place of its own. One at a time. */
static backend_table table;
static const backend_table *cpu;
static uint8_t blocks[2][SHARED_BLOCK_BYTES];
static int32_t n_opened, n_copies, n_waits;
static bool is_full;
static struct {
    const uint8_t *at;
    size_t bytes;
} pins[SHARED_MAX_PINS];
static int32_t n_pins;
static size_t may_pin, n_free;

uint8_t shared_device_byte(char handle, size_t i) {
    return (uint8_t)(i * 7 + i / 256 + (size_t)handle);
}

static hd_status alloc(hd_device *d, void **out, size_t bytes, bool on_host, const char *what,
                       hd_err *err) {
    if (is_full) return HD_FAIL(err, HD_ENOMEM, "%s: full", what);
    return cpu->alloc(d, out, bytes, on_host, what, err);
}

/* Its operators are a CPU's. */
static hd_status read_host(hd_device *d, const void *host, size_t bytes, hd_err *err) {
    (void)d, (void)host, (void)bytes, (void)err;
    return HD_OK;
}

static hd_status pin_host(hd_device *d, const void *host, size_t bytes, hd_err *err) {
    (void)d;
    if (bytes > may_pin || n_pins == SHARED_MAX_PINS) {
        return HD_FAIL(err, HD_EDEVICE, "pinning: out of memory");
    }
    may_pin -= bytes;
    pins[n_pins].at = host;
    pins[n_pins++].bytes = bytes;
    return HD_OK;
}

static hd_status open_shared(hd_device *d, const void **out, size_t *bytes,
                             const uint8_t *handle, hd_err *err) {
    (void)d;
    const int32_t which = handle[0] - 'A';
    for (size_t i = 1; i < HD_SHARED_HANDLE_BYTES; i++) {
        if (handle[i] != handle[0]) return HD_FAIL(err, HD_EFORMAT, "opens nothing here");
    }
    if (which < 0 || which > 1) return HD_FAIL(err, HD_EFORMAT, "opens nothing here");
    *out = blocks[which];
    *bytes = SHARED_BLOCK_BYTES;
    n_opened++;
    return HD_OK;
}

static void close_shared(hd_device *d, const void *p) {
    (void)d;
    (void)p;
    n_opened--;
}

static void wait_shared(hd_stream *s, const uint8_t *event) {
    (void)event;
    n_waits += s != NULL;
}

static void copy(hd_stream *s, void *to, const void *from, size_t bytes) {
    n_copies++;
    cpu->copy(s, to, from, bytes);
}

hd_device *shared_device_open(void) {
    hd_device *d;
    if (hd_device_open_cpu(&d, &(hd_cpu_options){.n_threads = 1}, NULL) != HD_OK) return NULL;
    cpu = d->table;
    table = *cpu;
    table.alloc = alloc;
    table.read_host = read_host;
    table.pin_host = pin_host;
    table.open_shared = open_shared;
    table.copy = copy;
    table.close_shared = close_shared;
    table.wait_shared = wait_shared;
    d->table = &table;
    n_opened = n_copies = n_waits = 0;
    n_pins = 0;
    may_pin = SIZE_MAX;
    is_full = false;
    for (size_t i = 0; i < SHARED_BLOCK_BYTES; i++) {
        blocks[0][i] = shared_device_byte('A', i);
        blocks[1][i] = shared_device_byte('B', i);
    }
    return d;
}

static size_t discard(hd_device *d, void *p) {
    (void)d;
    memset(p, 0xee, 64); /* less than any block has */
    return 64;
}

static hd_status restore(hd_device *d, void *p, hd_err *err) {
    (void)d;
    if (is_full) return HD_FAIL(err, HD_ENOMEM, "full");
    memset(p, 0, 64);
    return HD_OK;
}

void shared_device_set_remote(hd_device *d) {
    (void)d;
    table.host_memory = false;
    table.discard = discard;
    table.restore = restore;
}

void shared_device_fill(hd_device *d, bool full) {
    (void)d;
    is_full = full;
}

void shared_device_limit_pins(hd_device *d, size_t bytes) {
    (void)d;
    may_pin = bytes;
}

bool shared_device_has_pinned(const hd_device *d, const void *p, size_t bytes) {
    const uint8_t *at = p;
    (void)d;
    for (int32_t i = 0; i < n_pins; i++) {
        if (at >= pins[i].at && at + bytes <= pins[i].at + pins[i].bytes) return true;
    }
    return false;
}

int32_t shared_device_opened(const hd_device *d) {
    (void)d;
    return n_opened;
}

int32_t shared_device_copies(const hd_device *d) {
    (void)d;
    return n_copies;
}

int32_t shared_device_waits(const hd_device *d) {
    (void)d;
    return n_waits;
}

static size_t free_bytes(const hd_device *d) {
    (void)d;
    return n_free;
}

void shared_device_set_free(hd_device *d, size_t bytes) {
    (void)d;
    n_free = bytes;
    table.free_bytes = free_bytes;
}
