/* sandbox.c - Landlock for files and TCP, seccomp for system calls. The seccomp filter lists
 * denied calls, because the calls that device drivers need cannot be listed. A denied call
 * fails with EPERM. */
#define _GNU_SOURCE
#include "server/sandbox.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/file.h"

/* Newer than the oldest kernel headers we support; the numbers are the same on all
 * architectures. */
#define FS_REFER      (1ull << 13)
#define FS_TRUNCATE   (1ull << 14)
#define FS_IOCTL      (1ull << 15)
#define NET_BIND      (1ull << 0)
#define NET_CONNECT   (1ull << 1)
#define SCOPE_SOCKETS (1ull << 0) /* abstract sockets of others */
#define SCOPE_SIGNALS (1ull << 1) /* signals to others */

#define FS_READ (LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR)
#define FS_WRITE \
    (LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_MAKE_REG | FS_TRUNCATE | FS_READ)
#define FS_FIRST ((1ull << 13) - 1) /* all rights of version 1 */

typedef struct ruleset { /* struct landlock_ruleset_attr of later kernels */
    uint64_t fs, net, scope;
} ruleset;

static int landlock_version(void) {
    return (int)syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);
}

static ruleset rules_of(int version, bool ranks, bool connects) {
    ruleset r = {.fs = FS_FIRST};
    if (version >= 2) r.fs |= FS_REFER;
    if (version >= 3) r.fs |= FS_TRUNCATE;
    if (version >= 4 && !ranks && !connects) r.net = NET_BIND | NET_CONNECT;
    if (version >= 5) r.fs |= FS_IOCTL;
    /* ranks that share memory wake each other by abstract sockets */
    if (version >= 6) r.scope = ranks ? SCOPE_SIGNALS : SCOPE_SOCKETS | SCOPE_SIGNALS;
    return r;
}

/* A path that does not exist needs no rule. */
static void allow(int rules, const ruleset *handled, const char *path, uint64_t access) {
    struct stat st;
    const int fd = path ? open(path, O_PATH | O_CLOEXEC) : -1;
    if (fd < 0) return;
    struct landlock_path_beneath_attr beneath = {.allowed_access = access & handled->fs,
                                                 .parent_fd = fd};
    if (fstat(fd, &st) == 0 && !S_ISDIR(st.st_mode)) {
        beneath.allowed_access &= LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_WRITE_FILE |
                                  FS_TRUNCATE | FS_IOCTL;
    }
    syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &beneath, 0);
    close(fd);
}

static void allow_folder_of(int rules, const ruleset *handled, const char *file) {
    char *copy = file ? strdup(file) : NULL;
    if (copy) allow(rules, handled, dirname(copy), FS_READ);
    free(copy);
}

/* A model in the Hugging Face cache is a folder of links to files elsewhere. */
static void allow_links_in(int rules, const ruleset *handled, const char *folder) {
    DIR *dir = folder ? opendir(folder) : NULL;
    for (const struct dirent *e = dir ? readdir(dir) : NULL; e; e = readdir(dir)) {
        if (e->d_type != DT_LNK && e->d_type != DT_UNKNOWN) continue;
        char *path = hd_path_join(folder, e->d_name);
        struct stat target;
        if (path && stat(path, &target) == 0 && S_ISREG(target.st_mode)) {
            allow(rules, handled, path, FS_READ);
        }
        free(path);
    }
    if (dir) closedir(dir);
}

