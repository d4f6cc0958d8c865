/* saved.h - conversations that were saved under a name: a folder with a file for each.
 *
 * A file has a head, the tokens of whole pages, and the messages of their pages as they go to other
 * servers (handover.h), FULL pages first. It is written beside and renamed when it is complete, so that
 * a kill leaves the old file or none. What is damaged, cut or of another model is refused, whatever it
 * is: the head and the tokens have a checksum, each page its digest.
 *
 * One process has a folder. Any thread may call; a file is owned by one. */
#ifndef HD_KV_SAVED_H
#define HD_KV_SAVED_H

#include "kv/disk_format.h"
#include "kv/handover.h"

enum { HD_SAVED_NAME = 100 }; /* most characters of a name */

typedef struct hd_saved hd_saved;

/* At the beginning of a file, as it is in memory. */
typedef struct hd_saved_head {
    char magic[8];
    uint32_t version, page_tokens;
    uint64_t page_bytes[HD_N_KV_GROUPS];
    uint64_t salt, weights; /* hd_page_job */
    uint32_t n_tokens, n[HD_N_KV_GROUPS];
    uint32_t unused;
    char identity[HD_DISK_IDENTITY]; /* of the server that saved it */
    uint64_t check;                  /* checksum of what is before, and of the tokens */
} hd_saved_head;

/* Opens the folder, whose files may have so many bytes, and deletes what a kill has left half written. */
hd_status hd_saved_open(hd_saved **out, const char *dir, uint64_t bytes, hd_err *err);
void hd_saved_close(hd_saved *s); /* NULL is fine */

/* 1 to HD_SAVED_NAME letters, digits and "._-", the first of which is no dot. */
hd_status hd_saved_check_name(const char *name, hd_err *err);

/* ---- writing ---- */

typedef struct hd_saved_file {
    hd_saved *store;
    int fd;
    uint64_t bytes; /* of the file; written: set aside in the quota */
    uint64_t at;
    char path[HD_SAVED_NAME + 32], name[HD_SAVED_NAME + 1];
} hd_saved_file;

/* Begins a file with a head that is filled but for magic, version and check. HD_ENOMEM: the quota has no
 * room. After HD_OK: hd_saved_finish() or hd_saved_drop(). */
hd_status hd_saved_create(hd_saved_file *f, hd_saved *s, const char *name, hd_saved_head *head,
                          const int32_t *tokens, hd_err *err);
hd_status hd_saved_add(hd_saved_file *f, const void *message, size_t n, hd_err *err);
/* In the place of an older file of the name. */
hd_status hd_saved_finish(hd_saved_file *f, hd_err *err);
void hd_saved_drop(hd_saved_file *f);

/* ---- reading ---- */

/* Opens a file, and reads its head and tokens, malloc'ed: [n_tokens + 1], of which the last is 0. own:
 * of which the file must have identity, page_tokens and page_bytes. HD_EINVAL: there is none; HD_EFORMAT:
 * it is not whole, or of another server. After HD_OK: hd_saved_end(). */
hd_status hd_saved_read(hd_saved_file *f, hd_saved *s, const char *name,
                        const hd_saved_head *own, hd_saved_head *head, int32_t **tokens,
                        hd_err *err);
/* The same of an open file, which is closed if it is refused. */
hd_status hd_saved_take(hd_saved_file *f, int fd, const hd_saved_head *own, hd_saved_head *head,
                        int32_t **tokens, hd_err *err);
/* Reads the next message. */
hd_status hd_saved_next(hd_saved_file *f, void *message, size_t n, hd_err *err);
void hd_saved_end(hd_saved_file *f);

/* ---- what is there ---- */

typedef struct hd_saved_entry {
    char name[HD_SAVED_NAME + 1];
    uint64_t bytes;
    int64_t saved_s; /* Unix seconds */
} hd_saved_entry;

/* Lists all files by name; *out: free() it. */
hd_status hd_saved_list(hd_saved *s, hd_saved_entry **out, size_t *n, hd_err *err);
hd_status hd_saved_delete(hd_saved *s, const char *name,
                          hd_err *err); /* HD_EINVAL: there is none */
void hd_saved_usage(hd_saved *s, uint64_t *used, uint64_t *limit);

#endif
