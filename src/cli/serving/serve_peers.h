/* serve_peers.h - the flags of `hadal serve` for prefill and decode on different servers
 * (docs/pd.md). */
#ifndef HD_CLI_SERVE_PEERS_H
#define HD_CLI_SERVE_PEERS_H

#include "cli/options.h"
#include "pd/pd.h"

typedef struct serve_peers {
    int role;
    const char *transfer_at, *peers, *key_file;
    int64_t limit_s;
    char *key; /* owned */
} serve_peers;

serve_peers serve_peers_default(void);
void serve_peers_list(serve_peers *s, option_list *to);

/* Reads the key and fills the options, which point into s. */
hd_status serve_peers_complete(serve_peers *s, pd_options *out, hd_err *err);
void serve_peers_deinit(serve_peers *s);

#endif
