/* identity.h - drops root rights: changes to another user after the steps that need root. */
#ifndef HD_SERVER_IDENTITY_H
#define HD_SERVER_IDENTITY_H

#include <sys/types.h>

#include "base/status.h"

/* Applies to all threads that start later. user and group are names or numbers; group NULL:
 * the user's own. The process gets the supplementary groups of the user. */
hd_status identity_become(const char *user, const char *group, hd_err *err);

#endif
