/* rewards_url.c - rewards of a server: each question is the body of a POST. */
#include <stdlib.h>

#include "cli/training/posts.h"
#include "cli/training/rewards_internal.h"
#include "train/reward.h"

struct reward_url {
    rewards_options o;
    posts *posts;
};

/* What a job is about. */
typedef struct questions {
    const rewards_options *o;
    reward_question *q;
} questions;

hd_status reward_url_open(reward_url **out, const rewards_options *o, hd_err *err) {
    const posts_options p = {.option = "reward-url",
                             .url = o->url,
                             .timeout_s = o->timeout_s,
                             .most_bytes = HD_MOST_REWARD_BYTES};
    reward_url *u = calloc(1, sizeof *u);
    if (!u) return HD_FAIL(err, HD_ENOMEM, "no memory for rewards");
    *out = u;
    u->o = *o;
    return posts_open(&u->posts, &p, err);
}

void reward_url_close(reward_url *u) {
    if (!u) return;
    posts_close(u->posts);
    free(u);
}

static const char *body(void *ctx, int32_t i) {
    const questions *all = ctx;
    return all->q[i].text;
}

static hd_status reply(void *ctx, int32_t i, const char *text, size_t n, hd_err *why) {
    const questions *all = ctx;
    const reward_question *q = &all->q[i];
    return hd_reward_reply(q->rewards, q->n, q->id, text, n, why);
}

static hd_status failed(void *ctx, int32_t i, const char *why, bool *again, int64_t *pause_ns,
                        hd_err *err) {
    const questions *all = ctx;
    HD_TRY(rewards_failed(all->o, &all->q[i], why, pause_ns, err));
    *again = !all->q[i].dropped;
    return HD_OK;
}

hd_status reward_url_ask(reward_url *u, reward_question *q, int32_t n, hd_err *err) {
    questions all = {&u->o, q};
    const posts_job job = {.ctx = &all, .n = n, .body = body, .reply = reply, .failed = failed};
    return posts_run(u->posts, "", &job, err);
}
