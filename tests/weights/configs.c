/* configs.c - config files for the tests of weights. */
#include "check.h"

#include "weights/configs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"

static void path_of(char *out, size_t n, const char *name) {
    snprintf(out, n, "tests/configs/%s.json", name);
}

char *config_text(const char *name) {
    char path[128], *text = NULL;
    size_t n;
    path_of(path, sizeof path, name);
    assert_int_equal(hd_file_read(&text, &n, path, 1 << 20, NULL), HD_OK);
    return text;
}

hd_model_spec *config_open(const char *name) {
    char path[128];
    hd_err err = {0};
    hd_model_spec *s;
    path_of(path, sizeof path, name);
    if (hd_model_spec_open(&s, path, &err) != HD_OK) fail_msg("%s", err.msg);
    return s;
}

static void write_text(const char *path, const char *text) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, strlen(text), f), strlen(text));
    assert_int_equal(fclose(f), 0);
}

hd_status config_open_text(hd_model_spec **out, const char *text, const char *generation,
                           hd_err *err) {
    char dir[] = P_tmpdir "/hadal_test_XXXXXX", file[64], extra[64];
    assert_non_null(mkdtemp(dir));
    snprintf(file, sizeof file, "%s/config.json", dir);
    snprintf(extra, sizeof extra, "%s/generation_config.json", dir);
    write_text(file, text);
    if (generation) write_text(extra, generation);
    hd_status st = hd_model_spec_open(out, dir, err);
    unlink(file);
    unlink(extra);
    rmdir(dir);
    return st;
}

hd_status config_open_changed(hd_model_spec **out, const char *name, const char *changes,
                              const char *removed, hd_err *err) {
    char path[128];
    json_t *root, *patch;
    path_of(path, sizeof path, name);
    assert_int_equal(hd_json_load(&root, path, 1 << 20, NULL), HD_OK);
    assert_int_equal(hd_json_parse(&patch, changes, strlen(changes), "changes", NULL), HD_OK);
    assert_int_equal(json_object_update(root, patch), 0);
    if (removed) assert_int_equal(json_object_del(root, removed), 0);
    char *text = json_dumps(root, 0);
    assert_non_null(text);
    json_decref(patch);
    json_decref(root);
    hd_status st = config_open_text(out, text, NULL, err);
    free(text);
    return st;
}

hd_model_spec *config_changed(const char *name, const char *changes) {
    hd_err err = {0};
    hd_model_spec *s;
    hd_status st = config_open_changed(&s, name, changes, NULL, &err);
    if (st != HD_OK) fail_msg("%s with %s: %s", name, changes, err.msg);
    return s;
}
