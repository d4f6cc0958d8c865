/* fuzz_reward.c - replies of reward programs: refused with a reason, or all rewards are numbers within
 * the bound. */
#include <assert.h>
#include <math.h>
#include <stdint.h>

#include "train/reward.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    double rewards[3] = {(double)NAN, (double)NAN, (double)NAN};
    hd_err err = {0};
    if (hd_reward_reply(rewards, 3, 7, (const char *)data, n, &err) != HD_OK) {
        assert(err.status == HD_EFORMAT && err.msg[0]);
        return 0;
    }
    for (int i = 0; i < 3; i++) assert(fabs(rewards[i]) <= 1e6);
    return 0;
}
