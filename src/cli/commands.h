/* commands.h - what hadal can do: one function per command, each in its own file. */
#ifndef HD_CLI_COMMANDS_H
#define HD_CLI_COMMANDS_H

/* argv[0] is the command's name. The return value is the program's exit code. */
typedef int command_fn(int argc, char **argv);

command_fn cmd_bench;
command_fn cmd_chat;
command_fn cmd_inspect;
command_fn cmd_tokenize;
command_fn cmd_detokenize;
command_fn cmd_render;
command_fn cmd_eval;
command_fn cmd_generate;
command_fn cmd_logits;
command_fn cmd_serve;
command_fn cmd_pull;
command_fn cmd_replay;
command_fn cmd_version;

#endif
