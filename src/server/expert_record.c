/* expert_record.c - writes expert records to files: a part as the engine makes it, the whole at
 * the dump. */
#include "server/expert_record.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"

enum { TAKE_BYTES = 1 << 20 };

struct expert_record {
    char *dir;
    hd_record_mode mode;
    uint8_t *bytes; /* [TAKE_BYTES] of the ticker */

    pthread_mutex_t lock; /* guards the fields below */
    bool begun;           /* there is something to dump */
    bool dumping;
    FILE *file;
    uint64_t number; /* of the recorder's record in the file */
    char *part, *path;
    hd_err failed; /* HD_OK: all bytes so far are in the file */
};

expert_record *expert_record_new(const char *dir, hd_record_mode mode) {
    expert_record *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    pthread_mutex_init(&r->lock, NULL);
    r->mode = mode;
    r->dir = dir ? strdup(dir) : NULL;
    r->bytes = malloc(TAKE_BYTES);
    if ((!dir || r->dir) && r->bytes) return r;
    expert_record_free(r);
    return NULL;
}

/* Removes a file that is not complete. */
static void drop_file(expert_record *r) {
    if (r->file) {
        fclose(r->file);
        unlink(r->part);
    }
    free(r->part);
    free(r->path);
    r->file = NULL;
    r->part = r->path = NULL;
}

void expert_record_free(expert_record *r) {
    if (!r) return;
    drop_file(r);
    pthread_mutex_destroy(&r->lock);
    free(r->dir);
    free(r->bytes);
    free(r);
}

/* ---- orders ---- */

static hd_status check_on(const expert_record *r, hd_err *err) {
    if (r->dir) return HD_OK;
    return HD_FAIL(err, HD_EINVAL,
                   "expert records are off: start the server with --expert-record-dir");
}

hd_status expert_record_start(expert_record *r, hd_engine *e, hd_err *err) {
    HD_TRY(check_on(r, err));
    HD_TRY(hd_engine_record_start(e, r->mode, err));
    pthread_mutex_lock(&r->lock);
    r->begun = true;
    r->dumping = false;
    pthread_mutex_unlock(&r->lock);
    return HD_OK;
}

hd_status expert_record_stop(expert_record *r, hd_engine *e, hd_err *err) {
    HD_TRY(check_on(r, err));
    hd_engine_record_stop(e);
    return HD_OK;
}

hd_status expert_record_dump(expert_record *r, hd_engine *e, hd_err *err) {
    HD_TRY(check_on(r, err));
    hd_engine_record_stop(e);
    pthread_mutex_lock(&r->lock);
    const bool begun = r->dumping = r->begun;
    pthread_mutex_unlock(&r->lock);
    if (begun) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "nothing is recorded: start a record first");
}

bool expert_record_is_dumped(expert_record *r, hd_err *err) {
    pthread_mutex_lock(&r->lock);
    const bool done = !r->dumping;
    if (done) *err = r->failed;
    pthread_mutex_unlock(&r->lock);
    return done;
}

/* ---- the ticker; it holds the lock ---- */

static void fail(expert_record *r, const char *what) {
    if (r->failed.status != HD_OK) return;
    HD_FAIL(&r->failed, HD_EIO, "cannot %s %s: %s", what, r->part ? r->part : r->dir,
            strerror(errno));
    HD_LOG(HD_LOG_ERROR, "expert_record_failed", hd_log_text("why", r->failed.msg));
}

static void open_file(expert_record *r, uint64_t number) {
    char name[96];
    struct timespec now;
    drop_file(r);
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(name, sizeof name, "expert_distribution_recorder_%lld.%06ld.eplb.part",
             (long long)now.tv_sec, now.tv_nsec / 1000);
    r->number = number;
    r->failed = (hd_err){0};
    r->part = hd_path_join(r->dir, name);
    name[strlen(name) - strlen(".part")] = '\0';
    r->path = hd_path_join(r->dir, name);
    r->file = r->part && r->path ? fopen(r->part, "wb") : NULL;
    if (!r->file) fail(r, "create");
}

static void write_bytes(expert_record *r, hd_recorder *from) {
    size_t n;
    while ((n = hd_recorder_take(from, r->number, r->bytes, TAKE_BYTES)) > 0) {
        if (r->file && fwrite(r->bytes, 1, n, r->file) != n) fail(r, "write");
    }
    if (r->file && fflush(r->file) != 0) fail(r, "write");
}

/* Writes how many rows there are and gives the file its name. */
static void complete(expert_record *r, const hd_recorder_state *state) {
    uint8_t rows[8];
    for (int i = 0; i < 8; i++) rows[i] = (uint8_t)(state->rows >> 8 * i);
    if (r->file && (fseek(r->file, HD_RECORD_ROWS_AT, SEEK_SET) != 0 ||
                    fwrite(rows, 1, sizeof rows, r->file) != sizeof rows)) {
        fail(r, "write");
    }
    if (r->file && fflush(r->file) != 0) fail(r, "write");
    if (r->file && r->failed.status == HD_OK && rename(r->part, r->path) != 0) {
        fail(r, "rename");
    }
    if (r->file && r->failed.status == HD_OK) {
        fclose(r->file);
        r->file = NULL;
        HD_LOG(HD_LOG_INFO, "expert_record", hd_log_text("file", r->path),
               hd_log_int("rows", (int64_t)state->rows),
               hd_log_int("dropped", (int64_t)state->dropped));
    }
    drop_file(r);
    r->begun = r->dumping = false;
}

void expert_record_tick(expert_record *r, hd_engine *e) {
    hd_recorder *from = r->dir ? hd_engine_recorder(e) : NULL;
    if (!from) return;
    pthread_mutex_lock(&r->lock);
    const bool settled = hd_engine_record_settled(e);
    const hd_recorder_state state = hd_recorder_read_state(from);
    if (state.begun != r->number) open_file(r, state.begun);
    if (state.begun) write_bytes(r, from);
    if (r->dumping && settled && state.ended) complete(r, &state);
    pthread_mutex_unlock(&r->lock);
}
