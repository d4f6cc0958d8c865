/* engine_options.h - the command line's options of an engine: one table for all commands.
 *
 * A row sets one field of hd_engine_options and names the commands that offer it, with the
 * reason why others cannot. A new option of the engine is a field in hadal.h, a row in
 * engine_options.c, its use in the engine, and a line in docs/engine.md. */
#ifndef HD_CLI_ENGINE_OPTIONS_H
#define HD_CLI_ENGINE_OPTIONS_H

#include "cli/options.h"
#include "hadal.h"
#include "ops/ops.h"

/* The commands, as bits. */
typedef enum engine_command {
    ENGINE_SERVE = 1 << 0,
    ENGINE_CHAT = 1 << 1,
    ENGINE_GENERATE = 1 << 2,
    ENGINE_EVAL = 1 << 3,
    ENGINE_REPLAY = 1 << 4,
    ENGINE_THROUGHPUT = 1 << 5,
    ENGINE_LATENCY = 1 << 6,
    /* these run a model or operators without an engine */
    ENGINE_LOGITS = 1 << 7,
    ENGINE_OPS = 1 << 8,  /* bench ops */
    ENGINE_RANK = 1 << 9, /* bench latency --emulate-rank */
    ENGINE_INSPECT = 1 << 10
} engine_command;

/* Settings of a command. Its model_dir is set by the command's positional argument. */
typedef struct engine_settings {
    hd_engine_options options;
    int32_t draft_tokens; /* of each request: 0 to HD_MAX_DRAFTS, or HD_DRAFTS_AUTO */
} engine_settings;

/* All defaults. */
engine_settings engine_settings_default(void);

/* As options_parse(), with the engine options of the command behind those of line. Refuses
 * settings that contradict each other. */
bool engine_options_parse(const command_line *line, engine_command command, engine_settings *s,
                          int argc, char **argv, int *code);

/* All options of the last engine_options_parse(). */
const option_list *engine_options_parsed(void);

/* Opens an engine. quiet: without a progress bar of the upload to a GPU. */
hd_status engine_settings_open(hd_engine **out, const engine_settings *s, bool quiet,
                               hd_err *err);

/* What a command without an engine needs of them. */
hd_status engine_settings_ops(const engine_settings *s, hd_ops_options *ops, hd_mla_form *mla,
                              hd_err *err);

/* ---- the table, for tests ---- */

typedef struct engine_option {
    option option; /* its value is NULL */
    size_t at;     /* of its field in engine_settings */
    int offered;   /* bits of the commands that have it */
    /* why others have not: the end of a sentence, behind "takes no --NAME: "; NULL if another
     * row of this name or an option of their own takes its place */
    const char *why;
} engine_option;

const engine_option *engine_options_all(size_t *n);

#endif
