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
 * Half a panel's weights are unpacked to bytes in scratch, four neighbouring k of a column in a lane, where they serve
 * all tiles of a block of rows. */
#include "products.h"

#if defined(PD_ISA_AVX512)
enum { TILE_ROWS = 8 };
#elif defined(PD_ISA_AVX2)
enum { TILE_ROWS = 3 };
#else
enum { TILE_ROWS = 2 };
#endif
enum {
    BLOCK_ROWS = 384,
    QUADS = PD_GROUP / 4,          /* of a group */
    QUAD_BYTES = 4 * 16,           /* four k of 16 columns */
    GROUP_BYTES = QUADS * QUAD_BYTES,
    GROUP_FLOATS = 2 * 16          /* d and m of 16 columns */
};

/* ---- Activations ---- */

/* Eight neighbours in the order of the 4-bit weights: 0, 2, 4, 6, 1, 3, 5, 7. */
static uint64_t even_then_odd(uint64_t bytes) {
    const uint64_t every_other = 0x00ff00ff00ff00ffull, pairs = 0x0000ffff0000ffffull;
    uint64_t even = bytes & every_other, odd = bytes >> 8 & every_other;
    even = (even | even >> 8) & pairs, odd = (odd | odd >> 8) & pairs;
    return ((even | even >> 16) & 0xffffffffull) | (odd | odd >> 16) << 32;
}

/* A group too small to be told from 0 becomes 0; one that is not finite keeps its results from being finite. */
static void quantise_group(const float *x, int8_t *q, float *d, float *sum) {
    v16 a = v16_load(x), b = v16_load(x + 16), zero = v16_zero();
    v16 most = v16_max(v16_max(a, v16_sub(zero, a)), v16_max(b, v16_sub(zero, b)));
    float top = v16_top(most);
    int finite = v16_sum(v16_add(v16_mul(a, zero), v16_mul(b, zero))) == 0.0f;
    memset(q, 0, PD_GROUP);
    *sum = 0.0f;
    *d = finite ? 0.0f : v16_first(v16_div(zero, zero));
    if (!finite || !(top > 1e-30f)) return;
    int8_t plain[PD_GROUP];
    v16 scale = v16_set(127.0f / top);
    a = v16_round(v16_mul(a, scale)), b = v16_round(v16_mul(b, scale));
    v16_store_i8(plain, a);
    v16_store_i8(plain + 16, b);
    for (int k = 0; k < PD_GROUP; k += 8) {
        uint64_t eight;
        memcpy(&eight, plain + k, sizeof eight);
        eight = even_then_odd(eight);
        memcpy(q + k, &eight, sizeof eight);
    }
    *d = top / 127.0f;
    *sum = v16_sum(v16_add(a, b));
}

void pd_quantise_rows(const float *x, int64_t ldx, int32_t rows, const pd_rows_i8 *to, int32_t part, int32_t parts) {
    int32_t groups = to->in / PD_GROUP;
    int64_t begin = (int64_t)rows * part / parts, end = (int64_t)rows * (part + 1) / parts;
    for (int64_t row = begin; row < end; row++)
        for (int32_t g = 0; g < groups; g++)
            quantise_group(x + row * ldx + g * PD_GROUP, to->q + row * to->in + g * PD_GROUP, to->d + row * groups + g,
                           to->sum + row * groups + g);
}

/* ---- Weights ---- */

typedef struct {
    int8_t *bytes; /* [groups][QUADS][16 columns][4 k] */
    float *scales; /* [groups][d, m][16 columns] */
} unpacked;

static void unpack_q8(const uint8_t *group, int half, int8_t *bytes, float *scales) {
    const int8_t *q = (const int8_t *)(group + 2 * PD_PANEL) + 16 * half;
    v16_store(scales, v16_load_f16((const uint16_t *)group + 16 * half));
    for (int k = 0; k < PD_GROUP; k += 8, q += 8 * PD_PANEL, bytes += 2 * QUAD_BYTES) {
        b64_store(bytes, b64_across(q, q + 2 * PD_PANEL, q + 4 * PD_PANEL, q + 6 * PD_PANEL));
        b64_store(bytes + QUAD_BYTES, b64_across(q + PD_PANEL, q + 3 * PD_PANEL, q + 5 * PD_PANEL, q + 7 * PD_PANEL));
    }
}

