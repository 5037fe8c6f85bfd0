/* Products of activations rounded to 8 bits: another numerics, as exact in its own terms as products.c.
 *
 * A row is rounded by itself, in groups of 32 k: q = round(x * 127 / max|x|), d = max|x| / 127. The dot product of a
 * group with the weights' integers is a whole number below 2^24, so it does not matter in which order or by which
 * instructions it is summed. Only the folding of groups rounds, in one order, k ascending, from +0:
 *
 *   PD_Q8           y = fma(wd * dot, d, y)
 *   PD_Q4_0, Q4_1   y = fma(fma(wd, dot, m * sum of q), d, y)
 *
 * Then bias and residual, as in products.c. So a row's bits do not depend on other rows, on blocks or on threads.
 *
 * As there, few rows are bound by the bytes of the weights: a panel comes from memory once, and becomes bytes in
 * registers, four neighbouring k of a column in a lane. With more rows BLOCK_GROUPS groups of half a panel become
 * bytes in scratch, where they stay in the nearest cache while the tiles of a block of rows pass over them. */
#include "products.h"

/* FEW_ROWS: up to here weights are taken as they lie. A tile's sums fill the registers. Measured on AVX2, reasoned for
 * the others. */
#if defined(PD_ISA_AVX512)
enum { FEW_ROWS = 8, TILE_ROWS = 8 };
#elif defined(PD_ISA_AVX2)
enum { FEW_ROWS = 8, TILE_ROWS = 3 };
#else
enum { FEW_ROWS = 4, TILE_ROWS = 2 };
#endif
enum {
    BLOCK_ROWS = 384,
    BLOCK_GROUPS = 18,
    QUADS = PD_GROUP / 4,          /* of a group */
    QUAD_BYTES = 4 * 16,           /* four k of 16 columns */
    GROUP_BYTES = QUADS * QUAD_BYTES,
    GROUP_FLOATS = 2 * 16          /* d and m of 16 columns */
};

/* ---- Activations ---- */

/* A group too small to be told from 0 becomes 0; one that is not finite keeps its results from being finite. */
static void quantise_group(const float *x, int8_t *q, float *d, float *sum) {
    v16 a = v16_load(x), b = v16_load(x + 16), zero = v16_zero();
    v16 most = v16_max(v16_max(a, v16_sub(zero, a)), v16_max(b, v16_sub(zero, b)));
    float top = v16_top(most);
    float bad = v16_first(v16_div(zero, zero));
    *d = top / 127.0f;
    if (top > 1e-30f) {
        v16 scale = v16_set(127.0f / top);
        a = v16_round(v16_mul(a, scale)), b = v16_round(v16_mul(b, scale));
        *sum = v16_sum(v16_add(a, b));
        if (*sum == *sum) {
            v16_store_quads(q, a);
            v16_store_quads(q + 16, b);
            return;
        }
        *d = bad; /* an infinity times 0, or a NaN */
    } else {
        float nothing = v16_sum(v16_add(v16_mul(a, zero), v16_mul(b, zero)));
        *d = nothing == 0.0f ? 0.0f : bad;
    }
    *sum = 0.0f;
    memset(q, 0, PD_GROUP);
}

void pd_quantise_rows(const float *x, int64_t ldx, int32_t rows, const pd_rows_i8 *to, int32_t part, int32_t parts) {
    int32_t groups = to->in / PD_GROUP;
    int64_t begin = (int64_t)rows * part / parts, end = (int64_t)rows * (part + 1) / parts;
    for (int64_t row = begin; row < end; row++)
        for (int32_t g = 0; g < groups; g++)
            quantise_group(x + row * ldx + g * PD_GROUP, to->q + row * to->in + g * PD_GROUP, to->d + row * groups + g,
                           to->sum + row * groups + g);
}

/* ---- Weights: 16 columns of a group, half a panel wide ---- */

/* Where they come from: a panel in the file's format, or scratch. All of it but pointers is constant in a tile. */
enum { READY = -1 };
typedef struct {
    const uint8_t *bytes; /* the panel; READY: [groups][QUADS][16 columns][4 k] */
    const float *scales;  /* READY: [groups][d, m][16 columns] */
    int half;
} weights;

