/* kv_saved.h - conversations whose pages are saved in a folder under a name, and brought back. */
#ifndef HD_SERVER_KV_SAVED_H
#define HD_SERVER_KV_SAVED_H

#include "api/params.h"
#include "base/status.h"
#include "hadal.h"

typedef struct kv_saved kv_saved;

/* Opens the folder of "DIR:GB"; NULL: there is none, and all calls are refused. *dir: free() it. */
hd_status kv_saved_open(kv_saved **out, char **dir, const char *option, hd_err *err);
/* Once the model is loaded. Refuses engines whose pages cannot be saved. */
hd_status kv_saved_start(kv_saved *k, hd_engine *e, const hd_engine_options *o, hd_err *err);
/* Ends what runs, and waits for it. NULL is fine. */
void kv_saved_stop(kv_saved *k);
void kv_saved_close(kv_saved *k);

extern const api_family kv_save_family, kv_restore_family, kv_delete_family;

#endif
