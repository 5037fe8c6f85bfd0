/* lanes.h on AVX-512 (F, BW, DQ, VL): one register. */
#pragma once
#include <immintrin.h>

#define PD_ISA "avx512"

typedef __m512 v16;
typedef __mmask16 m16;

#define PD_NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

/* Rounding to nearest even, subnormals kept, in this thread. */
PD_INLINE void pd_exact_float_mode(void) {
    _mm_setcsr((_mm_getcsr() & ~(_MM_ROUND_MASK | _MM_FLUSH_ZERO_MASK | 0x0040u)) | _MM_ROUND_NEAREST);
}

PD_INLINE v16 v16_set(float x) { return _mm512_set1_ps(x); }
PD_INLINE v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
PD_INLINE void v16_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
PD_INLINE m16 m16_first(int n) { return (m16)(n >= 16 ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1); }
PD_INLINE v16 v16_load_part(const float *p, int n) { return _mm512_maskz_loadu_ps(m16_first(n), p); }
PD_INLINE void v16_store_part(float *p, v16 a, int n) { _mm512_mask_storeu_ps(p, m16_first(n), a); }

PD_INLINE v16 v16_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
PD_INLINE void v16_store_f16(uint16_t *p, v16 a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, PD_NEAREST));
}
PD_INLINE v16 v16_load_bf16(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
/* Adding half a unit, and the last kept bit for ties, carries into the kept half; a NaN stays one and turns quiet. */
PD_INLINE void v16_store_bf16(uint16_t *p, v16 a) {
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i near = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    __m512i kept = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), quiet);
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}
PD_INLINE v16 v16_load_i8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* Eight 4-bit numbers 0..15 in each lane; the i-th as a float, times n16_unit(i). The permute reads 4 bits alone. */
typedef __m512i n16;
PD_INLINE n16 n16_load(const uint32_t *p) { return _mm512_loadu_si512(p); }
enum { N16_UNITS = 1 }; /* the units of i and i + N16_UNITS are equal */
PD_INLINE float n16_unit(int i) { return (void)i, 1.0f; }
PD_INLINE v16 n16_pick(n16 q, int i) {
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(q, (unsigned)(4 * i)), table);
}

PD_INLINE v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
PD_INLINE v16 v16_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
PD_INLINE v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
PD_INLINE v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
PD_INLINE v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
PD_INLINE v16 v16_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
PD_INLINE v16 v16_sqrt(v16 a) { return _mm512_sqrt_ps(a); }
PD_INLINE v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
PD_INLINE v16 v16_fnma(v16 a, v16 b, v16 c) { return _mm512_fnmadd_ps(a, b, c); }
/* To the nearest whole number, ties to even. */
PD_INLINE v16 v16_round(v16 a) { return _mm512_roundscale_ps(a, PD_NEAREST); }
/* 2^n for whole n of [-126, 127]. */
PD_INLINE v16 v16_pow2(v16 n) {
    __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}

PD_INLINE m16 v16_lt(v16 a, v16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
PD_INLINE m16 v16_le(v16 a, v16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
PD_INLINE m16 v16_eq(v16 a, v16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
/* Bit i says lane i. */
PD_INLINE uint32_t m16_bits(m16 m) { return m; }
/* Lanes of `yes` where m, of `no` elsewhere. */
PD_INLINE v16 v16_select(m16 m, v16 yes, v16 no) { return _mm512_mask_mov_ps(no, m, yes); }

PD_INLINE float v16_first(v16 a) { return _mm512_cvtss_f32(a); }
PD_INLINE float v16_sum(v16 a) {
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
PD_INLINE float v16_top(v16 a) {
    __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
