/* reward.c - questions about samples, and replies from programs that are not trusted. */
#include "train/reward.h"

#include <math.h>

#include "base/json.h"

static const double MOST_REWARD = 1e6;

/* ---- questions ---- */

static json_t *list_answers(const hd_reward_answer *answers, int32_t n) {
    json_t *list = json_array();
    for (int32_t i = 0; i < n; i++) {
        json_t *text = json_stringn(answers[i].text, answers[i].bytes);
        json_t *one = json_pack("{s:o, s:b}", "text", text, "finished", answers[i].finished);
        if (!one || json_array_append_new(list, one) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

char *hd_reward_question(int64_t id, const json_t *prompt, const hd_reward_answer *answers,
                         int32_t n) {
    static const char *const kept[] = {"messages", "tools", "checker", "thinking"};
    json_t *all =
        json_pack("{s:I, s:o}", "id", (json_int_t)id, "answers", list_answers(answers, n));
    bool whole = all != NULL;
    for (size_t i = 0; whole && i < HD_LEN(kept); i++) {
        json_t *value = json_object_get(prompt, kept[i]);
        whole = !value || json_object_set(all, kept[i], value) == 0;
    }
    char *text = whole ? hd_json_write(all, JSON_COMPACT) : NULL;
    json_decref(all);
    return text;
}

/* ---- replies ---- */

static hd_status read_rewards(double *rewards, int32_t n, const json_t *list, hd_err *err) {
    if (json_array_size(list) != (size_t)n) {
        return HD_FAIL(err, HD_EFORMAT, "%zu rewards for %d answers", json_array_size(list), n);
    }
    for (int32_t i = 0; i < n; i++) {
        const json_t *one = json_array_get(list, (size_t)i);
        const double value = json_number_value(one);
        if (!json_is_number(one) || !isfinite(value) || fabs(value) > MOST_REWARD) {
            return HD_FAIL(err, HD_EFORMAT, "reward %d is no number within 1e6", i);
        }
        rewards[i] = value;
    }
    return HD_OK;
}

static hd_status read_reply(double *rewards, int32_t n, int64_t id, const json_t *reply,
                            hd_err *err) {
    const json_t *its = json_object_get(reply, "id"), *list = json_object_get(reply, "rewards");
    if (!json_is_integer(its) || json_integer_value(its) != id) {
        return HD_FAIL(err, HD_EFORMAT, "its id is not %lld", (long long)id);
    }
    if (!json_is_array(list)) return HD_FAIL(err, HD_EFORMAT, "rewards must be an array");
    return read_rewards(rewards, n, list, err);
}

hd_status hd_reward_reply(double *rewards, int32_t n, int64_t id, const char *text,
                          size_t bytes, hd_err *err) {
    json_t *reply;
    if (bytes > HD_MOST_REWARD_BYTES) {
        return HD_FAIL(err, HD_EFORMAT, "longer than %d bytes", HD_MOST_REWARD_BYTES);
    }
    if (hd_json_parse(&reply, text, bytes, "reply", err) != HD_OK) return HD_EFORMAT;
    const hd_status st = read_reply(rewards, n, id, reply, err);
    json_decref(reply);
    return st;
}