PD_INLINE const uint8_t *group_at(const int format, weights w, int64_t g) {
    return w.bytes + g * (format == READY ? GROUP_BYTES : pd_group_bytes(format));
}

/* Four k of each column: those of x.q[4 * j] to x.q[4 * j + 3]. */
PD_INLINE b64 quad_of(const int format, const uint8_t *group, int half, int j) {
    if (format == READY) return b64_load(group + j * QUAD_BYTES);
    if (format == PD_Q8) {
        const int8_t *q = (const int8_t *)group + (2 + j / 2 * 8 + j % 2) * PD_PANEL + 16 * half;
        return b64_across(q, q + 2 * PD_PANEL, q + 4 * PD_PANEL, q + 6 * PD_PANEL);
    }
    const uint32_t *q = (const uint32_t *)(group + (format == PD_Q4_1 ? 4 : 2) * PD_PANEL);
    n16 eight = n16_load(q + j / 2 * PD_PANEL + 16 * half);
    return j % 2 ? n16_odd(eight) : n16_even(eight);
}

PD_INLINE v16 scale_of(const int format, weights w, int64_t g) {
    if (format == READY) return v16_load(w.scales + g * GROUP_FLOATS);
    return v16_load_f16((const uint16_t *)group_at(format, w, g) + 16 * w.half);
}

PD_INLINE v16 least_of(const int format, weights w, int64_t g, v16 scale) {
    if (format == READY) return v16_load(w.scales + g * GROUP_FLOATS + 16);
    if (format == PD_Q4_0) return v16_mul(scale, v16_set(-8.0f));
    return v16_load_f16((const uint16_t *)group_at(format, w, g) + PD_PANEL + 16 * w.half);
}

PD_INLINE void make_ready(const int format, weights from, int32_t count, uint8_t *bytes, float *scales) {
    for (int32_t g = 0; g < count; g++, bytes += GROUP_BYTES, scales += GROUP_FLOATS) {
        const uint8_t *group = group_at(format, from, g);
        pd_prefetch(group + 4 * pd_group_bytes(format));
        v16 scale = scale_of(format, from, g);
        v16_store(scales, scale);
        if (format != PD_Q8) v16_store(scales + 16, least_of(format, from, g, scale));
#pragma GCC unroll 8
        for (int j = 0; j < QUADS; j++) b64_store(bytes + j * QUAD_BYTES, quad_of(format, group, from.half, j));
    }
}

/* ---- Tiles: `rows` rows by 16 columns, of 4-bit weights or not (`small`); all three constants ---- */

/* Folds `count` groups. `sums` [rows][16] holds the chains between blocks of groups: they begin there unless `begins`,
 * and end there unless `to` says where. */
