/* exp_internal.h - vectorized exp. The including file defines for its instruction set:
 * `wide`, a float register, and wide_int, its integer register; WIDE(op), the name of an
 * intrinsic; round_wide to integers, and power_wide. */
#ifndef HD_OPS_CPU_EXP_INTERNAL_H
#define HD_OPS_CPU_EXP_INTERNAL_H

#define SET(value) WIDE(set1_ps)(value)

/* exp(x) to 1 ulp: x = k ln 2 + r with |r| <= ln 2 / 2, a polynomial of degree 7 in r, and
 * 2^k in two factors, so that subnormal results and infinity are right. The operand order of
 * min and max preserves NaN. */
static inline wide exp_wide(wide x) {
    x = WIDE(min_ps)(SET(89.0f), WIDE(max_ps)(SET(-104.0f), x));
    const wide k = round_wide(WIDE(mul_ps)(x, SET(0x1.715476p+0f)));
    wide r = WIDE(fnmadd_ps)(k, SET(0x1.62e430p-1f), x);
    r = WIDE(fnmadd_ps)(k, SET(-0x1.05c610p-29f), r);
    wide p = SET(1.0f / 5040);
    p = WIDE(fmadd_ps)(p, r, SET(1.0f / 720));
    p = WIDE(fmadd_ps)(p, r, SET(1.0f / 120));
    p = WIDE(fmadd_ps)(p, r, SET(1.0f / 24));
    p = WIDE(fmadd_ps)(p, r, SET(1.0f / 6));
    p = WIDE(fmadd_ps)(p, r, SET(0.5f));
    p = WIDE(fmadd_ps)(p, r, SET(1.0f));
    p = WIDE(fmadd_ps)(p, r, SET(1.0f));
    const wide_int power = WIDE(cvtps_epi32)(k), half = WIDE(srai_epi32)(power, 1);
    const wide rest = power_wide(WIDE(sub_epi32)(power, half));
    return WIDE(mul_ps)(WIDE(mul_ps)(p, power_wide(half)), rest);
}

#endif
