/* How a weight matrix [out, in] lies in memory, and how it becomes fp32.
 *
 * A panel holds 32 outputs (columns: lanes of two v16); the last one is padded. Inside a panel k ascends, so a product
 * reads weights strictly forward. A k of a float format is a row of 32 values; quantised formats come in groups of 32 k:
 *
 *   PD_F32           float[32] a k
 *   PD_F16, PD_BF16  uint16[32] a k
 *   PD_Q8            fp16 d[32], int8 q[32 k][32]                      w = d * q
 *   PD_Q4_0          fp16 d[32], uint32 q[4][32]                       w = d * q + m, m = -8 d
 *   PD_Q4_1          fp16 d[32], fp16 m[32], uint32 q[4][32]           w = d * q + m
 *   PD_K4            fp16 d[32], fp16 m[32], int8 s[32], int8 t[32], uint32 q[4][32]
 *                                                                      w = (d * s) * q + (m * t)
 *   PD_K8            fp16 d[32], fp16 m[32], int8 s[2][32], int8 t[2][32], int8 q[32 k][32]
 *                                                                      the same, s and t for 16 k each
 *   PD_F8            float d[32], e4m3 q[32 k][32]                     w = d * q
 *
 * A uint32 of the 4-bit formats holds its column's next eight k, the first in the lowest bits. The products d * q,
 * d * s, (d * s) * q and m * t are exact in fp32 (11 bits of an fp16, 7 of each integer at most), so each weight is
 * rounded at most once, as in the file's definition; but a zero of PD_Q4_0 is +0 where d * (q - 8) may be -0. The K
 * formats hold every format of ggml that has two levels of scales, those without a minimum by m * t = -0, which adds
 * nothing even to a zero. */
#pragma once
#include "lanes.h"
#include "perdure_cpu.h"

/* Rows up to which the chains of both halves of a panel stay in registers. */
#if defined(PD_ISA_AVX512)
enum { PD_ROWS_TOGETHER = 8 };
#elif defined(PD_ISA_AVX2)
enum { PD_ROWS_TOGETHER = 1 };
#else
enum { PD_ROWS_TOGETHER = 2 };
#endif

enum { PD_PANEL = 32, PD_GROUP = 32 };

/* Bytes of 32 k of a panel. */
PD_INLINE int64_t pd_group_bytes(int format) {
    switch (format) {
    case PD_F32: return 4 * PD_PANEL * PD_GROUP;
    case PD_F16:
    case PD_BF16: return 2 * PD_PANEL * PD_GROUP;
    case PD_Q8: return (2 + PD_GROUP) * PD_PANEL;
    case PD_Q4_0: return (2 + PD_GROUP / 2) * PD_PANEL;
    case PD_Q4_1: return (4 + PD_GROUP / 2) * PD_PANEL;
    case PD_K4: return (6 + PD_GROUP / 2) * PD_PANEL;
    case PD_K8: return (8 + PD_GROUP) * PD_PANEL;
    default: return (4 + PD_GROUP) * PD_PANEL;
    }
}

/* Bytes of a panel; only float formats have a last group of fewer than 32 k. */
PD_INLINE int64_t pd_panel_bytes(int format, int32_t in) { return pd_group_bytes(format) / PD_GROUP * in; }

PD_INLINE const uint8_t *pd_panel(const pd_matrix *w, int64_t panel, int64_t k) {
    return (const uint8_t *)w->panels + panel * pd_panel_bytes(w->format, w->in) +
           k * (pd_group_bytes(w->format) / PD_GROUP);
}

/* Where unpacked weights go, k by k: into the chains of `rows` rows (a constant, so that they stay in registers), or,
 * with rows = 0, to memory as float[32] a k. */
typedef struct {
    const float *x; /* [rows], ldx apart, at the group's first k */
    int64_t ldx;
    float *to;
} pd_sink;

/* 16 weights of the k-th row: columns 0..15 (half 0) or 16..31 (half 1). */
PD_INLINE void pd_take(const int rows, const int half, pd_sink sink, v16 (*acc)[2], int k, v16 w) {
    if (rows == 0) v16_store(sink.to + k * PD_PANEL + 16 * half, w);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc[r][half] = v16_fma(v16_set(sink.x[r * sink.ldx + k]), w, acc[r][half]);
}

/* Keeps the compiler from mixing the work of different k, which would cost it registers. */
#define PD_IN_ORDER() __asm__ volatile("" ::: "memory")

