/* cmd_version.c - `hadal version`: the build, its options, and the features of this
 * computer. */
#include <stdio.h>

#ifdef HD_CUDA
#include "device/gpu_list.h"
#endif
#include "base/cores.h"
#include "base/cpu.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "http/listen.h"
#include "ops/ops.h"

/* Returns whether there is a GPU. */
static bool print_devices(void) {
#ifdef HD_CUDA
    enum { MAX_SHOWN = 16 };
    hd_cuda_device devices[MAX_SHOWN];
    char why[200];
    int32_t n = hd_cuda_devices(devices, MAX_SHOWN, why, sizeof why);
    if (n == 0) printf("gpu        none: %s\n", why);
    for (int32_t i = 0; i < n && i < MAX_SHOWN; i++) {
        const hd_cuda_device *d = &devices[i];
        printf("gpu %-2d     %s; %d SMs, %.1f GiB, compute capability %d.%d, %s%s\n", i,
               d->name, d->n_sms, (double)d->memory_bytes / 1073741824.0, d->major, d->minor,
               d->path ? "cuda path " : "no code for it in this build",
               d->path ? hd_cuda_path_names[d->path] : "");
    }
    return n > 0;
#else
    return false;
#endif
}

/* The number format of activations in products, by precision. */
static void print_precisions(bool gpu) {
    for (int i = HD_EXACT; i <= HD_OFFICIAL; i++) {
        const char *cpu = hd_ops_activations("cpu", (hd_precision)i);
        const char *cuda = gpu ? hd_ops_activations("cuda", (hd_precision)i) : NULL;
        printf("%-11s%-10s", i ? "" : "precision", hd_precision_names[i]);
        if (!cpu && !cuda) fputs("needs a GPU", stdout);
        if (cpu) printf("cpu: %s", cpu);
        if (cuda) printf("%sgpu: %s", cpu ? "; " : "", cuda);
        putchar('\n');
    }
}

int cmd_version(int argc, char **argv) {
    const command_line line = {.command = "version",
                               .summary = "Prints the build and what this machine offers."};
    int code;
    if (!options_parse(&line, argc, argv, &code)) return code;
    char features[128];
    hd_cpu_feature_names(hd_cpu_features(), features, sizeof features);
    printf("hadal %s\n", HD_VERSION);
    printf("compiler   %s\n", __VERSION__);
#ifdef HD_CUDA
    printf("options    cuda, code for sm %s\n", hd_cuda_archs());
#else
    printf("options    cpu only\n");
#endif
    printf("libraries  libmicrohttpd %s\n", http_library_version());
    printf("processor  %d threads; %s\n", hd_cores_count(),
           features[0] ? features : "baseline");
    print_precisions(print_devices());
    return 0;
}
