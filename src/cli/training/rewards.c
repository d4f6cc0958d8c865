/* rewards.c - chooses the source of rewards, and says when a question is given up. */
#include <stdlib.h>

#include "cli/training/posts.h"
#include "cli/training/rewards_internal.h"

struct rewards {
    reward_command *command;
    reward_url *url;
};

hd_status rewards_open(rewards **out, const rewards_options *o, hd_err *err) {
    *out = NULL;
    if (o->command && o->url) {
        return HD_FAIL(err, HD_EINVAL, "give one of --reward-command and --reward-url");
    }
    rewards *r = calloc(1, sizeof *r);
    if (!r) return HD_FAIL(err, HD_ENOMEM, "no memory for rewards");
    const hd_status st = o->command ? reward_command_open(&r->command, o, err)
                                    : reward_url_open(&r->url, o, err);
    if (st == HD_OK) {
        *out = r;
    } else {
        rewards_close(r);
    }
    return st;
}

void rewards_close(rewards *r) {
    if (!r) return;
    reward_command_close(r->command);
    reward_url_close(r->url);
    free(r);
}

hd_status rewards_ask(rewards *r, reward_question *q, int32_t n, hd_err *err) {
    return r->command ? reward_command_ask(r->command, q, n, err)
                      : reward_url_ask(r->url, q, n, err);
}

hd_status rewards_failed(const rewards_options *o, reward_question *q, const char *why,
                         int64_t *pause_ns, hd_err *err) {
    *pause_ns = posts_pause_ns(q->tries++);
    if (q->tries <= o->retries) return HD_OK;
    q->dropped = true;
    if (o->drops) return HD_OK;
    return HD_FAIL(err, HD_EIO, "rewards of prompt %lld, after %d tries: %s", (long long)q->id,
                   q->tries, why);
}
