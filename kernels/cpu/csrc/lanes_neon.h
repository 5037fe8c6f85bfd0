/* lanes.h on 64-bit NEON: four registers of four. Cross-compiled, not yet run on hardware. */
#pragma once
#include <arm_neon.h>

#define PD_ISA "neon"

typedef struct {
    float32x4_t q[4];
} v16;

typedef struct {
    uint32x4_t q[4]; /* all bits of a lane, or none */
} m16;

#define PD_EACH(i) for (int i = 0; i < 4; i++)

/* Rounding to nearest even (FPCR.RMode 0), subnormals kept (FZ, FZ16 off), NaNs carried (DN off), in this thread. */
PD_INLINE void pd_exact_float_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    mode &= ~((3ull << 22) | (1ull << 24) | (1ull << 25) | (1ull << 19));
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
}

PD_INLINE v16 v16_set(float x) {
    v16 r;
    PD_EACH(i) r.q[i] = vdupq_n_f32(x);
    return r;
}
PD_INLINE v16 v16_load(const float *p) {
    v16 r;
    PD_EACH(i) r.q[i] = vld1q_f32(p + 4 * i);
    return r;
}
PD_INLINE void v16_store(float *p, v16 a) { PD_EACH(i) vst1q_f32(p + 4 * i, a.q[i]); }
PD_INLINE v16 v16_load_part(const float *p, int n) {
    float all[16] = {0};
    memcpy(all, p, (size_t)n * sizeof *p);
    return v16_load(all);
}
PD_INLINE void v16_store_part(float *p, v16 a, int n) {
    float all[16];
    v16_store(all, a);
    memcpy(p, all, (size_t)n * sizeof *p);
}

PD_INLINE v16 v16_load_f16(const uint16_t *p) {
    v16 r;
    PD_EACH(i) r.q[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
    return r;
}
PD_INLINE void v16_store_f16(uint16_t *p, v16 a) {
    PD_EACH(i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.q[i])));
}
PD_INLINE v16 v16_load_bf16(const uint16_t *p) {
    v16 r;
    PD_EACH(i) r.q[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
    return r;
}
/* Adding half a unit, and the last kept bit for ties, carries into the kept half; a NaN stays one and turns quiet. */
PD_INLINE void v16_store_bf16(uint16_t *p, v16 a) {
    PD_EACH(i) {
        uint32x4_t bits = vreinterpretq_u32_f32(a.q[i]);
        uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        uint32x4_t near = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
        vst1_u16(p + 4 * i, vshrn_n_u32(vbslq_u32(vceqq_f32(a.q[i], a.q[i]), near, quiet), 16));
    }
}
PD_INLINE v16 v16_load_i8(const int8_t *p) {
    v16 r;
    int8x16_t bytes = vld1q_s8(p);
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    r.q[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
    r.q[1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(low)));
    r.q[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
    r.q[3] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)));
    return r;
}

/* e4m3: sign, four bits of exponent (bias 7), three of mantissa; all ones but the sign is NaN. The bits where fp16 has
 * them are too small by 2^8, and no subnormal is one in fp32. */
PD_INLINE uint16x8_t pd_e4m3_as_f16(int8x8_t bytes) {
    uint16x8_t wide = vreinterpretq_u16_s16(vshlq_n_s16(vmovl_s8(bytes), 7));
    uint16x8_t nan = vceqq_u16(vandq_u16(wide, vdupq_n_u16(0x3f80)), vdupq_n_u16(0x3f80));
    return vorrq_u16(vandq_u16(wide, vdupq_n_u16(0xbfff)), nan);
}
PD_INLINE v16 v16_load_e4m3(const uint8_t *p) {
    v16 r;
    int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
    uint16x8_t low = pd_e4m3_as_f16(vget_low_s8(bytes)), high = pd_e4m3_as_f16(vget_high_s8(bytes));
    r.q[0] = vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(low)));
    r.q[1] = vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(low)));
    r.q[2] = vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(high)));
    r.q[3] = vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(high)));
    PD_EACH(i) r.q[i] = vmulq_n_f32(r.q[i], 256.0f);
    return r;
}

