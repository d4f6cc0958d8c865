/* commands.h - the commands of hadal: one function per command, each in its own file. */
#ifndef HD_CLI_COMMANDS_H
#define HD_CLI_COMMANDS_H

#include <stddef.h>

#include "cli/options.h"

/* argv[0] is the command's name. The return value is the program's exit code. */
typedef int command_fn(int argc, char **argv);

typedef struct command {
    const char *name;
    command_fn *run;
    const char *args;
    const char *help; /* NULL: for installation, not listed */
} command;

enum { MOST_COMMANDS = 32 };

/* All commands, in the order of the list. */
const command *commands_all(size_t *n);

/* Further arguments with an option table each, such as "throughput" of bench; NULL ends the
 * list. NULL: there is one table. */
const char *const *command_forms(const command *c);

/* Calls visit with every option table of the command; a table is valid during its call only. */
void command_visit(const command *c, void (*visit)(const command_line *line, void *user),
                   void *user);

extern const char *const bench_forms[];

command_fn cmd_bench;
command_fn cmd_chat;
command_fn cmd_completions;
command_fn cmd_inspect;
command_fn cmd_kv;
command_fn cmd_tokenize;
command_fn cmd_detokenize;
command_fn cmd_render;
command_fn cmd_eplb;
command_fn cmd_eval;
command_fn cmd_generate;
command_fn cmd_logits;
command_fn cmd_manual;
command_fn cmd_plan;
command_fn cmd_serve;
command_fn cmd_simulate;
command_fn cmd_pull;
command_fn cmd_record;
command_fn cmd_replay;
command_fn cmd_rl;
command_fn cmd_router;
command_fn cmd_train;
command_fn cmd_version;

#endif
