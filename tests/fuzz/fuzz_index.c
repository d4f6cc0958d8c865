/* fuzz_index.c - any bytes as model.safetensors.index.json beside two good shards. What is
 * accepted must find every tensor of the map, and no file outside the directory. */
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "weights/safetensors.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char in_memory[] = "/dev/shm/fuzz-index-XXXXXX", on_disk[] = "/tmp/fuzz-index-XXXXXX";
static const char *dir;

static void must(bool good) {
    if (!good) abort();
}

static void write_file(const char *name, const void *data, size_t n) {
    char *path = hd_path_join(dir, name);
    FILE *f = path ? fopen(path, "wb") : NULL;
    must(f && fwrite(data, 1, n, f) == n);
    must(fclose(f) == 0);
    free(path);
}

static void write_shard(const char *name, const char *tensor) {
    char file[200] = {0};
    int n =
        snprintf(file + 8, sizeof file - 8,
                 "{\"%s\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", tensor);
    file[0] = (char)n;
    write_file(name, file, 8 + (size_t)n + 2);
}

static void clean_up(void) {
    const char *const names[] = {"a.safetensors", "b.safetensors",
                                 "model.safetensors.index.json"};
    for (size_t i = 0; i < HD_LEN(names); i++) {
        char *path = hd_path_join(dir, names[i]);
        if (path) unlink(path);
        free(path);
    }
    rmdir(dir);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    dir = mkdtemp(in_memory);
    if (!dir) dir = mkdtemp(on_disk);
    must(dir != NULL);
    write_shard("a.safetensors", "x");
    write_shard("b.safetensors", "y");
    atexit(clean_up);
    return 0;
}

/* Looks at the document again, without the program's reader. */
static void check_again(const hd_checkpoint *c, const uint8_t *data, size_t size) {
    const char *name;
    json_t *file, *root = json_loadb((const char *)data, size, 0, NULL);
    json_object_foreach(json_object_get(root, "weight_map"), name, file) {
        const hd_tensor *t = hd_checkpoint_find(c, name);
        must(t && strcmp(t->name, name) == 0 && t->bytes == 2);
        must(strcmp(hd_checkpoint_shard_name(c, t->shard), json_string_value(file)) == 0);
        must(strchr(json_string_value(file), '/') == NULL);
    }
    json_decref(root);
    must(hd_checkpoint_count(c) == hd_checkpoint_shards(c));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    hd_checkpoint *c;
    hd_err err = {0};
    write_file("model.safetensors.index.json", data, size);
    if (hd_checkpoint_open(&c, dir, &err) == HD_OK) {
        must(err.status == HD_OK);
        check_again(c, data, size);
    } else {
        must(c == NULL && err.status != HD_OK && strncmp(err.msg, dir, strlen(dir)) == 0);
    }
    hd_checkpoint_close(c);
    return 0;
}
