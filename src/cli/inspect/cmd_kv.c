/* cmd_kv.c - `hadal kv`: what a folder of --kv-disk has, whether it is whole, and its end. */
#include <stdio.h>
#include <string.h>

#include "base/terminal.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "kv/disk_survey.h"

static const char details[] =
    "DIR is the folder of --kv-disk DIR:GB.\n"
    "\n"
    "list   prints the model and program that its pages belong to, and how many there are\n"
    "check  reads all pages too; exit code 1 if one has a wrong checksum. A server that\n"
    "       meets such a page computes it\n"
    "drop   deletes the files, unless a server uses them";

static const char *const names[HD_N_KV_GROUPS] = {"entries", "windows"};

static void print_group(const hd_disk_survey *s, int group, bool check) {
    char each[32];
    if (!s->header.page_bytes[group]) return;
    hd_bytes_text(each, sizeof each, (double)s->header.page_bytes[group]);
    printf("%s: %d page%s of %s", names[group], s->pages[group],
           s->pages[group] == 1 ? "" : "s", each);
    if (check) printf(", %d wrong", s->wrong[group]);
    printf("\n");
}

static hd_status look(const char *dir, int32_t store, bool check, int *code, hd_err *err) {
    hd_disk_files f;
    hd_disk_survey s;
    char all[32];
    HD_TRY(hd_disk_files_open(&f, dir, store, false, err));
    const hd_status st = hd_disk_survey_read(&s, &f, dir, check, err);
    f.close(f.ctx);
    if (st != HD_OK) return st;
    if (store) printf("\nattention group %d\n", store);
    printf("%s\n%u tokens in a page, %s in files\n", s.header.identity, s.header.page_tokens,
           hd_bytes_text(all, sizeof all, (double)s.bytes));
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        print_group(&s, g, check);
        if (s.wrong[g]) *code = 1;
    }
    return HD_OK;
}

/* Attention groups in other processes have stores of their own. */
static hd_status look_at_all(const char *dir, bool check, int *code, hd_err *err) {
    HD_TRY(look(dir, 0, check, code, err));
    for (int32_t i = 1; i < HD_DISK_STORES; i++) {
        hd_err none = {0};
        const hd_status st = look(dir, i, check, code, &none);
        if (st == HD_OK || st == HD_EINVAL) continue;
        return HD_FAIL(err, st, "%s", none.msg);
    }
    return HD_OK;
}

static hd_status drop(const char *dir, hd_err *err) {
    int n, more;
    HD_TRY(hd_disk_files_delete(dir, 0, &n, err));
    for (int32_t i = 1; i < HD_DISK_STORES; i++) {
        hd_err none = {0};
        const hd_status st = hd_disk_files_delete(dir, i, &more, &none);
        if (st != HD_OK && st != HD_EINVAL) return HD_FAIL(err, st, "%s", none.msg);
        n += more;
    }
    printf("%d file%s deleted\n", n, n == 1 ? "" : "s");
    return HD_OK;
}

static hd_status run(const char *action, const char *dir, int *code, hd_err *err) {
    if (strcmp(action, "list") == 0) return look_at_all(dir, false, code, err);
    if (strcmp(action, "check") == 0) return look_at_all(dir, true, code, err);
    if (strcmp(action, "drop") == 0) return drop(dir, err);
    return HD_FAIL(err, HD_EINVAL, "'%s' is not list, check or drop", action);
}

int cmd_kv(int argc, char **argv) {
    const char *action = NULL, *dir = NULL;
    const positional where[] = {
        {.name = "list|check|drop", .value = &action},
        {.name = "DIR",             .value = &dir   }
    };
    const command_line line = {.command = "kv",
                               .summary = "Looks at KV pages on a disk.",
                               .details = details,
                               .positionals = where,
                               .n_positionals = (int)HD_LEN(where)};
    hd_err err = {0};
    int code;
    if (!options_parse(&line, argc, argv, &code)) return code;
    code = 0;
    return run(action, dir, &code, &err) == HD_OK ? code : report_error(&err);
}
