/* silence.c - see silence.h. */
#include "comm/silence.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/siphash.h"
#include "base/status.h"

/* The first bytes of a file, as text. False: it cannot be read. */
static bool read_start(const char *path, char *out, size_t room) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd < 0 ? -1 : read(fd, out, room - 1);
    if (fd >= 0) close(fd);
    if (n > 0) out[n] = '\0';
    return n > 0;
}

hd_place hd_place_here(void) {
    static const char *const spaces[] = {"/proc/self/ns/pid", "/proc/self/ns/net"};
    char text[64];
    hd_siphash s;
    hd_siphash_init(&s, (const uint64_t[2]){0});
    if (!read_start("/proc/sys/kernel/random/boot_id", text, sizeof text)) return (hd_place){0};
    hd_siphash_add_part(&s, text);
    for (size_t i = 0; i < HD_LEN(spaces); i++) {
        const ssize_t n = readlink(spaces[i], text, sizeof text);
        if (n <= 0) return (hd_place){0};
        hd_siphash_add(&s, text, (size_t)n);
    }
    return (hd_place){.host = hd_siphash_value(&s), .pid = getpid()};
}

/* The letter of /proc for what a process does; '\0': there is none. */
static char state_of(int32_t pid) {
    char path[40], stat[256];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    if (!read_start(path, stat, sizeof stat)) return '\0';
    const char *state = strrchr(stat, ')'); /* behind the name, which may have any character */
    return state && state[1] == ' ' ? state[2] : '\0';
}

bool hd_place_runs(const hd_place *of, const hd_place *here) {
    if (!of->host || of->host != here->host) return false;
    const char state = state_of(of->pid);
    return state && strchr("RSD", state);
}

bool hd_place_has_ended(const hd_place *of) {
    const char state = state_of(of->pid);
    return !state || strchr("ZX", state);
}

/* Of the numbers in its line, which are the real user, the effective one and two more, the second. */
static bool read_user(int32_t pid, unsigned long *user) {
    static const char name[] = "\nUid:";
    char path[40], status[1024], *end;
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    if (!read_start(path, status, sizeof status)) return false;
    const char *line = strstr(status, name);
    if (!line) return false;
    strtoul(line + strlen(name), &end, 10);
    const char *effective = end;
    *user = strtoul(effective, &end, 10);
    return end != effective;
}

bool hd_place_is_of_user(const hd_place *of) {
    unsigned long user;
    return read_user(of->pid, &user) && user == geteuid();
}

int64_t hd_silence_passed(int64_t passed_ms, int32_t beat_ms) {
    return passed_ms < 2 * (int64_t)beat_ms ? passed_ms : beat_ms;
}

int32_t hd_silence_exceeds(int64_t silent_ms, int32_t limit_ms, const hd_place *of,
                           const hd_place *here) {
    const int64_t most = (int64_t)limit_ms * HD_SILENCE_PATIENCE;
    if (silent_ms <= limit_ms) return 0;
    if (!hd_place_runs(of, here)) return limit_ms;
    return silent_ms > most ? (int32_t)most : 0;
}
