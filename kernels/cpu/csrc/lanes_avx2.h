/* lanes.h on AVX2 + FMA + F16C: two registers of eight. */
#pragma once
#include <immintrin.h>

#define PD_ISA "avx2"

typedef struct {
    __m256 lo, hi;
} v16;

typedef struct {
    __m256 lo, hi; /* all bits of a lane, or none */
} m16;

#define PD_V16(low, high) ((v16){(low), (high)})
#define PD_NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

/* Rounding to nearest even, subnormals kept, in this thread. */
PD_INLINE void pd_exact_float_mode(void) {
    _mm_setcsr((_mm_getcsr() & ~(_MM_ROUND_MASK | _MM_FLUSH_ZERO_MASK | 0x0040u)) | _MM_ROUND_NEAREST);
}

PD_INLINE v16 v16_set(float x) { return PD_V16(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
PD_INLINE v16 v16_load(const float *p) { return PD_V16(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
PD_INLINE void v16_store(float *p, v16 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}

PD_INLINE __m256i pd_first8(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
PD_INLINE v16 v16_load_part(const float *p, int n) {
    __m256 lo = _mm256_maskload_ps(p, pd_first8(n));
    return PD_V16(lo, n > 8 ? _mm256_maskload_ps(p + 8, pd_first8(n - 8)) : _mm256_setzero_ps());
}
PD_INLINE void v16_store_part(float *p, v16 a, int n) {
    _mm256_maskstore_ps(p, pd_first8(n), a.lo);
    if (n > 8) _mm256_maskstore_ps(p + 8, pd_first8(n - 8), a.hi);
}

PD_INLINE v16 v16_load_f16(const uint16_t *p) {
    const __m128i *q = (const __m128i *)p;
    return PD_V16(_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1)));
}
PD_INLINE void v16_store_f16(uint16_t *p, v16 a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a.lo, PD_NEAREST));
    _mm_storeu_si128((__m128i *)p + 1, _mm256_cvtps_ph(a.hi, PD_NEAREST));
}

PD_INLINE __m256 pd_widen_bf16(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
PD_INLINE v16 v16_load_bf16(const uint16_t *p) {
    const __m128i *q = (const __m128i *)p;
    return PD_V16(pd_widen_bf16(_mm_loadu_si128(q)), pd_widen_bf16(_mm_loadu_si128(q + 1)));
}
/* Adding half a unit, and the last kept bit for ties, carries into the kept half; a NaN stays one and turns quiet. */
PD_INLINE __m256i pd_round_bf16(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(near, quiet, is_nan), 16);
}
PD_INLINE void v16_store_bf16(uint16_t *p, v16 a) {
    __m256i mixed = _mm256_packus_epi32(pd_round_bf16(a.lo), pd_round_bf16(a.hi));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(mixed, 0xd8));
}

PD_INLINE v16 v16_load_i8(const int8_t *p) {
    __m256i lo = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
    __m256i hi = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)));
    return PD_V16(_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi));
}

/* e4m3: sign, four bits of exponent (bias 7), three of mantissa; all ones but the sign is NaN. The bits where fp16 has
 * them are too small by 2^8, and no subnormal is one in fp32. */
PD_INLINE __m256i pd_e4m3_as_f16(const uint8_t *p) {
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    __m256i size = _mm256_and_si256(wide, _mm256_set1_epi16(0x3f80));
    __m256i nan = _mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x3f80));
    return _mm256_or_si256(_mm256_andnot_si256(_mm256_set1_epi16(0x4000), wide), nan);
}
PD_INLINE v16 v16_load_e4m3(const uint8_t *p) {
    const __m256 unit = _mm256_set1_ps(256.0f);
    __m256i halfs = pd_e4m3_as_f16(p);
    return PD_V16(_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halfs)), unit),
                  _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halfs, 1)), unit));
}

/* Eight 4-bit numbers 0..15 in each lane; the i-th as a float, times n16_unit(i): masked where it stands, since shifts
 * keep a multiplier busy here. */
