/* cmd_pull.c - `hadal pull`: downloads a model from the Hugging Face hub into the shared
 * cache. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/progress.h"
#include "base/terminal.h"
#include "cli/commands.h"
#include "cli/hub_env.h"
#include "cli/options.h"
#include "hub/hub.h"

static const char details[] =
    "REPO is ORG/NAME, REVISION a branch, a tag or a commit. Prints the folder; every command\n"
    "that takes MODEL_DIR also takes REPO[@REVISION]. An interrupted download goes on where "
    "it\n"
    "was. Every file is checked against the hub's digest of it.\n"
    "\n"
    "HF_TOKEN opens private and gated models; only HF_ENDPOINT's own host gets it. "
    "HF_ENDPOINT\n"
    "names another hub, HF_HOME or HF_HUB_CACHE another cache, SSL_CERT_FILE other "
    "authorities,\n"
    "https_proxy a proxy; HF_HUB_OFFLINE=1 forbids downloads.";

typedef struct display {
    hd_progress bar;
    bool begun, quiet;
} display;

static void on_plan(void *user, int32_t files, int64_t bytes, int64_t there) {
    display *d = user;
    char all[32], here[32];
    if (!d->quiet) {
        fprintf(stderr, "%d files, %s, of which %s are here\n", files,
                hd_bytes_text(all, sizeof all, (double)bytes),
                hd_bytes_text(here, sizeof here, (double)there));
    }
    hd_progress_init(&d->bar, "pulling", "bytes", bytes, d->quiet);
    d->bar.done = d->bar.begun = there;
    d->begun = true;
}

static void on_progress(void *user, int64_t done) {
    display *d = user;
    hd_progress_add(&d->bar, done - d->bar.done);
}

static void on_note(void *user, const char *text) {
    display *d = user;
    if (d->quiet) return;
    if (d->begun) hd_progress_clear(&d->bar);
    fprintf(stderr, "%s\n", text);
}

static hd_status pull(const hub_name *name, hub_options o, bool quiet, hd_err *err) {
    display d = {.quiet = quiet};
    const char *offline = getenv("HF_HUB_OFFLINE");
    hub_env env = {0};
    char *folder = NULL;
    if (offline && *offline && strcmp(offline, "0") != 0) {
        return HD_FAIL(err, HD_EINVAL, "HF_HUB_OFFLINE is set: nothing is downloaded");
    }
    hd_status st = hub_env_read(&env, err);
    o.endpoint = env.endpoint;
    o.cache = env.cache;
    o.token = env.token;
    o.ca_file = env.ca_file;
    o.on_plan = on_plan;
    o.on_progress = on_progress;
    o.on_note = on_note;
    o.user = &d;
    if (st == HD_OK) st = hub_pull(&folder, name, &o, err);
    if (d.begun && st == HD_OK) hd_progress_end(&d.bar);
    if (d.begun && st != HD_OK) hd_progress_clear(&d.bar);
    if (st == HD_OK) puts(folder);
    free(folder);
    hub_env_deinit(&env);
    return st;
}

int cmd_pull(int argc, char **argv) {
    const char *text = NULL;
    int64_t jobs = 4, timeout = 30, retries = 8;
    bool all = false, verify = false, quiet = false;
    const option options[] = {
        option_flag(
            "all", &all,
            "every file of the repository; else JSON, safetensors, tokenizer, template"),
        option_flag("verify", &verify, "read files that are here already, and check them too"),
        with_letter(option_int("jobs", &jobs, 1, 64, "files at once; default 4"), 'j'),
        option_int("timeout", &timeout, 1, 3600,
                   "seconds without a byte before a connection is made again; default 30"),
        option_int("retries", &retries, 0, 1000,
                   "attempts in a row that bring no byte; default 8"),
        with_letter(option_flag("quiet", &quiet, "no progress on standard error"), 'q'),
    };
    const positional repo = {.name = "REPO[@REVISION]", .value = &text};
    const command_line line = {.command = "pull",
                               .summary = "Downloads a model of the Hugging Face hub.",
                               .details = details,
                               .positionals = &repo,
                               .n_positionals = 1,
                               .options = options,
                               .n_options = (int)HD_LEN(options)};
    int code;
    if (!options_parse(&line, argc, argv, &code)) return code;
    hd_err err = {0};
    hub_name name;
    hub_options o = {.parallel = (int32_t)jobs,
                     .stall_s = (int32_t)timeout,
                     .retries = (int32_t)retries,
                     .all = all,
                     .verify = verify};
    hd_status st = hub_name_parse(&name, text, &err);
    if (st == HD_OK) st = pull(&name, o, quiet, &err);
    return st == HD_OK ? 0 : report_error(&err);
}
