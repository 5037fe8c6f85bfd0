/* The inner product of attention: c[r][j] = c[r][j] + sum over k of a[r][k] * b[k][j], each output one chain of fused
 * multiply-adds over ascending k.
 *
 * Scores are such a product (rows: queries, k: dims, columns: positions) and so is the weighted sum of values (rows:
 * queries, k: positions, columns: dims). A panel b is sixteen columns wide or several strips of sixteen; it lies in
 * blocks of the pool as stored, or unpacked to fp32 in scratch. A chain never depends on how many rows or strips are
 * computed beside it, so the shapes below are a matter of registers alone. */
#pragma once
#include "lanes.h"
#include "perdure_cpu.h"

/* Columns [0, 16) of step k lie at runs[k / run] + k % run * step, those of strip s at strips[s] bytes from there.
 * `next` is what will be read after this panel, of the same form, and is asked for meanwhile. */
struct panel {
    const char *const *runs;
    const int64_t *strips;
    const struct panel *next;
    int64_t step;
    int32_t run;
    int32_t kind; /* PD_KV_... of the pool, or PD_UNPACKED */
};

enum { PD_UNPACKED = 3, PD_KINDS, PD_CHAIN_ROWS = 6 };

/* Accumulators are what bounds a shape: rows x strips x registers of a v16, beside one strip of b and one element of a.
 * AVX2 has 16 registers, two to a v16; the others 32, one (AVX-512) or four (NEON) to a v16. Few rows take more strips,
 * as fewer than 8 to 10 independent chains leave the multipliers waiting for their own results. */
#if defined(PD_ISA_AVX512)
enum { PD_STRIPS_1 = 4, PD_STRIPS_2 = 4, PD_STRIPS_3 = 4, PD_STRIPS_4 = 4, PD_STRIPS_5 = 4, PD_STRIPS_6 = 4 };
#else
enum { PD_STRIPS_1 = 4, PD_STRIPS_2 = 2, PD_STRIPS_3 = 2, PD_STRIPS_4 = 1, PD_STRIPS_5 = 1, PD_STRIPS_6 = 1 };
#endif

PD_INLINE v16 load_as(const int kind, const char *p) {
    return kind == PD_KV_F16    ? v16_load_f16((const uint16_t *)p)
           : kind == PD_KV_BF16 ? v16_load_bf16((const uint16_t *)p)
                                : v16_load((const float *)p);
}

/* `rows`, `wide` and `kind` are constants of the caller: the loops over them unroll and the accumulators are registers.
 * `fresh` starts at 0 instead of c. What comes next is asked for line by line between the multiplications: left alone
 * the memory would idle while we compute, as blocks are too short to guess the next one from, and asking for a whole
 * tile at once makes us wait for it. */
PD_INLINE void chains(const int rows, const int wide, const int kind, const float *a, int64_t a_row,
                      const struct panel *b, int strip, int steps, int fresh, float *c, int64_t c_row) {
    const int ahead = kind != PD_UNPACKED;
    const int64_t step = b->step;
    const char *const *runs = b->runs, *const *next_runs = ahead ? b->next->runs : runs;
    v16 sum[PD_CHAIN_ROWS][4];
    int64_t at[4], next_at[4];
#pragma GCC unroll 4
    for (int s = 0; s < wide; s++) {
        at[s] = b->strips[strip + s];
        next_at[s] = ahead ? b->next->strips[strip + s] : 0;
    }
    c += 16 * strip;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int s = 0; s < wide; s++) sum[r][s] = fresh ? v16_zero() : v16_load(c + r * c_row + 16 * s);
    for (int left = steps; left > 0; left -= b->run) {
        const char *p = *runs++, *q = *next_runs++;
        const float *end = a + (left < b->run ? left : b->run);
        for (; a < end; a++, p += step, q += step)
#pragma GCC unroll 4
            for (int s = 0; s < wide; s++) {
                v16 columns = load_as(kind, p + at[s]);
                if (ahead) pd_prefetch(q + next_at[s]);
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) sum[r][s] = v16_fma(v16_set(a[r * a_row]), columns, sum[r][s]);
                /* Without this the compiler keeps elements of a for the other strips and spills a sum instead. */
                if (rows == 3 && wide == 2) __asm__ volatile("" : : : "memory");
            }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int s = 0; s < wide; s++) v16_store(c + r * c_row + 16 * s, sum[r][s]);
}

