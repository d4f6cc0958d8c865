/* secret_key.h - the secret that ranks, or servers, share. */
#ifndef HD_CLI_SECRET_KEY_H
#define HD_CLI_SECRET_KEY_H

#include "base/status.h"

/* Reads the first line of a file, or of the environment variable if file is NULL. *key: NULL if
 * there is neither; free() it. of: whose it is, for errors. */
hd_status secret_key_read(char **key, const char *file, const char *variable, const char *of,
                          hd_err *err);

#endif
