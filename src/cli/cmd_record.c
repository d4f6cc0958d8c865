/* cmd_record.c - `hadal record`: how unbalanced the traffic of an expert record is. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "moe/eplb.h"
#include "moe/traffic.h"

static const char *const mode_names[] = {"stat", "per_pass", "per_token"};

static const char details[] =
    "FILE is what /dump_expert_distribution_record of hadal serve wrote, or a part of it.\n"
    "Hottest is the rows of a layer's hottest expert, idle its experts without rows.\n"
    "Balancedness is mean / max of the rows of ranks: the average over passes, and the value\n"
    "that 1 % of passes are below. With --ranks, ranks hold equal stretches of the experts, "
    "as\n"
    "if nothing were planned; hadal simulate shows what a plan would bring.\n"
    "\n"
    "--json prints the counts for hadal eplb --load.";

typedef struct settings {
    const char *file;
    int64_t ranks;
    int phase;
    bool json;
    hd_traffic traffic;
    hd_record_head head;
    double *pass; /* [passes] balancedness */
    hd_err err;
} settings;

static hd_status print_json(settings *s) {
    const hd_traffic *t = &s->traffic;
    const hd_record_head *h = &s->head;
    json_t *counts = json_array(), *map = json_array();
    for (int32_t l = 0, at = 0; l < h->layers; l++) {
        const bool has = at < t->layers && t->layer[at] == l;
        json_t *of_layer = json_array(), *slots = json_array();
        for (int32_t e = 0; e < h->experts; e++) {
            int64_t sum = 0;
            for (int32_t p = 0; has && p < t->passes; p++) sum += hd_traffic_rows(t, p, at)[e];
            json_array_append_new(of_layer, json_integer(sum));
        }
        for (int32_t k = 0; k < h->slots; k++) {
            json_array_append_new(slots,
                                  json_integer(h->slot_expert[(int64_t)l * h->slots + k]));
        }
        json_array_append_new(counts, of_layer);
        json_array_append_new(map, slots);
        at += has;
    }
    json_t *all = json_pack("{s:s, s:i, s:i, s:o, s:o}", "mode", mode_names[h->mode], "layers",
                            h->layers, "experts", h->experts, "logical_count", counts,
                            "physical_to_logical_map", map);
    char *text = hd_json_write(all, JSON_COMPACT);
    json_decref(all);
    if (!text) return HD_FAIL(&s->err, HD_ENOMEM, "no memory to print");
    puts(text);
    free(text);
    return HD_OK;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* mean / max of the ranks' rows in one pass. */
static double balancedness(const settings *s, const int64_t *rows) {
    const int64_t experts = s->traffic.experts;
    double sum = 0, most = 0;
    for (int64_t d = 0; d < s->ranks; d++) {
        double of_rank = 0;
        for (int64_t e = d * experts / s->ranks; e < (d + 1) * experts / s->ranks; e++) {
            of_rank += (double)rows[e];
        }
        sum += of_rank;
        most = of_rank > most ? of_rank : most;
    }
    return most > 0 ? sum / (double)s->ranks / most : 1;
}

static void print_layer(settings *s, int32_t layer) {
    const hd_traffic *t = &s->traffic;
    double sum = 0, most = 0, mean = 0;
    int32_t idle = 0, hottest = 0;
    for (int32_t e = 0; e < t->experts; e++) {
        double of_expert = 0;
        for (int32_t p = 0; p < t->passes; p++) {
            of_expert += (double)hd_traffic_rows(t, p, layer)[e];
        }
        sum += of_expert;
        idle += of_expert <= 0;
        if (of_expert > most) hottest = e;
        most = of_expert > most ? of_expert : most;
    }
    for (int32_t p = 0; p < t->passes; p++) {
        s->pass[p] = balancedness(s, hd_traffic_rows(t, p, layer));
        mean += s->pass[p] / t->passes;
    }
    qsort(s->pass, (size_t)t->passes, sizeof *s->pass, by_value);
    printf("%5d  %14.0f  %7d  %9.2f  %5d  %12.3f  %7.3f\n", t->layer[layer], sum, hottest,
           sum > 0 ? most / (sum / t->experts) : 0, idle, mean, s->pass[t->passes / 100]);
}

static hd_status print_text(settings *s) {
    const hd_traffic *t = &s->traffic;
    const hd_record_head *h = &s->head;
    double tokens = 0;
    for (int32_t p = 0; p < t->passes; p++) tokens += t->tokens[p];
    printf("%s record: %d layers (%d MTP), %d experts, %d per token, %d slots on %d rank%s\n",
           mode_names[h->mode], h->layers, h->n_mtp, h->experts, h->top_k, h->slots, h->ranks,
           h->ranks > 1 ? "s" : "");
    printf("%s: %d pass%s, %.0f tokens\n", hd_traffic_phase_names[s->phase], t->passes,
           t->passes == 1 ? "" : "es", tokens);
    if (h->mode == HD_RECORD_STAT) {
        printf("counts of all passes together: single passes are less balanced\n");
    }
    if (t->passes == 0) return HD_OK;
    s->pass = calloc((size_t)t->passes, sizeof *s->pass);
    if (!s->pass) return HD_FAIL(&s->err, HD_ENOMEM, "no memory for %d passes", t->passes);
    printf("\nlayer            rows  hottest  x average   idle  on %3lld ranks   lowest\n",
           (long long)s->ranks);
    for (int32_t l = 0; l < t->layers; l++) print_layer(s, l);
    return HD_OK;
}

static hd_status run(settings *s) {
    const unsigned phases = hd_traffic_phases(s->phase);
    bool cut;
    FILE *in = strcmp(s->file, "-") == 0 ? stdin : fopen(s->file, "rb");
    if (!in) return HD_FAIL(&s->err, HD_EIO, "cannot read %s: %s", s->file, strerror(errno));
    const hd_status st =
        hd_traffic_read(&s->traffic, &s->head, &cut, in, s->file, phases, &s->err);
    if (in != stdin) fclose(in);
    HD_TRY(st);
    if (cut) fprintf(stderr, "%s is cut off: its last row is left out\n", s->file);
    if (!s->ranks) s->ranks = s->head.ranks > 1 ? s->head.ranks : 8;
    if (s->ranks > s->head.experts) {
        return HD_FAIL(&s->err, HD_EINVAL, "%lld ranks for %d experts", (long long)s->ranks,
                       s->head.experts);
    }
    return s->json ? print_json(s) : print_text(s);
}

int cmd_record(int argc, char **argv) {
    settings s = {0};
    const option options[] = {
        option_int("ranks", &s.ranks, 1, HD_EPLB_MAX_RANKS,
                   "that would share the experts; default: the record's, or 8"),
        option_choice("phase", &s.phase, hd_traffic_phase_names,
                      "whose rows count; all: but drafts"),
        option_flag("json", &s.json, "print the counts and the map"),
    };
    const positional where[] = {
        {.name = "FILE", .value = &s.file}
    };
    const command_line line = {.command = "record",
                               .summary = "Shows how unbalanced recorded traffic is.",
                               .details = details,
                               .positionals = where,
                               .n_positionals = (int)HD_LEN(where),
                               .options = options,
                               .n_options = (int)HD_LEN(options)};
    int code;
    if (!options_parse(&line, argc, argv, &code)) return code;
    const hd_status st = run(&s);
    hd_traffic_close(&s.traffic);
    free(s.head.slot_expert);
    free(s.pass);
    return st == HD_OK ? 0 : report_error(&s.err);
}
