/* identity.h - becomes an ordinary user after what only root may do is done. */
#ifndef HD_SERVER_IDENTITY_H
#define HD_SERVER_IDENTITY_H

#include <sys/types.h>

#include "base/status.h"

/* For all threads that are started later. user and group are names or numbers, group may be
 * NULL: the user's own. The user keeps the further groups that the system gives it. */
hd_status identity_become(const char *user, const char *group, hd_err *err);

#endif
