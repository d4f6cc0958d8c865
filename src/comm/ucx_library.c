/* ucx_library.c - loads UCX and finds its functions. */
#ifdef HD_UCX

#include "comm/ucx_library.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY_FILE "libucp.so.0"

/* UCX reads these when it is loaded; what the user has set stays. It would catch the signals of
 * a crash, write to standard output and patch the code of mmap (with which no program under the
 * thread sanitizer runs), and has room for two MiB only on their way to a rank. */
static void set_environment(void) {
    static const char *const settings[][2] = {
        {"UCX_HANDLE_ERRORS",        "none"  },
        {"UCX_MEM_EVENTS",           "n"     },
        {"UCX_SYSV_FIFO_SIZE",       "1024"  },
        {"UCX_LOG_FILE",             "stderr"},
        {"UCX_LOG_LEVEL",            "error" },
        {"UCX_WARN_UNUSED_ENV_VARS", "n"     }
    };
    for (size_t i = 0; i < HD_LEN(settings); i++) setenv(settings[i][0], settings[i][1], 0);
}

static hd_status find(void *file, const char *name, void *out, hd_err *err) {
    void *const at = dlsym(file, name);
    if (!at) return HD_FAIL(err, HD_EUNSUPPORTED, "%s has no %s", LIBRARY_FILE, name);
    memcpy(out, &at, sizeof at);
    return HD_OK;
}

hd_status ucx_library_load(const ucx_library **out, hd_err *err) {
    static ucx_library found;
    *out = &found;
    if (found.status_string) return HD_OK;
    set_environment();
    void *file = dlopen(LIBRARY_FILE, RTLD_NOW | RTLD_LOCAL);
    if (!file) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "ranks of several processes need UCX (Debian's libucx0): %s", dlerror());
    }
#define X(name) HD_TRY(find(file, "ucp_" #name, &found.name, err));
    UCP_CALLS(X)
#undef X
    return find(file, "ucs_status_string", &found.status_string, err);
}

#else

/* C has no empty files. */
typedef int ucx_library_is_absent;

#endif