PD_INLINE void tile(const int rows, const int format, const int small, const pd_rows_i8 *x, int64_t row, int32_t first,
                    int32_t count, weights w, int begins, float *sums, const target *to, int at) {
    const int32_t in = x->in, groups = in / PD_GROUP;
    const int8_t *q = x->q + row * in + first * PD_GROUP;
    const float *d = x->d + row * groups + first, *sum = x->sum + row * groups + first;
    v16 acc[MOST_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc[r] = begins ? v16_zero() : v16_load(sums + 16 * r);
    for (int32_t g = 0; g < count; g++, q += PD_GROUP) {
        const uint8_t *group = group_at(format, w, g);
        if (format != READY && w.half == 0) {
            const int64_t bytes = pd_group_bytes(format);
#pragma GCC unroll 64
            for (int line = 0; line < bytes; line += 64) pd_prefetch(group + 4 * bytes + line);
        }
        small_dots few[MOST_ROWS];
        full_dots wide[MOST_ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) few[r] = small_dots_zero(), wide[r] = full_dots_zero();
#pragma GCC unroll 8
        for (int j = 0; j < QUADS; j++) {
            b64 four = quad_of(format, group, w.half, j);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                b64 a = b64_all(q + (int64_t)r * in + 4 * j);
                if (small) few[r] = small_dots_add(few[r], four, a);
                else wide[r] = full_dots_add(wide[r], four, a);
            }
        }
        v16 scale = scale_of(format, w, g), least = small ? least_of(format, w, g, scale) : scale;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            v16 part;
            if (small) part = v16_fma(scale, small_dots_end(few[r]), v16_mul(least, v16_set(sum[r * groups + g])));
            else part = v16_mul(scale, full_dots_end(wide[r]));
            acc[r] = v16_fma(part, v16_set(d[r * groups + g]), acc[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        if (to) finish(to, at + r, 16 * w.half, acc[r]);
        else v16_store(sums + 16 * r, acc[r]);
    }
}

typedef void tiles(const pd_rows_i8 *x, const block *b, int32_t first, int32_t count, weights w, int begins,
                   float *sums, const target *to);

/* All tiles of a block of rows. */
#define TILES(name, format, small)                                                                              \
    static void name(const pd_rows_i8 *x, const block *b, int32_t first, int32_t count, weights w, int begins,  \
                     float *sums, const target *to) {                                                           \
        for (int row = 0, n; row < b->rows; row += n) {                                                         \
            n = even_share(b->rows - row, TILE_ROWS);                                                           \
            WITH_ROWS(n, TILE_ROWS, tile, format, small, x, b->row + row, first, count, w, begins,              \
                      sums ? sums + 16 * row : NULL, to, row)                                                   \
        }                                                                                                       \
    }
TILES(ready_q8, READY, 0)
TILES(ready_q4, READY, 1)
TILES(few_q8, PD_Q8, 0)
TILES(few_q4_0, PD_Q4_0, 1)
TILES(few_q4_1, PD_Q4_1, 1)

static void few(const pd_matrix *w, const pd_rows_i8 *x, const block *b, const target *to) {
    tiles *run = w->format == PD_Q8 ? few_q8 : w->format == PD_Q4_0 ? few_q4_0 : few_q4_1;
    for (int half = 0; half < 2; half++)
        run(x, b, 0, w->in / PD_GROUP, (weights){pd_panel(w, b->panel, 0), NULL, half}, 1, NULL, to);
}

static void many(const pd_matrix *w, const pd_rows_i8 *x, const block *b, const target *to, float *scratch) {
    float *sums = scratch + BLOCK_GROUPS * GROUP_FLOATS;
    uint8_t *bytes = (uint8_t *)(sums + BLOCK_ROWS * 16);
    const int32_t groups = w->in / PD_GROUP;
    for (int half = 0; half < 2; half++)
        for (int32_t first = 0; first < groups; first += BLOCK_GROUPS) {
            int32_t count = groups - first < BLOCK_GROUPS ? groups - first : BLOCK_GROUPS;
            weights lying = {pd_panel(w, b->panel, first * PD_GROUP), NULL, half};
            switch (w->format) {
            case PD_Q8: make_ready(PD_Q8, lying, count, bytes, scratch); break;
            case PD_Q4_0: make_ready(PD_Q4_0, lying, count, bytes, scratch); break;
            default: make_ready(PD_Q4_1, lying, count, bytes, scratch); break;
            }
            tiles *run = w->format == PD_Q8 ? ready_q8 : ready_q4;
            const weights ready = {bytes, scratch, half};
            run(x, b, first, count, ready, first == 0, sums, first + count == groups ? to : NULL);
        }
}

int64_t pd_product_i8_scratch(void) { return BLOCK_GROUPS * (GROUP_FLOATS + GROUP_BYTES / 4) + BLOCK_ROWS * 16; }

void pd_product_i8(const pd_matrix *w, const pd_rows_i8 *x, int32_t rows, float *y, int64_t ldy, const float *bias,
                   const float *residual, int64_t ldr, float *scratch, int32_t part, int32_t parts) {
    share mine = share_of(w, rows, rows <= FEW_ROWS ? rows : BLOCK_ROWS, TILE_ROWS, part, parts);
    for (int64_t unit = mine.begin; unit < mine.end; unit++) {
        block b = block_at(&mine, unit, rows);
        target to = target_at(w, &b, y, ldy, bias, residual, ldr);
        if (rows <= FEW_ROWS) few(w, x, &b, &to);
        else many(w, x, &b, &to, scratch);
    }
}
