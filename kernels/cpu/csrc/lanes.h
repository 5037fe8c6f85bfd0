/* The 16-lane machine that every kernel is written for.
 *
 *   v16   sixteen floats: one AVX-512 register, two of AVX2, four of NEON
 *   m16   sixteen yes/no lanes, from comparisons and m16_first
 *
 * Each operation is IEEE single precision, rounded to nearest even, subnormals kept, and gives the same bits on every
 * instruction set (payloads of NaNs aside). So there are no reciprocal estimates, sums over lanes have one fixed tree,
 * and max/min say what they do with NaN and signed zeros instead of leaving it to the hardware:
 *
 *   v16_max(a, b) = a > b ? a : b        v16_min(a, b) = a < b ? a : b        (a NaN on either side: b)
 *   v16_sum: lanes i and i + 8, then i and i + 4, then i and i + 2, then the last two; v16_top (max) likewise
 *   v16_fma(a, b, c) = a * b + c         v16_fnma(a, b, c) = c - a * b        (one rounding)
 *
 * Pointers need no alignment. `_part` forms touch lanes [0, n) only, 0 <= n <= 16; a load's other lanes are +0. */
#pragma once
#include <stdint.h>
#include <string.h>

#define PD_INLINE static inline __attribute__((always_inline))

#if defined(PD_ISA_AVX512)
#include "lanes_avx512.h"
#elif defined(PD_ISA_AVX2)
#include "lanes_avx2.h"
#elif defined(PD_ISA_NEON)
#include "lanes_neon.h"
#else
#error "build.py defines one PD_ISA_..."
#endif

PD_INLINE v16 v16_zero(void) { return v16_set(0.0f); }

PD_INLINE void pd_prefetch(const void *p) { __builtin_prefetch(p, 0, 3); }

/* One fp16 as a float, and back to the nearest even; `uint16_t` holds the bits. */
PD_INLINE float pd_from_f16(uint16_t bits) {
    uint16_t all[16] = {bits};
    return v16_first(v16_load_f16(all));
}

PD_INLINE uint16_t pd_to_f16(float x) {
    uint16_t all[16];
    v16_store_f16(all, v16_set(x));
    return all[0];
}

PD_INLINE float pd_from_e4m3(uint8_t bits) {
    uint8_t all[16] = {bits};
    return v16_first(v16_load_e4m3(all));
}

PD_INLINE float pd_from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}
