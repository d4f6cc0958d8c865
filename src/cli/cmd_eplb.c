/* cmd_eplb.c - `hadal eplb`: plans which expert each slot of each rank holds, from counts of how
 * many rows every expert got. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "moe/eplb.h"

enum { MAX_FILE_BYTES = 1 << 30 };

static const char details[] =
    "FILE of --load holds counts [layers][experts] or [passes][layers][experts], or an object\n"
    "with them as logical_count; - is standard input. The output is JSON:\n"
    "physical_to_logical_map [layers][slots], logical_to_all_physical_map\n"
    "[layers][experts][copies], expert_count [layers][experts], and by layer balancedness\n"
    "(mean / max of the ranks) and bound, which no plan exceeds.\n"
    "\n"
    "--algo hadal is for an even split over copies, and never worse than published, the\n"
    "algorithm of DeepSeek's EPLB; flow is for a server that splits every batch anew.\n"
    "--previous repairs a map: few experts move, until balancedness is --target of the bound.\n"
    "\n"
    "--phase decode uses no copies: a step that is as long as reading its experts' weights\n"
    "takes would read each copy again.";

typedef struct settings {
    const char *load, *previous, *rank_slots, *gone;
    int64_t slots, ranks, nodes, groups, budget, expert_bytes, step_rows;
    double z, target;
    int algorithm, phase, format;
    hd_eplb_loads loads;
    int32_t *map;  /* previous */
    int32_t *each; /* [ranks] of --rank-slots, or NULL */
    bool *lost;    /* [ranks] of --gone, or NULL */
    hd_err err;
} settings;

static hd_status read_text(char **out, size_t *n, const char *path, hd_err *err) {
    if (strcmp(path, "-") == 0) return hd_stdin_read(out, n, MAX_FILE_BYTES, err);
    return hd_file_read(out, n, path, MAX_FILE_BYTES, err);
}

static hd_status read_files(settings *s) {
    char *text;
    size_t n;
    HD_TRY(read_text(&text, &n, s->load, &s->err));
    hd_status st = hd_eplb_loads_read(&s->loads, text, n, s->z, s->load, &s->err);
    free(text);
    if (st != HD_OK || !s->previous) return st;
    int32_t layers, slots;
    HD_TRY(read_text(&text, &n, s->previous, &s->err));
    st = hd_eplb_map_read(&s->map, &layers, &slots, text, n, s->previous, &s->err);
    free(text);
    if (st == HD_OK && (layers != s->loads.layers || slots != s->slots)) {
        return HD_FAIL(&s->err, HD_EINVAL,
                       "%s has %d layers of %d slots; this plan has %d of %lld", s->previous,
                       layers, slots, s->loads.layers, (long long)s->slots);
    }
    return st;
}

/* "1,2,3": calls for at most n numbers below `limit`. */
static hd_status read_list(int32_t *out, int32_t *n, int32_t most, int64_t limit,
                           const char *text, const char *name, hd_err *err) {
    *n = 0;
    for (const char *at = text;; at++) {
        char *end;
        const long long v = strtoll(at, &end, 10);
        if (end == at || v < 0 || v >= limit || *n == most || (*end && *end != ',')) {
            return HD_FAIL(err, HD_EINVAL,
                           "--%s takes at most %d numbers below %lld with commas, not %s", name,
                           most, (long long)limit, text);
        }
        out[(*n)++] = (int32_t)v;
        if (!*end) return HD_OK;
        at = end;
    }
}

static hd_status read_lists(settings *s) {
    const int32_t ranks = (int32_t)s->ranks;
    int32_t n;
    s->each = calloc((size_t)ranks, sizeof *s->each);
    s->lost = calloc((size_t)ranks, sizeof *s->lost);
    if (!s->each || !s->lost)
        return HD_FAIL(&s->err, HD_ENOMEM, "no memory for %d ranks", ranks);
    if (s->gone) {
        HD_TRY(read_list(s->each, &n, ranks, ranks, s->gone, "gone", &s->err));
        for (int32_t i = 0; i < n; i++) s->lost[s->each[i]] = true;
    }
    if (!s->rank_slots) return HD_OK;
    HD_TRY(read_list(s->each, &n, ranks, HD_EPLB_MAX_SLOTS + 1, s->rank_slots, "rank-slots",
                     &s->err));
    if (n != ranks) {
        return HD_FAIL(&s->err, HD_EINVAL, "--rank-slots has %d numbers for %d ranks", n,
                       ranks);
    }
    return HD_OK;
}

static hd_status print_map(const hd_eplb_map *m, int format, hd_err *err) {
    char *text = NULL;
    if (format == 2) {
        text = hd_eplb_map_tensorrt(m);
    } else {
        json_t *json = format == 0 ? hd_eplb_map_json(m) : hd_eplb_map_sglang(m);
        text = hd_json_write(json, JSON_COMPACT);
        json_decref(json);
    }
    if (!text) return HD_FAIL(err, HD_ENOMEM, "no memory to print the map");
    const bool printed = fputs(text, stdout) >= 0 && (format == 2 || putchar('\n') != EOF);
    free(text);
    return printed ? HD_OK : HD_FAIL(err, HD_EIO, "cannot write the map");
}