static void unpack_q4(int format, const uint8_t *group, int half, int8_t *bytes, float *scales) {
    const uint16_t *d = (const uint16_t *)group + 16 * half;
    const uint32_t *q = (const uint32_t *)(group + (format == PD_Q4_1 ? 4 : 2) * PD_PANEL) + 16 * half;
    v16 scale = v16_load_f16(d);
    v16_store(scales, scale);
    v16_store(scales + 16, format == PD_Q4_1 ? v16_load_f16(d + PD_PANEL) : v16_mul(scale, v16_set(-8.0f)));
    for (int k = 0; k < PD_GROUP; k += 8, q += PD_PANEL, bytes += 2 * QUAD_BYTES) {
        n16 eight = n16_load(q);
        b64_store(bytes, n16_even(eight));
        b64_store(bytes + QUAD_BYTES, n16_odd(eight));
    }
}

static unpacked unpack(const pd_matrix *w, int64_t panel, int half, float *scratch) {
    int32_t groups = w->in / PD_GROUP;
    unpacked u = {(int8_t *)(scratch + groups * GROUP_FLOATS), scratch};
    for (int32_t g = 0; g < groups; g++) {
        const uint8_t *group = pd_panel(w, panel, g * PD_GROUP);
        int8_t *bytes = u.bytes + g * GROUP_BYTES;
        pd_prefetch(group + 4 * pd_group_bytes(w->format));
        if (w->format == PD_Q8) unpack_q8(group, half, bytes, u.scales + g * GROUP_FLOATS);
        else unpack_q4(w->format, group, half, bytes, u.scales + g * GROUP_FLOATS);
    }
    return u;
}

int64_t pd_product_i8_scratch(int32_t in) { return (int64_t)in / PD_GROUP * (GROUP_FLOATS + GROUP_BYTES / 4); }

/* ---- Tiles: `rows` rows by 16 columns, `small` (4-bit weights) or not, both constants ---- */

PD_INLINE void tile(const int rows, const int small, const pd_rows_i8 *x, int64_t first, unpacked w, const target *to,
                    int row, int column) {
    const int32_t groups = x->in / PD_GROUP;
    const int8_t *q = x->q + first * x->in;
    const float *d = x->d + first * groups, *sum = x->sum + first * groups;
    v16 acc[MOST_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc[r] = v16_zero();
    for (int32_t g = 0; g < groups; g++, q += PD_GROUP) {
        small_dots few[MOST_ROWS];
        full_dots wide[MOST_ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) few[r] = small_dots_zero(), wide[r] = full_dots_zero();
#pragma GCC unroll 8
        for (int j = 0; j < QUADS; j++) {
            b64 four = b64_load(w.bytes + g * GROUP_BYTES + j * QUAD_BYTES);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                b64 a = b64_all(q + (int64_t)r * x->in + 4 * j);
                if (small) few[r] = small_dots_add(few[r], four, a);
                else wide[r] = full_dots_add(wide[r], four, a);
            }
        }
        v16 scale = v16_load(w.scales + g * GROUP_FLOATS);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            v16 part;
            if (small) {
                v16 least = v16_mul(v16_load(w.scales + g * GROUP_FLOATS + 16), v16_set(sum[r * groups + g]));
                part = v16_fma(scale, small_dots_end(few[r]), least);
            } else {
                part = v16_mul(scale, full_dots_end(wide[r]));
            }
            acc[r] = v16_fma(part, v16_set(d[r * groups + g]), acc[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) finish(to, row + r, column, acc[r]);
}

void pd_product_i8(const pd_matrix *w, const pd_rows_i8 *x, int32_t rows, float *y, int64_t ldy, const float *bias,
                   const float *residual, int64_t ldr, float *scratch, int32_t part, int32_t parts) {
    share mine = share_of(w, rows, BLOCK_ROWS, TILE_ROWS, part, parts);
    for (int64_t unit = mine.begin; unit < mine.end; unit++) {
        block b = block_at(&mine, unit, rows);
        target to = target_at(w, &b, y, ldy, bias, residual, ldr);
        for (int half = 0; half < 2; half++) {
            unpacked u = unpack(w, b.panel, half, scratch);
            for (int row = 0, n; row < b.rows; row += n) {
                n = even_share(b.rows - row, TILE_ROWS);
                if (w->format == PD_Q8) WITH_ROWS(n, TILE_ROWS, tile, 0, x, b.row + row, u, &to, row, 16 * half)
                else WITH_ROWS(n, TILE_ROWS, tile, 1, x, b.row + row, u, &to, row, 16 * half)
            }
        }
    }
}
