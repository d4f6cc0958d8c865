/* remote_internal.h - tensors whose bytes lie in memory of another process: what each is and where,
 * and one copy of all of them.
 *
 * Memory is POSIX shared memory, by name, or that of a GPU, by a CUDA IPC handle. Bytes on a GPU are
 * copied on the GPU first, if it has room, so that applying an update copies from there; the host
 * has them too, to check them. */
#ifndef HD_WEIGHTS_TORCH_REMOTE_INTERNAL_H
#define HD_WEIGHTS_TORCH_REMOTE_INTERNAL_H

#include "weights/safetensors.h"

typedef struct torch_dtype {
    const char *theirs; /* in the module torch */
    const char *file_name;
    hd_dtype type; /* HD_NONE: known, and of no use here */
    int32_t bytes;
} torch_dtype;

extern const torch_dtype torch_dtypes[];
extern const size_t torch_n_dtypes;

/* A text of the message, which outlives the reading; not ended by a 0. NULL: there is none. */
typedef struct torch_text {
    const char *at;
    size_t n;
} torch_text;

/* A tensor before its bytes are there. */
typedef struct torch_remote {
    hd_tensor tensor;
    torch_text shm;               /* its storage's name */
    const uint8_t *handle;        /* or that of memory of a GPU [HD_SHARED_HANDLE_BYTES] */
    const uint8_t *event;         /* of the work that writes this memory; NULL: it is done */
    torch_text counter;           /* PyTorch's count of users of such memory: its file, */
    size_t counter_at;            /* and which of the file's */
    size_t storage_at;            /* where the storage begins in memory of a GPU */
    size_t offset, storage_bytes; /* of its first byte in the storage; of all of the storage */
    int64_t stride[HD_MAX_RANK];  /* elements; of a view that is not contiguous */
    size_t item_bytes;            /* of an element of such a view; 0: it is contiguous */
    size_t span;                  /* from its first byte to behind its last in the storage */
} torch_remote;

typedef struct torch_remotes {
    torch_remote *list;
    size_t n, cap;
    char **names;      /* [n] */
    hd_device *device; /* NULL: tensors on a GPU are refused */
    hd_err *err;
} torch_remotes;

hd_status torch_refuse(const torch_remotes *r, const char *name, const char *why);

/* Appends a tensor of this name. */
hd_status torch_remotes_add(torch_remotes *r, torch_remote **out, torch_text name);

/* Sets type and bytes of a tensor whose shape is set. dtype NULL is refused. */
hd_status torch_remote_set_type(const torch_remotes *r, torch_remote *f,
                                const torch_dtype *dtype);

/* Refuses a tensor that reaches out of its storage. */
hd_status torch_remote_check(const torch_remotes *r, const torch_remote *f);

/* Copies all of them. */
hd_status torch_remotes_read(hd_checkpoint **out, torch_remotes *r);

/* Frees the list, and tells the senders that their memory is free, as PyTorch's receivers do. */
void torch_remotes_deinit(torch_remotes *r);

#endif