/* What JSON has no place for. */
static void report(const settings *s, const hd_eplb_map *m) {
    int64_t moves = 0, lost = 0;
    for (int32_t i = 0; i < m->layers; i++) {
        moves += m->moves[i];
        lost += m->lost[i];
    }
    if (m->no_copies) fprintf(stderr, "decode: copies would be read again; none are used\n");
    if (!s->map) return;
    fprintf(stderr, "%lld experts move; %d of %d layers reach the target\n", (long long)moves,
            m->n_reached, m->layers);
    if (lost) fprintf(stderr, "%lld experts had no slot\n", (long long)lost);
}

static hd_status run(settings *s) {
    if (!s->load || !s->slots || !s->ranks) {
        return HD_FAIL(&s->err, HD_EINVAL,
                       "hadal eplb needs --load FILE, --slots N and --ranks N");
    }
    if (s->budget >= 0 && (!s->previous || !s->expert_bytes)) {
        return HD_FAIL(&s->err, HD_EINVAL,
                       "--budget needs --previous FILE and --expert-bytes N");
    }
    HD_TRY(read_files(s));
    HD_TRY(read_lists(s));
    const hd_eplb_args args = {
        .loads = s->loads.loads,
        .layers = s->loads.layers,
        .experts = s->loads.experts,
        .slots = (int32_t)s->slots,
        .ranks = (int32_t)s->ranks,
        .nodes = (int32_t)s->nodes,
        .groups = (int32_t)s->groups,
        .rank_slots = s->rank_slots ? s->each : NULL,
        .gone = s->lost,
        .previous = s->map,
        .max_moves = s->budget < 0 ? -1 : s->budget / s->expert_bytes / s->loads.layers,
        .target = s->target,
        .step_rows = (double)s->step_rows,
        .algorithm = (hd_eplb_algorithm)s->algorithm,
        .phase = (hd_eplb_phase)s->phase,
    };
    hd_eplb_map map;
    HD_TRY(hd_eplb_plan(&map, &args, &s->err));
    report(s, &map);
    const hd_status st = print_map(&map, s->format, &s->err);
    hd_eplb_map_close(&map);
    return st;
}

int cmd_eplb(int argc, char **argv) {
    static const char *const algorithms[] = {"hadal", "published", "flow", NULL};
    static const char *const phases[] = {"rows", "prefill", "decode", NULL};
    static const char *const formats[] = {"json", "sglang", "tensorrt-llm", NULL};
    settings s = {.budget = -1, .target = HD_EPLB_TARGET};
    const option options[] = {
        option_text("load", &s.load, "FILE", "rows of each expert"),
        option_int("slots", &s.slots, 1, HD_EPLB_MAX_SLOTS, "slots of a layer, on all ranks"),
        option_int("ranks", &s.ranks, 1, HD_EPLB_MAX_RANKS, "ranks that share the slots"),
        option_int("nodes", &s.nodes, 1, HD_EPLB_MAX_RANKS, "nodes that share the ranks"),
        option_int("groups", &s.groups, 1, HD_EPLB_MAX_EXPERTS,
                   "groups of experts, each kept on one node"),
        option_choice("algo", &s.algorithm, algorithms, "how to plan"),
        option_text("previous", &s.previous, "FILE", "a map to repair"),
        {.name = "budget",
                                                              .kind = OPTION_INT,
                                                              .value = &s.budget,
                                                              .metavar = "BYTES",
                                                              .help = "most bytes that a repair moves, in equal parts per layer",
                                                              .min = -1,
                                                              .max = INT64_MAX,
                                                              .min_word = "unlimited"},
        option_int("expert-bytes", &s.expert_bytes, 1, INT64_MAX, "bytes of an expert"),
        option_real("target", &s.target, 0.01, 1, "share of the bound that ends a repair"),
        option_text("rank-slots", &s.rank_slots, "LIST", "slots of each rank: 9,9,8"),
        option_text("gone", &s.gone, "LIST", "ranks whose slots stay empty: 3,7"),
        option_choice("phase", &s.phase, phases, "what a rank's time depends on"),
        option_int("step-rows", &s.step_rows, 1, INT32_MAX,
                   "rows of a layer in a step, for --phase"),
        option_real("z", &s.z, 0, 10, "deviations added to the mean of passes"),
        option_choice("format", &s.format, formats, "what to print"),
    };
    const command_line line = {.command = "eplb",
                               .summary = "Plans which experts each rank holds.",
                               .details = details,
                               .options = options,
                               .n_options = (int)HD_LEN(options)};
    int code;
    if (!options_parse(&line, argc, argv, &code)) return code;
    const hd_status st = run(&s);
    hd_eplb_loads_close(&s.loads);
    free(s.map);
    free(s.each);
    free(s.lost);
    return st == HD_OK ? 0 : report_error(&s.err);
}