/* Eight 4-bit numbers 0..15 in each lane; the i-th as a float, times n16_unit(i). */
typedef struct {
    uint32x4_t q[4];
} n16;
PD_INLINE n16 n16_load(const uint32_t *p) {
    n16 r;
    PD_EACH(i) r.q[i] = vld1q_u32(p + 4 * i);
    return r;
}
enum { N16_UNITS = 1 }; /* the units of i and i + N16_UNITS are equal */
PD_INLINE float n16_unit(int i) { return (void)i, 1.0f; }
PD_INLINE v16 n16_pick(n16 q, int k) {
    v16 r;
    PD_EACH(i) r.q[i] = vcvtq_f32_u32(vandq_u32(vshlq_u32(q.q[i], vdupq_n_s32(-4 * k)), vdupq_n_u32(15)));
    return r;
}

/* Sixteen lanes of four bytes, for dot products of small integers. */
typedef struct {
    int8x16_t q[4];
} b64;
PD_INLINE b64 b64_load(const void *p) {
    b64 r;
    PD_EACH(i) r.q[i] = vld1q_s8((const int8_t *)p + 16 * i);
    return r;
}
PD_INLINE void b64_store(void *p, b64 a) { PD_EACH(i) vst1q_s8((int8_t *)p + 16 * i, a.q[i]); }
/* The same four bytes in every lane. */
PD_INLINE b64 b64_all(const int8_t *four) {
    int32_t bits;
    memcpy(&bits, four, sizeof bits);
    b64 r;
    PD_EACH(i) r.q[i] = vreinterpretq_s8_s32(vdupq_n_s32(bits));
    return r;
}
/* Lane i: byte i of each of four rows of sixteen. */
PD_INLINE b64 b64_across(const int8_t *r0, const int8_t *r1, const int8_t *r2, const int8_t *r3) {
    int8x16x2_t ab = vzipq_s8(vld1q_s8(r0), vld1q_s8(r1)), cd = vzipq_s8(vld1q_s8(r2), vld1q_s8(r3));
    b64 r;
    for (int i = 0; i < 2; i++) {
        int16x8x2_t both = vzipq_s16(vreinterpretq_s16_s8(ab.val[i]), vreinterpretq_s16_s8(cd.val[i]));
        r.q[2 * i] = vreinterpretq_s8_s16(both.val[0]);
        r.q[2 * i + 1] = vreinterpretq_s8_s16(both.val[1]);
    }
    return r;
}
/* A lane's numbers 0, 2, 4, 6 as bytes, and 1, 3, 5, 7. */
PD_INLINE b64 n16_even(n16 q) {
    b64 r;
    PD_EACH(i) r.q[i] = vreinterpretq_s8_u32(vandq_u32(q.q[i], vdupq_n_u32(0x0f0f0f0f)));
    return r;
}
PD_INLINE b64 n16_odd(n16 q) {
    PD_EACH(i) q.q[i] = vshrq_n_u32(q.q[i], 4);
    return n16_even(q);
}

/* Sums of products of bytes, four a lane, exact: `small` of 0..15 by -127..127, `full` of -128..127 by -127..127. */
typedef struct {
    int32x4_t q[4];
} small_dots, full_dots;
PD_INLINE full_dots full_dots_zero(void) {
    full_dots r;
    PD_EACH(i) r.q[i] = vdupq_n_s32(0);
    return r;
}
PD_INLINE full_dots full_dots_add(full_dots sum, b64 w, b64 x) {
    PD_EACH(i) {
        int16x8_t low = vmull_s8(vget_low_s8(w.q[i]), vget_low_s8(x.q[i]));
        int16x8_t high = vmull_s8(vget_high_s8(w.q[i]), vget_high_s8(x.q[i]));
        sum.q[i] = vaddq_s32(sum.q[i], vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
    }
    return sum;
}
PD_INLINE v16 full_dots_end(full_dots sum) {
    v16 r;
    PD_EACH(i) r.q[i] = vcvtq_f32_s32(sum.q[i]);
    return r;
}
PD_INLINE small_dots small_dots_zero(void) { return full_dots_zero(); }
PD_INLINE small_dots small_dots_add(small_dots sum, b64 w, b64 x) { return full_dots_add(sum, w, x); }
PD_INLINE v16 small_dots_end(small_dots sum) { return full_dots_end(sum); }

/* Whole numbers of [-128, 127] as bytes, of each eight lanes 0, 2, 4, 6 before 1, 3, 5, 7: n16_even's order. */
PD_INLINE void v16_store_quads(int8_t *p, v16 a) {
    static const uint8_t order[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
    int16x8_t low = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(a.q[0])), vmovn_s32(vcvtnq_s32_f32(a.q[1])));
    int16x8_t high = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(a.q[2])), vmovn_s32(vcvtnq_s32_f32(a.q[3])));
    vst1q_s8(p, vqtbl1q_s8(vcombine_s8(vmovn_s16(low), vmovn_s16(high)), vld1q_u8(order)));
}

