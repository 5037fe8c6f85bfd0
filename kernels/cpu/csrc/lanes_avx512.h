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

/* e4m3: sign, four bits of exponent (bias 7), three of mantissa; all ones but the sign is NaN. The bits where fp16 has
 * them are too small by 2^8, and no subnormal is one in fp32. */
PD_INLINE v16 v16_load_e4m3(const uint8_t *p) {
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    __m256i size = _mm256_and_si256(wide, _mm256_set1_epi16(0x3f80));
    __m256i nan = _mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x3f80));
    __m256i halfs = _mm256_or_si256(_mm256_andnot_si256(_mm256_set1_epi16(0x4000), wide), nan);
    return _mm512_mul_ps(_mm512_cvtph_ps(halfs), _mm512_set1_ps(256.0f));
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

/* Sixteen lanes of four bytes, for dot products of small integers. */
typedef __m512i b64;
PD_INLINE b64 b64_load(const void *p) { return _mm512_loadu_si512(p); }
PD_INLINE void b64_store(void *p, b64 a) { _mm512_storeu_si512(p, a); }
/* The same four bytes in every lane. */
PD_INLINE b64 b64_all(const int8_t *four) {
    int32_t bits;
    memcpy(&bits, four, sizeof bits);
    return _mm512_set1_epi32(bits);
}
/* Lane i: byte i of each of four rows of sixteen. */
PD_INLINE b64 b64_across(const int8_t *r0, const int8_t *r1, const int8_t *r2, const int8_t *r3) {
    __m512i a = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)r0));
    __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)r1));
    __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)r2));
    __m512i d = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)r3));
    __m512i low = _mm512_or_si512(a, _mm512_slli_epi32(b, 8));
    return _mm512_or_si512(low, _mm512_or_si512(_mm512_slli_epi32(c, 16), _mm512_slli_epi32(d, 24)));
}
/* A lane's numbers 0, 2, 4, 6 as bytes, and 1, 3, 5, 7. */
PD_INLINE b64 n16_even(n16 q) { return _mm512_and_si512(q, _mm512_set1_epi8(15)); }
PD_INLINE b64 n16_odd(n16 q) { return n16_even(_mm512_srli_epi32(q, 4)); }

/* Sums of products of bytes, four a lane, exact: `small` of 0..15 by -127..127, at most eight additions, whose pairs
 * fit 16 bits; `full` of -128..127 by -127..127. */
typedef __m512i small_dots;
typedef __m512i full_dots;
PD_INLINE small_dots small_dots_zero(void) { return _mm512_setzero_si512(); }
PD_INLINE full_dots full_dots_zero(void) { return _mm512_setzero_si512(); }
/* The compiler must not see through a chain of additions: it would make it a tree that overflows the registers. */
#define PD_CHAIN(sum) __asm__("" : "+v"(sum))
PD_INLINE small_dots small_dots_add(small_dots sum, b64 w, b64 x) {
    sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(w, x));
    PD_CHAIN(sum);
    return sum;
}
PD_INLINE full_dots full_dots_add(full_dots sum, b64 w, b64 x) {
    __m512i turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), turned);
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    PD_CHAIN(sum);
    return sum;
}
PD_INLINE v16 small_dots_end(small_dots sum) {
    return _mm512_cvtepi32_ps(_mm512_madd_epi16(sum, _mm512_set1_epi16(1)));
}
PD_INLINE v16 full_dots_end(full_dots sum) { return _mm512_cvtepi32_ps(sum); }

/* Whole numbers of [-128, 127] as bytes, of each eight lanes 0, 2, 4, 6 before 1, 3, 5, 7: n16_even's order. */
PD_INLINE void v16_store_quads(int8_t *p, v16 a) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    _mm_storeu_si128((__m128i *)p, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)), order));
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