/* The walks below go through 32 k of one half, or of both at once (half = BOTH). Few rows have too few chains to keep
 * the multipliers busy unless both halves go along together; the chains of more rows fill the registers, so that one
 * half does its 32 k before the other begins. All arguments but pointers are constants. */
enum { BOTH = 2 };
#define PD_WALK(rows, walk, ...)              \
    if ((rows) <= PD_ROWS_TOGETHER) {         \
        walk(rows, BOTH, __VA_ARGS__);        \
    } else {                                  \
        walk(rows, 0, __VA_ARGS__);           \
        walk(rows, 1, __VA_ARGS__);           \
    }

PD_INLINE void pd_walk_q8(const int rows, const int half, const uint8_t *group, pd_sink sink, v16 (*acc)[2]) {
    const int8_t *q = (const int8_t *)(group + 2 * PD_PANEL);
    v16 d0 = v16_load_f16((const uint16_t *)group), d1 = v16_load_f16((const uint16_t *)group + 16);
#pragma GCC unroll 8
    for (int k = 0; k < PD_GROUP; k++, q += PD_PANEL) {
        PD_IN_ORDER();
        if (half != 1) pd_take(rows, 0, sink, acc, k, v16_mul(d0, v16_load_i8(q)));
        if (half != 0) pd_take(rows, 1, sink, acc, k, v16_mul(d1, v16_load_i8(q + 16)));
    }
}

/* d * q + m. `scale` undoes n16_unit(i), which is exact; in memory, since the chains need the registers. */
typedef float pd_scales[N16_UNITS][16];

PD_INLINE void pd_walk_q4(const int rows, const int half, const uint32_t *q, pd_scales *scale, v16 m0, v16 m1,
                          pd_sink sink, v16 (*acc)[2]) {
#pragma GCC unroll 1
    for (int k = 0; k < PD_GROUP; k += 8, q += PD_PANEL) {
        PD_IN_ORDER();
        n16 q0 = n16_load(q), q1 = n16_load(q + 16);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            if (half == BOTH) PD_IN_ORDER();
            v16 d0 = v16_load(scale[0][i % N16_UNITS]), d1 = v16_load(scale[1][i % N16_UNITS]);
            if (half != 1) pd_take(rows, 0, sink, acc, k + i, v16_fma(d0, n16_pick(q0, i), m0));
            if (half != 0) pd_take(rows, 1, sink, acc, k + i, v16_fma(d1, n16_pick(q1, i), m1));
        }
    }
}

PD_INLINE void pd_unpack_nibbles(const int rows, const uint32_t *q, v16 d0, v16 d1, v16 m0, v16 m1, pd_sink sink,
                                 v16 (*acc)[2]) {
    pd_scales scale[2];
#pragma GCC unroll 4
    for (int i = 0; i < N16_UNITS; i++) {
        v16_store(scale[0][i], v16_mul(d0, v16_set(1.0f / n16_unit(i))));
        v16_store(scale[1][i], v16_mul(d1, v16_set(1.0f / n16_unit(i))));
    }
    __asm__ volatile("" : : "r"(scale) : "memory");
    PD_WALK(rows, pd_walk_q4, q, scale, m0, m1, sink, acc)
}

/* PD_Q4_0 has m = -8 d. */
PD_INLINE void pd_unpack_q4(const int rows, const int format, const uint8_t *group, pd_sink sink, v16 (*acc)[2]) {
    const uint16_t *halfs = (const uint16_t *)group;
    const uint32_t *q = (const uint32_t *)(group + (format == PD_Q4_1 ? 4 : 2) * PD_PANEL);
    v16 d0 = v16_load_f16(halfs), m0 = format == PD_Q4_1 ? v16_load_f16(halfs + 32) : v16_mul(d0, v16_set(-8.0f));
    v16 d1 = v16_load_f16(halfs + 16), m1 = format == PD_Q4_1 ? v16_load_f16(halfs + 48) : v16_mul(d1, v16_set(-8.0f));
    pd_unpack_nibbles(rows, q, d0, d1, m0, m1, sink, acc);
}

/* d * s of 16 columns. */
PD_INLINE v16 pd_scaled(const uint16_t *d, const int8_t *s) { return v16_mul(v16_load_f16(d), v16_load_i8(s)); }

