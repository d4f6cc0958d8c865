/* hub_env.h - environment variables of the Hugging Face tools: cache folder, endpoint and
 * token. */
#ifndef HD_CLI_HUB_ENV_H
#define HD_CLI_HUB_ENV_H

#include "base/status.h"

typedef struct hub_env {
    char *cache;          /* HF_HUB_CACHE, HF_HOME/hub, else ~/.cache/huggingface/hub */
    char *token;          /* HF_TOKEN, or the file that logging in writes; NULL: none */
    const char *endpoint; /* HF_ENDPOINT, else https://huggingface.co */
    const char *ca_file;  /* SSL_CERT_FILE; NULL: the system's */
} hub_env;

/* HD_EINVAL: no variable says where the cache is. Release with hub_env_deinit() in any case. */
hd_status hub_env_read(hub_env *out, hd_err *err);
void hub_env_deinit(hub_env *e);

#endif
