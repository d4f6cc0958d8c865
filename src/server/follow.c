/* follow.c - see follow.h. */
#include "server/follow.h"

#include "server/identity.h"
#include "server/sandbox.h"

static hd_status give_up_rights(const server_options *o, hd_err *err) {
    char note[160];
    const sandbox_paths paths = {
        .read = {o->engine.model_dir, o->engine.manifest},
          .ranks = true
    };
    if (o->user) HD_TRY(identity_become(o->user, o->group, err));
    return o->sandbox ? sandbox_enter(&paths, note, sizeof note, err) : HD_OK;
}

hd_status server_follow(const server_options *o, void (*started)(void *user), void *user,
                        hd_err *err) {
    char why[600] = "";
    hd_engine *engine;
    HD_TRY(give_up_rights(o, err));
    int st = hd_engine_open(&engine, &o->engine, why, sizeof why);
    if (st == 0) {
        started(user);
        st = hd_engine_follow(engine, why, sizeof why);
        hd_engine_close(engine);
    }
    return st == 0 ? HD_OK : HD_FAIL(err, (hd_status)st, "%s", why);
}