PD_INLINE void pd_unpack_k4(const int rows, const uint8_t *group, pd_sink sink, v16 (*acc)[2]) {
    const uint16_t *d = (const uint16_t *)group, *m = d + PD_PANEL;
    const int8_t *s = (const int8_t *)(m + PD_PANEL), *t = s + PD_PANEL;
    pd_unpack_nibbles(rows, (const uint32_t *)(t + PD_PANEL), pd_scaled(d, s), pd_scaled(d + 16, s + 16),
                      pd_scaled(m, t), pd_scaled(m + 16, t + 16), sink, acc);
}

/* 16 k from the group's `first` on. */
PD_INLINE void pd_walk_k8(const int rows, const int half, const int first, const int8_t *q, v16 d0, v16 d1, v16 m0,
                          v16 m1, pd_sink sink, v16 (*acc)[2]) {
#pragma GCC unroll 8
    for (int k = first; k < first + 16; k++, q += PD_PANEL) {
        PD_IN_ORDER();
        if (half != 1) pd_take(rows, 0, sink, acc, k, v16_fma(d0, v16_load_i8(q), m0));
        if (half != 0) pd_take(rows, 1, sink, acc, k, v16_fma(d1, v16_load_i8(q + 16), m1));
    }
}

PD_INLINE void pd_unpack_k8(const int rows, const uint8_t *group, pd_sink sink, v16 (*acc)[2]) {
    const uint16_t *d = (const uint16_t *)group, *m = d + PD_PANEL;
    const int8_t *s = (const int8_t *)(m + PD_PANEL), *t = s + 2 * PD_PANEL, *q = t + 2 * PD_PANEL;
#pragma GCC unroll 2
    for (int first = 0; first < PD_GROUP; first += 16, s += PD_PANEL, t += PD_PANEL, q += 16 * PD_PANEL) {
        v16 d0 = pd_scaled(d, s), d1 = pd_scaled(d + 16, s + 16), m0 = pd_scaled(m, t), m1 = pd_scaled(m + 16, t + 16);
        PD_WALK(rows, pd_walk_k8, first, q, d0, d1, m0, m1, sink, acc)
    }
}

PD_INLINE void pd_walk_f8(const int rows, const int half, const uint8_t *group, pd_sink sink, v16 (*acc)[2]) {
    const float *d = (const float *)group;
    const uint8_t *q = (const uint8_t *)(d + PD_PANEL);
    v16 d0 = v16_load(d), d1 = v16_load(d + 16);
#pragma GCC unroll 4
    for (int k = 0; k < PD_GROUP; k++, q += PD_PANEL) {
        PD_IN_ORDER();
        if (half != 1) pd_take(rows, 0, sink, acc, k, v16_mul(d0, v16_load_e4m3(q)));
        if (half != 0) pd_take(rows, 1, sink, acc, k, v16_mul(d1, v16_load_e4m3(q + 16)));
    }
}

PD_INLINE v16 pd_load_weights(const int format, const uint8_t *at, int i) {
    switch (format) {
    case PD_F32: return v16_load((const float *)at + i);
    case PD_F16: return v16_load_f16((const uint16_t *)at + i);
    default: return v16_load_bf16((const uint16_t *)at + i);
    }
}

PD_INLINE void pd_walk_floats(const int rows, const int half, const int format, const uint8_t *group, int count,
                              pd_sink sink, v16 (*acc)[2]) {
    for (int k = 0; k < count; k++) {
        if (half != 1) pd_take(rows, 0, sink, acc, k, pd_load_weights(format, group, k * PD_PANEL));
        if (half != 0) pd_take(rows, 1, sink, acc, k, pd_load_weights(format, group, k * PD_PANEL + 16));
    }
}

/* The next `count` <= 32 k of a panel; `rows` and `format` are constants. */
PD_INLINE void pd_unpack(const int rows, const int format, const uint8_t *group, int count, pd_sink sink,
                         v16 (*acc)[2]) {
    switch (format) {
    case PD_Q8: PD_WALK(rows, pd_walk_q8, group, sink, acc) break;
    case PD_Q4_0: pd_unpack_q4(rows, PD_Q4_0, group, sink, acc); break;
    case PD_Q4_1: pd_unpack_q4(rows, PD_Q4_1, group, sink, acc); break;
    case PD_K4: pd_unpack_k4(rows, group, sink, acc); break;
    case PD_K8: pd_unpack_k8(rows, group, sink, acc); break;
    case PD_F8: PD_WALK(rows, pd_walk_f8, group, sink, acc) break;
    default: PD_WALK(rows, pd_walk_floats, format, group, count, sink, acc) break;
    }
}
