/* commands.c - the table of commands, and a walk over the options of each. */
#include "cli/commands.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

static const command commands[] = {
    {"serve",       cmd_serve,       "MODEL_DIR",                       "answer HTTP requests"              },
    {"router",      cmd_router,      "--decode HOST:PORT,...",          "spread requests over servers"      },
    {"chat",        cmd_chat,        "MODEL_DIR",                       "talk with a model on the terminal" },
    {"generate",    cmd_generate,    "MODEL_DIR -p TEXT",               "answer one prompt"                 },
    {"pull",        cmd_pull,        "REPO[@REVISION]",                 "download from the Hugging Face hub"},
    {"eval",        cmd_eval,        "MODEL_DIR --suite NAME",          "count right answers to tasks"      },
    {"bench",       cmd_bench,       "throughput|latency MODEL_DIR",
     "put an engine under a synthetic load"                                                                 },
    {"inspect",     cmd_inspect,     "MODEL_DIR",                       "print what a checkpoint holds"     },
    {"tokenize",    cmd_tokenize,    "DIR < TEXT",                      "turn text into token ids"          },
    {"detokenize",  cmd_detokenize,  "DIR < IDS",                       "turn token ids into text"          },
    {"render",      cmd_render,      "DIR --messages FILE",             "print the prompt of a conversation"},
    {"logits",      cmd_logits,      "MODEL_DIR --tokens F --out F",
     "compute the logits of given tokens"                                                                   },
    {"eplb",        cmd_eplb,        "--load FILE --slots N --ranks N", "plan which experts each rank holds"},
    {"record",      cmd_record,      "FILE",                            "show how unbalanced traffic is"    },
    {"simulate",    cmd_simulate,    "--record FILE --ranks N",         "compare plans of experts on paper" },
    {"kv",          cmd_kv,          "list|check|drop DIR",             "look at KV pages on a disk"        },
    {"plan",        cmd_plan,        "CONFIG --gpus N",                 "predict what GPUs can serve"       },
    {"replay",      cmd_replay,      "FILE MODEL_DIR",                  "run logged requests again, compare"},
    {"train",       cmd_train,       "MODEL_DIR --data F --out DIR",    "train a model on examples"         },
    {"rl",          cmd_rl,          "MODEL_DIR --task NAME --out DIR", "train a model by rewards"          },
    {"version",     cmd_version,     "",                                "print the build and this machine"  },
    {"completions", cmd_completions, "bash|zsh|fish",                   NULL                                },
    {"manual",      cmd_manual,      "[COMMAND]",                       NULL                                },
};

static_assert(HD_LEN(commands) <= MOST_COMMANDS, "more commands than a list of names holds");

const command *commands_all(size_t *n) {
    *n = HD_LEN(commands);
    return commands;
}

const char *const *command_forms(const command *c) {
    return c->run == cmd_bench ? bench_forms : NULL;
}

void command_visit(const command *c, void (*visit)(const command_line *line, void *user),
                   void *user) {
    static const char *const plain[] = {"", NULL};
    options_visit(visit, user);
    const char *const *forms = command_forms(c);
    for (const char *const *form = forms ? forms : plain; *form; form++) {
        char words[64], *argv[4] = {(char *)(uintptr_t)c->name};
        int argc = 1;
        snprintf(words, sizeof words, "%s", *form);
        for (char *rest = NULL, *word = strtok_r(words, " ", &rest); word && argc < 4;
             word = strtok_r(NULL, " ", &rest)) {
            argv[argc++] = word;
        }
        c->run(argc, argv);
    }
    options_visit(NULL, NULL);
}