PD_INLINE float32x4_t pd_max4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
PD_INLINE float32x4_t pd_min4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }

#define PD_BINARY(name, op)             \
    PD_INLINE v16 name(v16 a, v16 b) {  \
        v16 r;                          \
        PD_EACH(i) r.q[i] = op(a.q[i], b.q[i]); \
        return r;                       \
    }
PD_BINARY(v16_add, vaddq_f32)
PD_BINARY(v16_sub, vsubq_f32)
PD_BINARY(v16_mul, vmulq_f32)
PD_BINARY(v16_div, vdivq_f32)
PD_BINARY(v16_max, pd_max4)
PD_BINARY(v16_min, pd_min4)
#undef PD_BINARY

PD_INLINE v16 v16_sqrt(v16 a) {
    v16 r;
    PD_EACH(i) r.q[i] = vsqrtq_f32(a.q[i]);
    return r;
}
PD_INLINE v16 v16_fma(v16 a, v16 b, v16 c) {
    v16 r;
    PD_EACH(i) r.q[i] = vfmaq_f32(c.q[i], a.q[i], b.q[i]);
    return r;
}
PD_INLINE v16 v16_fnma(v16 a, v16 b, v16 c) {
    v16 r;
    PD_EACH(i) r.q[i] = vfmsq_f32(c.q[i], a.q[i], b.q[i]);
    return r;
}
/* To the nearest whole number, ties to even. */
PD_INLINE v16 v16_round(v16 a) {
    v16 r;
    PD_EACH(i) r.q[i] = vrndnq_f32(a.q[i]);
    return r;
}
/* 2^n for whole n of [-126, 127]. */
PD_INLINE v16 v16_pow2(v16 n) {
    v16 r;
    PD_EACH(i) r.q[i] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.q[i]), vdupq_n_s32(127)), 23));
    return r;
}

#define PD_COMPARE(name, op)            \
    PD_INLINE m16 name(v16 a, v16 b) {  \
        m16 r;                          \
        PD_EACH(i) r.q[i] = op(a.q[i], b.q[i]); \
        return r;                       \
    }
PD_COMPARE(v16_lt, vcltq_f32)
PD_COMPARE(v16_le, vcleq_f32)
PD_COMPARE(v16_eq, vceqq_f32)
#undef PD_COMPARE

PD_INLINE m16 m16_first(int n) {
    static const int32_t numbers[4] = {0, 1, 2, 3};
    m16 r;
    PD_EACH(i) r.q[i] = vcgtq_s32(vdupq_n_s32(n - 4 * i), vld1q_s32(numbers));
    return r;
}
/* Bit i says lane i. */
PD_INLINE uint32_t m16_bits(m16 m) {
    uint32_t all[16], bits = 0;
    PD_EACH(i) vst1q_u32(all + 4 * i, m.q[i]);
    for (int i = 0; i < 16; i++) bits |= (all[i] & 1u) << i;
    return bits;
}
/* Lanes of `yes` where m, of `no` elsewhere. */
PD_INLINE v16 v16_select(m16 m, v16 yes, v16 no) {
    v16 r;
    PD_EACH(i) r.q[i] = vbslq_f32(m.q[i], yes.q[i], no.q[i]);
    return r;
}

PD_INLINE float v16_first(v16 a) { return vgetq_lane_f32(a.q[0], 0); }
PD_INLINE float v16_sum(v16 a) {
    float32x4_t four = vaddq_f32(vaddq_f32(a.q[0], a.q[2]), vaddq_f32(a.q[1], a.q[3]));
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
PD_INLINE float v16_top(v16 a) {
    float32x4_t four = pd_max4(pd_max4(a.q[0], a.q[2]), pd_max4(a.q[1], a.q[3]));
    float32x4_t two = pd_max4(four, vextq_f32(four, four, 2));
    float32x4_t one = pd_max4(two, vextq_f32(two, two, 1));
    return vgetq_lane_f32(one, 0);
}