typedef struct {
    __m256i lo, hi;
} n16;
PD_INLINE n16 n16_load(const uint32_t *p) {
    return (n16){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8))};
}
enum { N16_UNITS = 4 }; /* the units of i and i + N16_UNITS are equal */
PD_INLINE float n16_unit(int i) { return (float)(1 << 4 * (i & 3)); }
PD_INLINE __m256 pd_nibble8(__m256i q, int i) {
    __m256i near = i < 4 ? q : _mm256_srli_epi32(q, 16);
    return _mm256_cvtepi32_ps(_mm256_and_si256(near, _mm256_set1_epi32(15 << 4 * (i & 3))));
}
PD_INLINE v16 n16_pick(n16 q, int i) { return PD_V16(pd_nibble8(q.lo, i), pd_nibble8(q.hi, i)); }

/* Sixteen lanes of four bytes, for dot products of small integers. */
typedef struct {
    __m256i lo, hi;
} b64;
PD_INLINE b64 b64_load(const void *p) {
    return (b64){_mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
PD_INLINE void b64_store(void *p, b64 a) {
    _mm256_storeu_si256(p, a.lo);
    _mm256_storeu_si256((__m256i *)p + 1, a.hi);
}
/* The same four bytes in every lane. */
PD_INLINE b64 b64_all(const int8_t *four) {
    int32_t bits;
    memcpy(&bits, four, sizeof bits);
    return (b64){_mm256_set1_epi32(bits), _mm256_set1_epi32(bits)};
}
/* Lane i: byte i of each of four rows of sixteen. */
PD_INLINE b64 b64_across(const int8_t *r0, const int8_t *r1, const int8_t *r2, const int8_t *r3) {
    __m128i a = _mm_loadu_si128((const __m128i *)r0), b = _mm_loadu_si128((const __m128i *)r1);
    __m128i c = _mm_loadu_si128((const __m128i *)r2), d = _mm_loadu_si128((const __m128i *)r3);
    __m128i ab = _mm_unpacklo_epi8(a, b), cd = _mm_unpacklo_epi8(c, d);
    __m256i lo = _mm256_set_m128i(_mm_unpackhi_epi16(ab, cd), _mm_unpacklo_epi16(ab, cd));
    ab = _mm_unpackhi_epi8(a, b), cd = _mm_unpackhi_epi8(c, d);
    return (b64){lo, _mm256_set_m128i(_mm_unpackhi_epi16(ab, cd), _mm_unpacklo_epi16(ab, cd))};
}
/* A lane's numbers 0, 2, 4, 6 as bytes, and 1, 3, 5, 7. */
PD_INLINE b64 n16_even(n16 q) {
    const __m256i low = _mm256_set1_epi8(15);
    return (b64){_mm256_and_si256(q.lo, low), _mm256_and_si256(q.hi, low)};
}
PD_INLINE b64 n16_odd(n16 q) { return n16_even((n16){_mm256_srli_epi32(q.lo, 4), _mm256_srli_epi32(q.hi, 4)}); }

/* Sums of products of bytes, four a lane, exact: `small` of 0..15 by -127..127, at most eight additions, whose pairs
 * fit 16 bits; `full` of -128..127 by -127..127. */
typedef struct {
    __m256i lo, hi;
} small_dots, full_dots;
PD_INLINE small_dots small_dots_zero(void) { return (small_dots){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
PD_INLINE full_dots full_dots_zero(void) { return (full_dots){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
/* The compiler must not see through a chain of additions: it would make it a tree that overflows the registers. */
#define PD_CHAIN(sum) __asm__("" : "+x"((sum).lo), "+x"((sum).hi))
PD_INLINE small_dots small_dots_add(small_dots sum, b64 w, b64 x) {
    sum.lo = _mm256_add_epi16(sum.lo, _mm256_maddubs_epi16(w.lo, x.lo));
    sum.hi = _mm256_add_epi16(sum.hi, _mm256_maddubs_epi16(w.hi, x.hi));
    PD_CHAIN(sum);
    return sum;
}
PD_INLINE __m256i pd_full8(__m256i sum, __m256i w, __m256i x) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
PD_INLINE full_dots full_dots_add(full_dots sum, b64 w, b64 x) {
    sum.lo = pd_full8(sum.lo, w.lo, x.lo);
    sum.hi = pd_full8(sum.hi, w.hi, x.hi);
    PD_CHAIN(sum);
    return sum;
}
PD_INLINE v16 small_dots_end(small_dots sum) {
    const __m256i ones = _mm256_set1_epi16(1);
    return PD_V16(_mm256_cvtepi32_ps(_mm256_madd_epi16(sum.lo, ones)),
                  _mm256_cvtepi32_ps(_mm256_madd_epi16(sum.hi, ones)));
}
PD_INLINE v16 full_dots_end(full_dots sum) { return PD_V16(_mm256_cvtepi32_ps(sum.lo), _mm256_cvtepi32_ps(sum.hi)); }

/* Whole numbers of [-128, 127] as bytes, of each eight lanes 0, 2, 4, 6 before 1, 3, 5, 7: n16_even's order. */
PD_INLINE void v16_store_quads(int8_t *p, v16 a) {
    __m256i halves = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
    halves = _mm256_permute4x64_epi64(halves, 0xd8);
    __m128i low = _mm256_castsi256_si128(halves), high = _mm256_extracti128_si256(halves, 1);
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    _mm_storeu_si128((__m128i *)p, _mm_shuffle_epi8(_mm_packs_epi16(low, high), order));
}

#define PD_BINARY(name, op) \
    PD_INLINE v16 name(v16 a, v16 b) { return PD_V16(op(a.lo, b.lo), op(a.hi, b.hi)); }
PD_BINARY(v16_add, _mm256_add_ps)
PD_BINARY(v16_sub, _mm256_sub_ps)
PD_BINARY(v16_mul, _mm256_mul_ps)
PD_BINARY(v16_div, _mm256_div_ps)
PD_BINARY(v16_max, _mm256_max_ps)
PD_BINARY(v16_min, _mm256_min_ps)
#undef PD_BINARY

PD_INLINE v16 v16_sqrt(v16 a) { return PD_V16(_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)); }
PD_INLINE v16 v16_fma(v16 a, v16 b, v16 c) {
    return PD_V16(_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi));
}
PD_INLINE v16 v16_fnma(v16 a, v16 b, v16 c) {
    return PD_V16(_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi));
}
/* To the nearest whole number, ties to even. */
PD_INLINE v16 v16_round(v16 a) { return PD_V16(_mm256_round_ps(a.lo, PD_NEAREST), _mm256_round_ps(a.hi, PD_NEAREST)); }
/* 2^n for whole n of [-126, 127]. */
PD_INLINE __m256 pd_pow2(__m256 n) {
    __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
PD_INLINE v16 v16_pow2(v16 n) { return PD_V16(pd_pow2(n.lo), pd_pow2(n.hi)); }

#define PD_COMPARE(name, how) \
    PD_INLINE m16 name(v16 a, v16 b) { return (m16){_mm256_cmp_ps(a.lo, b.lo, how), _mm256_cmp_ps(a.hi, b.hi, how)}; }
PD_COMPARE(v16_lt, _CMP_LT_OQ)
PD_COMPARE(v16_le, _CMP_LE_OQ)
PD_COMPARE(v16_eq, _CMP_EQ_OQ)
#undef PD_COMPARE

PD_INLINE m16 m16_first(int n) {
    return (m16){_mm256_castsi256_ps(pd_first8(n)), _mm256_castsi256_ps(pd_first8(n - 8))};
}
/* Bit i says lane i. */
PD_INLINE uint32_t m16_bits(m16 m) {
    return (uint32_t)_mm256_movemask_ps(m.lo) | (uint32_t)_mm256_movemask_ps(m.hi) << 8;
}
/* Lanes of `yes` where m, of `no` elsewhere. */
PD_INLINE v16 v16_select(m16 m, v16 yes, v16 no) {
    return PD_V16(_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi));
}

PD_INLINE float v16_first(v16 a) { return _mm256_cvtss_f32(a.lo); }
PD_INLINE float v16_sum(v16 a) {
    __m256 eight = _mm256_add_ps(a.lo, a.hi);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
PD_INLINE float v16_top(v16 a) {
    __m256 eight = _mm256_max_ps(a.lo, a.hi);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
