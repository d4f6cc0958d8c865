/* ipc_tensors.c - see ipc_tensors.h. */
#include "weights/torch/ipc_tensors.h"

#include <stdlib.h>
#include <string.h>

#include "base/base64.h"
#include "weights/torch/remote_internal.h"

typedef uint8_t ipc_handle[HD_SHARED_HANDLE_BYTES];

static const torch_dtype *dtype_of(const char *name) {
    for (size_t i = 0; name && i < torch_n_dtypes; i++) {
        if (strcmp(torch_dtypes[i].file_name, name) == 0) return &torch_dtypes[i];
    }
    return NULL;
}

static bool read_shape(hd_tensor *t, const json_t *shape) {
    const size_t n = json_array_size(shape);
    if (!json_is_array(shape) || n > HD_MAX_RANK) return false;
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(shape, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0) return false;
        t->shape[t->rank++] = json_integer_value(v);
    }
    return true;
}

static bool read_handle(ipc_handle to, const char *text) {
    uint8_t bytes[HD_SHARED_HANDLE_BYTES + 3]; /* what base64 may ask room for */
    size_t n = 0;
    if (!text || hd_base64_room(strlen(text)) > sizeof bytes ||
        !hd_base64_decode(bytes, &n, text, strlen(text)) || n != HD_SHARED_HANDLE_BYTES) {
        return false;
    }
    memcpy(to, bytes, HD_SHARED_HANDLE_BYTES);
    return true;
}

static hd_status read_tensor(torch_remotes *r, const json_t *v, ipc_handle handle) {
    const char *name = json_string_value(json_object_get(v, "name"));
    const json_t *offset = json_object_get(v, "offset");
    torch_remote *f;
    HD_TRY(torch_remotes_add(
        r, &f, (torch_text){name, json_string_length(json_object_get(v, "name"))}));
    if (!read_shape(&f->tensor, json_object_get(v, "shape"))) {
        return torch_refuse(r, f->tensor.name, "bad shape");
    }
    HD_TRY(
        torch_remote_set_type(r, f, dtype_of(json_string_value(json_object_get(v, "dtype")))));
    if (!read_handle(handle, json_string_value(json_object_get(v, "handle")))) {
        return torch_refuse(r, f->tensor.name,
                            "bad handle: must be the base64 of a CUDA IPC handle's 64 bytes");
    }
    if (offset && (!json_is_integer(offset) || json_integer_value(offset) < 0)) {
        return torch_refuse(r, f->tensor.name, "bad offset: must be a number of bytes");
    }
    f->handle = handle;
    f->storage_at = (size_t)json_integer_value(offset);
    f->storage_bytes = f->tensor.bytes;
    return HD_OK;
}

hd_status hd_ipc_tensors_read(hd_checkpoint **out, const json_t *list, hd_device *device,
                              hd_err *err) {
    torch_remotes r = {.device = device, .err = err};
    const size_t n = json_array_size(list);
    *out = NULL;
    if (!device) {
        return HD_FAIL(err, HD_EINVAL, "cuda_ipc: the weights of this server are not on a GPU");
    }
    ipc_handle *handles = calloc(n + 1, sizeof *handles);
    if (!handles) return HD_FAIL(err, HD_ENOMEM, "no memory for %zu handles", n);
    hd_status st = HD_OK;
    for (size_t i = 0; i < n && st == HD_OK; i++) {
        st = read_tensor(&r, json_array_get(list, i), handles[i]);
    }
    if (st == HD_OK) st = torch_remotes_read(out, &r);
    torch_remotes_deinit(&r);
    free(handles);
    return st;
}
