/* fuzz_state.c - a foreign state.json: refused with a reason, or it has all that a run goes on from. */
#include <assert.h>
#include <stdint.h>

#include "train/state.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    json_t *all = NULL;
    hd_err err = {0};
    if (hd_state_parse(&all, (const char *)data, n, "state.json", &err) != HD_OK) {
        assert(!all && err.msg[0]);
        return 0;
    }
    assert(json_integer_value(json_object_get(all, "steps")) >= 0);
    assert(json_is_object(json_object_get(all, "run")));
    assert(json_is_object(json_object_get(all, "state")));
    json_decref(all);
    return 0;
}
