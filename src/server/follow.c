/* follow.c - see follow.h. */
#include "server/follow.h"

#include <stdlib.h>

#include "engine/kv_disk.h"
#include "server/identity.h"
#include "server/sandbox.h"

/* kv_dir: of --kv-disk, or NULL. */
static hd_status give_up_rights(const server_options *o, const char *kv_dir, hd_err *err) {
    char note[160];
    const sandbox_paths paths = {
        .read = {o->engine.model_dir, o->engine.manifest},
          .write = {kv_dir                  },
          .ranks = true
    };
    if (o->user) HD_TRY(identity_become(o->user, o->group, err));
    return o->sandbox ? sandbox_enter(&paths, note, sizeof note, err) : HD_OK;
}

hd_status server_follow(const server_options *o, void (*started)(void *user), void *user,
                        hd_err *err) {
    char why[600] = "";
    hd_engine *engine;
    char *kv_dir = NULL;
    if (o->engine.kv_disk)
        HD_TRY(hd_kv_disk_split(&kv_dir, NULL, "kv_disk", o->engine.kv_disk, err));
    const hd_status rights = give_up_rights(o, kv_dir, err);
    free(kv_dir);
    HD_TRY(rights);
    int st = hd_engine_open(&engine, &o->engine, why, sizeof why);
    if (st == 0) {
        started(user);
        st = hd_engine_follow(engine, why, sizeof why);
        hd_engine_close(engine);
    }
    return st == 0 ? HD_OK : HD_FAIL(err, (hd_status)st, "%s", why);
}