static bool enter_landlock(const sandbox_paths *paths, int version) {
    static const char *const system_read[] = {"/etc",  "/usr", "/lib", "/lib64",
                                              "/proc", "/sys", "/opt"};
    const ruleset handled = rules_of(version, paths->ranks, paths->connects);
    const size_t size = version >= 6   ? sizeof handled
                        : version >= 4 ? offsetof(ruleset, scope)
                                       : offsetof(ruleset, net);
    const int rules = (int)syscall(SYS_landlock_create_ruleset, &handled, size, 0);
    if (rules < 0) return false;
    for (size_t i = 0; i < HD_LEN(system_read); i++) {
        allow(rules, &handled, system_read[i], FS_READ);
    }
    /* A GPU driver writes the names of its threads there. */
    allow(rules, &handled, "/proc/self", FS_READ | LANDLOCK_ACCESS_FS_WRITE_FILE | FS_TRUNCATE);
    allow(rules, &handled, "/dev", FS_READ | LANDLOCK_ACCESS_FS_WRITE_FILE | FS_IOCTL);
    allow(rules, &handled, "/dev/shm", FS_WRITE | LANDLOCK_ACCESS_FS_REMOVE_FILE | FS_IOCTL);
    for (size_t i = 0; i < HD_LEN(paths->read); i++) {
        allow(rules, &handled, paths->read[i], FS_READ);
        allow_links_in(rules, &handled, paths->read[i]);
    }
    for (size_t i = 0; i < HD_LEN(paths->write); i++) {
        allow(rules, &handled, paths->write[i], FS_WRITE | LANDLOCK_ACCESS_FS_REMOVE_FILE);
    }
    for (size_t i = 0; i < HD_LEN(paths->reread); i++) {
        allow_folder_of(rules, &handled, paths->reread[i]);
    }
    const bool entered = syscall(SYS_landlock_restrict_self, rules, 0) == 0;
    close(rules);
    return entered;
}

/* Programs built with the leak sanitizer have this function. At exit its checker traces the
 * threads of its own process, so such a program keeps the calls for that. */
extern void __lsan_do_leak_check(void) __attribute__((weak));

static bool checks_leaks(void) {
    return __lsan_do_leak_check != NULL;
}

/* ---- system calls ---- */

#define DENIED (SECCOMP_RET_ERRNO | (uint32_t)EPERM)
#define ON(name, action)                                             \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)SYS_##name, 0, 1), \
        BPF_STMT(BPF_RET | BPF_K, (action))
#define DENY(name) ON(name, DENIED)

#if defined(__x86_64__)
#define OUR_ARCH AUDIT_ARCH_X86_64
#else
#define OUR_ARCH AUDIT_ARCH_AARCH64
#endif

static bool enter_seccomp(void) {
    const struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, OUR_ARCH, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        DENY(execve),
        DENY(execveat),
        ON(ptrace, checks_leaks() ? SECCOMP_RET_ALLOW : DENIED),
        DENY(process_vm_readv),
        DENY(process_vm_writev),
        DENY(pidfd_getfd),
        DENY(kcmp),
        DENY(mount),
        DENY(umount2),
        DENY(pivot_root),
        DENY(chroot),
        DENY(unshare),
        DENY(setns),
        DENY(bpf),
        DENY(perf_event_open),
        DENY(userfaultfd),
        DENY(io_uring_setup),
        DENY(keyctl),
        DENY(add_key),
        DENY(request_key),
        DENY(init_module),
        DENY(finit_module),
        DENY(delete_module),
        DENY(kexec_load),
        DENY(reboot),
        DENY(swapon),
        DENY(swapoff),
        DENY(settimeofday),
        DENY(clock_settime),
        DENY(sethostname),
        DENY(setuid),
        DENY(setgid),
        DENY(setresuid),
        DENY(setresgid),
        DENY(personality),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {.len = HD_LEN(filter),
                                       .filter = (struct sock_filter *)(uintptr_t)filter};
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0;
}

hd_status sandbox_enter(const sandbox_paths *paths, char *note, size_t note_size, hd_err *err) {
    const struct rlimit none = {0, 0};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) {
        return HD_FAIL(err, HD_EIO, "cannot give up new privileges: %s; --no-sandbox goes on",
                       strerror(errno));
    }
    setrlimit(RLIMIT_CORE, &none); /* core files contain prompts and keys */
    /* So does the memory that a debugger of the same user could read. */
    if (!checks_leaks()) prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    umask(S_IRWXG | S_IRWXO);
    const int version = landlock_version();
    const bool files = version > 0 && enter_landlock(paths, version);
    const bool calls = enter_seccomp();
    char landlock[32] = "no landlock";
    if (files) snprintf(landlock, sizeof landlock, "landlock %d", version);
    snprintf(note, note_size, "%s, %s, no new privileges%s", landlock,
             calls ? "seccomp" : "no seccomp", checks_leaks() ? ", traced for leaks" : "");
    return HD_OK;
}
