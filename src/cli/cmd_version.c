/* cmd_version.c - the build, its options, and what this machine offers. */
#include <stdio.h>

#include "base/cpu.h"
#include "base/pool.h"
#include "cli/commands.h"
#include "cli/options.h"

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
    printf("options    cuda\n");
#else
    printf("options    cpu only\n");
#endif
    printf("processor  %d threads; %s\n", hd_cpu_count(), features[0] ? features : "baseline");
    return 0;
}
