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

/* Columns [0, 16) of step k lie at runs[k / run] + k % run * step, strip s at strips[s] bytes from them. */
struct panel {
    const char *const *runs;
    const int64_t *strips;
    int64_t step;
    int32_t run;
    int32_t dtype;
};

#define PD_CHAIN_ROWS 6

/* Accumulators are what bounds a shape: rows x strips x registers of a v16, beside one strip of b and one element of a.
 * AVX2 has 16 registers, two to a v16; the others 32, one (AVX-512) or four (NEON) to a v16. Few rows take more strips,
 * as fewer than 8 to 10 independent chains leave the multipliers waiting for their own results. */
#if defined(PD_ISA_AVX512)
enum { PD_STRIPS_1 = 4, PD_STRIPS_2 = 4, PD_STRIPS_3 = 4, PD_STRIPS_4 = 4, PD_STRIPS_5 = 4, PD_STRIPS_6 = 4 };
#else
enum { PD_STRIPS_1 = 4, PD_STRIPS_2 = 2, PD_STRIPS_3 = 2, PD_STRIPS_4 = 1, PD_STRIPS_5 = 1, PD_STRIPS_6 = 1 };
#endif

PD_INLINE v16 load_as(const int dtype, const char *p) {
    return dtype == PD_KV_F32   ? v16_load((const float *)p)
           : dtype == PD_KV_F16 ? v16_load_f16((const uint16_t *)p)
                                : v16_load_bf16((const uint16_t *)p);
}

/* `rows`, `wide` and `dtype` are constants of the caller: the loops over them unroll and the accumulators are
 * registers. `fresh` starts at 0 instead of c. */
PD_INLINE void chains(const int rows, const int wide, const int dtype, const float *a, int64_t a_row,
                      const struct panel *b, int strip, int steps, int fresh, float *c, int64_t c_row) {
    v16 sum[PD_CHAIN_ROWS][4];
    int64_t at[4];
#pragma GCC unroll 4
    for (int s = 0; s < wide; s++) at[s] = b->strips[strip + s];
    c += 16 * strip;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int s = 0; s < wide; s++) sum[r][s] = fresh ? v16_zero() : v16_load(c + r * c_row + 16 * s);
    const int64_t step = b->step;
    const char *const *runs = b->runs;
    for (int left = steps; left > 0; left -= b->run) {
        const char *p = *runs++;
        const float *end = a + (left < b->run ? left : b->run);
        for (; a < end; a++, p += step) {
            v16 columns[4];
#pragma GCC unroll 4
            for (int s = 0; s < wide; s++) columns[s] = load_as(dtype, p + at[s]);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                v16 one = v16_set(a[r * a_row]);
#pragma GCC unroll 4
                for (int s = 0; s < wide; s++) sum[r][s] = v16_fma(one, columns[s], sum[r][s]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int s = 0; s < wide; s++) v16_store(c + r * c_row + 16 * s, sum[r][s]);
}

typedef void chains_of(const float *a, int64_t a_row, const struct panel *b, int strip, int steps, int fresh, float *c,
                       int64_t c_row);

#define PD_CHAINS(name, dtype, rows, wide)                                                                        \
    static void name(const float *a, int64_t a_row, const struct panel *b, int strip, int steps, int fresh, float *c, \
                     int64_t c_row) {                                                                             \
        chains(rows, wide, dtype, a, a_row, b, strip, steps, fresh, c, c_row);                                    \
    }
#define PD_CHAINS_OF_ROWS(rows)                                             \
    PD_CHAINS(chains_f32_##rows, PD_KV_F32, rows, PD_STRIPS_##rows)         \
    PD_CHAINS(chains_f16_##rows, PD_KV_F16, rows, PD_STRIPS_##rows)         \
    PD_CHAINS(chains_bf16_##rows, PD_KV_BF16, rows, PD_STRIPS_##rows)       \
    PD_CHAINS(chains_f32_##rows##_narrow, PD_KV_F32, rows, 1)               \
    PD_CHAINS(chains_f16_##rows##_narrow, PD_KV_F16, rows, 1)               \
    PD_CHAINS(chains_bf16_##rows##_narrow, PD_KV_BF16, rows, 1)
PD_CHAINS_OF_ROWS(1)
PD_CHAINS_OF_ROWS(2)
PD_CHAINS_OF_ROWS(3)
PD_CHAINS_OF_ROWS(4)
PD_CHAINS_OF_ROWS(5)
PD_CHAINS_OF_ROWS(6)

#define PD_ROW_OF(type, tail) \
    { chains_##type##_1##tail, chains_##type##_2##tail, chains_##type##_3##tail, chains_##type##_4##tail, \
      chains_##type##_5##tail, chains_##type##_6##tail }
static chains_of *const wide_chains[3][PD_CHAIN_ROWS] = {PD_ROW_OF(f32, ), PD_ROW_OF(f16, ), PD_ROW_OF(bf16, )};
static chains_of *const narrow_chains[3][PD_CHAIN_ROWS] = {PD_ROW_OF(f32, _narrow), PD_ROW_OF(f16, _narrow),
                                                           PD_ROW_OF(bf16, _narrow)};
static const int8_t chain_strips[PD_CHAIN_ROWS] = {PD_STRIPS_1, PD_STRIPS_2, PD_STRIPS_3,
                                                   PD_STRIPS_4, PD_STRIPS_5, PD_STRIPS_6};

/* At most PD_CHAIN_ROWS rows times strips [0, strips) of b over steps [0, steps). */
static void multiply(const float *a, int64_t a_row, int rows, const struct panel *b, int strips, int steps, int fresh,
                     float *c, int64_t c_row) {
    const int wide = chain_strips[rows - 1];
    chains_of *whole = wide_chains[b->dtype][rows - 1], *rest = narrow_chains[b->dtype][rows - 1];
    int strip = 0;
    for (; strip + wide <= strips; strip += wide) whole(a, a_row, b, strip, steps, fresh, c, c_row);
    for (; strip < strips; strip++) rest(a, a_row, b, strip, steps, fresh, c, c_row);
}
