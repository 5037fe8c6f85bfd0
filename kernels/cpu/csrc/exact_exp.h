/* exp for all kernels: one polynomial, so that a vector, a tail and a single float get the same bits.
 *
 * x = n ln 2 + r with n the nearest whole number to x log2(e); exp(x) = 2^n exp(r), |r| <= 0.3466. ln 2 is taken off in
 * two pieces (Cody and Waite): with a fused subtraction the first leaves no rounding, the second at most 2^-26. exp(r)
 * is 1 + r + r^2 q(r), q of degree 4 fitted for the least greatest relative error (2^-28.2 with these coefficients),
 * evaluated by Horner's rule. 2^n is a float of its own, so the last multiplication is exact but for subnormals.
 *
 *   error     below 0.9 units in the last place of the exact value, 1 unit where that is subnormal
 *             (0.892 over all floats of the range)
 *   exp(+-0)  exactly 1
 *   n < -126  0, so from about -87.6831 down; exp(-inf) = 0
 *   n > 127   +inf, so from about 88.376 up, 0.35 before the exact value overflows
 *   NaN       NaN
 *
 * Both ends come from clamping x to where 2^n, made by its exponent bits, is 0 or inf: nothing is compared twice. */
#pragma once
#include "lanes.h"

/* For x <= 0 and NaN; the same bits as v16_exp. */
PD_INLINE v16 v16_exp_falling(v16 x) {
    x = v16_max(v16_set(-88.0f), x);
    v16 n = v16_round(v16_mul(x, v16_set(0x1.715476p+0f)));
    v16 r = v16_fnma(n, v16_set(0x1.62e430p-1f), x);
    r = v16_fnma(n, v16_set(-0x1.05c610p-29f), r);
    v16 p = v16_set(0x1.6a415cp-10f);
    p = v16_fma(p, r, v16_set(0x1.1239c6p-7f));
    p = v16_fma(p, r, v16_set(0x1.5558bcp-5f));
    p = v16_fma(p, r, v16_set(0x1.555492p-3f));
    p = v16_fma(p, r, v16_set(0x1.fffffcp-2f));
    p = v16_fma(p, r, v16_set(1.0f));
    p = v16_fma(p, r, v16_set(1.0f));
    return v16_mul(p, v16_pow2(n));
}

PD_INLINE v16 v16_exp(v16 x) { return v16_exp_falling(v16_min(v16_set(89.0f), x)); }

PD_INLINE float pd_exp(float x) { return v16_first(v16_exp(v16_set(x))); }
