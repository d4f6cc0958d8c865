/* identity.c - see identity.h. Groups are changed first, because a user without root rights
 * cannot change them. */
#define _GNU_SOURCE
#include "server/identity.h"

#include <errno.h>
#include <grp.h>
#include <pwd.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool is_number(const char *text, unsigned long *value) {
    char *end;
    errno = 0;
    *value = strtoul(text, &end, 10);
    return *text >= '0' && *text <= '9' && *end == '\0' && errno == 0 && *value < (uid_t)-1;
}

static hd_status find_user(const char *user, uid_t *uid, gid_t *gid, const char **name,
                           hd_err *err) {
    unsigned long number;
    const bool numeric = is_number(user, &number);
    const struct passwd *p = numeric ? getpwuid((uid_t)number) : getpwnam(user);
    if (!p && !numeric) return HD_FAIL(err, HD_EINVAL, "--user %s: no such user", user);
    *uid = p ? p->pw_uid : (uid_t)number;
    *gid = p ? p->pw_gid : (gid_t)number;
    *name = p ? p->pw_name : NULL;
    return HD_OK;
}

static hd_status find_group(const char *group, gid_t *gid, hd_err *err) {
    unsigned long number;
    const bool numeric = is_number(group, &number);
    const struct group *g = numeric ? getgrgid((gid_t)number) : getgrnam(group);
    if (!g && !numeric) return HD_FAIL(err, HD_EINVAL, "--group %s: no such group", group);
    *gid = g ? g->gr_gid : (gid_t)number;
    return HD_OK;
}

/* Whether no root id is left and the process cannot regain one. */
static bool is_only(uid_t uid, gid_t gid) {
    uid_t real, effective, saved;
    gid_t real_group, effective_group, saved_group;
    if (getresuid(&real, &effective, &saved) != 0) return false;
    if (getresgid(&real_group, &effective_group, &saved_group) != 0) return false;
    return real == uid && effective == uid && saved == uid && real_group == gid &&
           effective_group == gid && saved_group == gid && setuid(0) != 0;
}

hd_status identity_become(const char *user, const char *group, hd_err *err) {
    uid_t uid = 0;
    gid_t gid = 0;
    const char *name = NULL;
    HD_TRY(find_user(user, &uid, &gid, &name, err));
    if (group) HD_TRY(find_group(group, &gid, err));
    if (uid == 0)
        return HD_FAIL(err, HD_EINVAL, "--user %s is root, which serves nobody", user);
    if (geteuid() != 0) {
        return HD_FAIL(err, HD_EINVAL, "--user %s: only root can become another user", user);
    }
    const int groups = name ? initgroups(name, gid) : setgroups(0, NULL);
    if (groups != 0 || setresgid(gid, gid, gid) != 0 || setresuid(uid, uid, uid) != 0) {
        return HD_FAIL(err, HD_EIO, "cannot become --user %s: %s", user, strerror(errno));
    }
    if (!is_only(uid, gid)) return HD_FAIL(err, HD_EIO, "--user %s: root is not gone", user);
    return HD_OK;
}
