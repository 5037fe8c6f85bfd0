/* exp and log in double, of nothing but IEEE operations in a fixed order: the same bits on every instruction set and
 * with every libc. Written for a scalar; loops over them become vectors, which changes no bit as no operation crosses
 * elements. Within 1e-15 of the truth, relatively, over the ranges that sampling has. */
#pragma once
#include <stdint.h>
#include <string.h>

static const double LN2_HIGH = 0x1.62e42fefa38p-1; /* 11 trailing zero bits: n * LN2_HIGH is exact for |n| <= 2^11 */
static const double LN2_LOW = 0x1.ef35793c7673p-45;

static inline double double_of_bits(int64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline int64_t bits_of_double(double value) {
    int64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* exp(x) for x <= 0 (-infinity too); below -700 it is exp(-700), 1e-304.
 *
 * x = n ln 2 + r with |r| <= ln 2 / 2, exp(x) = 2^n exp(r); exp(r) is its Taylor series to r^13 (the rest is 4e-18).
 * Adding 1.5 * 2^52 rounds to an integer and leaves it in the low bits. */
static inline double exp_of_negative(double x) {
    const double shift = 0x1.8p52;
    x = x > -700.0 ? x : -700.0;
    const double shifted = __builtin_fma(x, 0x1.71547652b82fep0, shift);
    const double n = shifted - shift;
    const double r = __builtin_fma(-n, LN2_LOW, __builtin_fma(-n, LN2_HIGH, x));
    double sum = 1.0 / 6227020800.0;
    sum = __builtin_fma(sum, r, 1.0 / 479001600.0);
    sum = __builtin_fma(sum, r, 1.0 / 39916800.0);
    sum = __builtin_fma(sum, r, 1.0 / 3628800.0);
    sum = __builtin_fma(sum, r, 1.0 / 362880.0);
    sum = __builtin_fma(sum, r, 1.0 / 40320.0);
    sum = __builtin_fma(sum, r, 1.0 / 5040.0);
    sum = __builtin_fma(sum, r, 1.0 / 720.0);
    sum = __builtin_fma(sum, r, 1.0 / 120.0);
    sum = __builtin_fma(sum, r, 1.0 / 24.0);
    sum = __builtin_fma(sum, r, 1.0 / 6.0);
    sum = __builtin_fma(sum, r, 0.5);
    sum = __builtin_fma(sum, r, 1.0);
    sum = __builtin_fma(sum, r, 1.0);
    const int64_t power = (bits_of_double(shifted) - bits_of_double(shift) + 1023) << 52;
    return sum * double_of_bits(power);
}

/* log(x) for finite x >= 1.
 *
 * x = 2^n m with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh(f), f = (m - 1) / (m + 1), by its series to f^23. */
static inline double log_of_large(double x) {
    const int64_t bits = bits_of_double(x);
    const int64_t above = bits - 0x3fe6a09e667f3bcd; /* the bits of sqrt(1/2) */
    const int64_t n = above >> 52;
    const double m = double_of_bits(bits - n * (INT64_C(1) << 52));
    const double f = (m - 1.0) / (m + 1.0), square = f * f;
    double sum = 1.0 / 23.0;
    for (int odd = 21; odd >= 1; odd -= 2) sum = __builtin_fma(sum, square, 1.0 / odd);
    return __builtin_fma((double)n, LN2_HIGH, __builtin_fma((double)n, LN2_LOW, 2.0 * f * sum));
}