typedef void chains_of(const float *a, int64_t a_row, const struct panel *b, int strip, int steps, int fresh, float *c,
                       int64_t c_row);

#define PD_CHAINS(name, kind, rows, wide)                                                                         \
    static void name(const float *a, int64_t a_row, const struct panel *b, int strip, int steps, int fresh, float *c, \
                     int64_t c_row) {                                                                             \
        chains(rows, wide, kind, a, a_row, b, strip, steps, fresh, c, c_row);                                     \
    }
#define PD_CHAINS_OF(name, kind)                                                                     \
    PD_CHAINS(name##_1, kind, 1, PD_STRIPS_1)                                                        \
    PD_CHAINS(name##_2, kind, 2, PD_STRIPS_2)                                                        \
    PD_CHAINS(name##_3, kind, 3, PD_STRIPS_3)                                                        \
    PD_CHAINS(name##_4, kind, 4, PD_STRIPS_4)                                                        \
    PD_CHAINS(name##_5, kind, 5, PD_STRIPS_5)                                                        \
    PD_CHAINS(name##_6, kind, 6, PD_STRIPS_6)                                                        \
    PD_CHAINS(name##_1_narrow, kind, 1, 1)                                                           \
    PD_CHAINS(name##_2_narrow, kind, 2, 1)                                                           \
    PD_CHAINS(name##_3_narrow, kind, 3, 1)                                                           \
    PD_CHAINS(name##_4_narrow, kind, 4, 1)                                                           \
    PD_CHAINS(name##_5_narrow, kind, 5, 1)                                                           \
    PD_CHAINS(name##_6_narrow, kind, 6, 1)                                                           \
    static chains_of *const name[2][PD_CHAIN_ROWS] = {                                               \
        {name##_1_narrow, name##_2_narrow, name##_3_narrow, name##_4_narrow, name##_5_narrow, name##_6_narrow}, \
        {name##_1, name##_2, name##_3, name##_4, name##_5, name##_6}};
PD_CHAINS_OF(chains_f32, PD_KV_F32)
PD_CHAINS_OF(chains_f16, PD_KV_F16)
PD_CHAINS_OF(chains_bf16, PD_KV_BF16)
PD_CHAINS_OF(chains_unpacked, PD_UNPACKED)

static const int8_t chain_strips[PD_CHAIN_ROWS] = {PD_STRIPS_1, PD_STRIPS_2, PD_STRIPS_3,
                                                   PD_STRIPS_4, PD_STRIPS_5, PD_STRIPS_6};

/* At most PD_CHAIN_ROWS rows times strips [0, strips) of b over steps [0, steps). */
static void multiply(const float *a, int64_t a_row, int rows, const struct panel *b, int strips, int steps, int fresh,
                     float *c, int64_t c_row) {
    static chains_of *const(*const all[PD_KINDS])[PD_CHAIN_ROWS] = {
        [PD_KV_F32] = chains_f32,
        [PD_KV_F16] = chains_f16,
        [PD_KV_BF16] = chains_bf16,
        [PD_UNPACKED] = chains_unpacked,
    };
    chains_of *narrow = all[b->kind][0][rows - 1], *whole = all[b->kind][1][rows - 1];
    const int wide = chain_strips[rows - 1];
    int strip = 0;
    for (; strip + wide <= strips; strip += wide) whole(a, a_row, b, strip, steps, fresh, c, c_row);
    for (; strip < strips; strip++) narrow(a, a_row, b, strip, steps, fresh, c, c_row);
}
