/* serve_peers.c - see serve_peers.h. */
#include "cli/serving/serve_peers.h"

#include <stdlib.h>

#include "cli/secret_key.h"

static const char *const roles[] = {"none", "prefill", "decode", "both", NULL};

serve_peers serve_peers_default(void) {
    return (serve_peers){.limit_s = 60};
}

void serve_peers_list(serve_peers *s, option_list *to) {
    const option options[] = {
        option_choice("role", &s->role, roles,
                      "compute prompts for other servers, fetch them from such, or both"),
        option_text("prefill-peers", &s->peers, "LIST",
                    "NAME=HOST:PORT,...: whom requests may name, and its --transfer-listen; "
                    "dns:HOST:PORT=PORT: all that the name resolves to"),
        option_text("transfer-listen", &s->transfer_at, "HOST:PORT",
                    "where servers fetch what they asked for; default " PD_TRANSFER_AT),
        option_text("peer-key-file", &s->key_file, "FILE",
                    "secret of all servers, needed off the loopback interface"),
        option_int("prefill-seconds", &s->limit_s, 1, 3600,
                   "after so long a prompt is computed here after all; default 60"),
    };
    option_list_add(to, options, HD_LEN(options));
}

hd_status serve_peers_complete(serve_peers *s, pd_options *out, hd_err *err) {
    const char *flag = s->peers ? "prefill-peers" : s->transfer_at ? "transfer-listen" : NULL;
    if (s->role == PD_ROLE_NONE && flag) {
        return HD_FAIL(err, HD_EINVAL, "--%s needs --role", flag);
    }
    if (s->role != PD_ROLE_NONE) {
        HD_TRY(secret_key_read(&s->key, s->key_file, "HADAL_PEER_KEY", "servers", err));
    }
    *out = (pd_options){.role = (pd_role)s->role,
                        .transfer_at = s->transfer_at,
                        .peers = s->peers,
                        .key = s->key,
                        .limit_ms = (int32_t)s->limit_s * 1000};
    return HD_OK;
}

void serve_peers_deinit(serve_peers *s) {
    free(s->key);
}
