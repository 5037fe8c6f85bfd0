/* Products of fp32 activations with weight matrices, exact by construction.
 *
 * y[r, n] is ONE chain of fused multiply-adds over ascending k, begun at +0; then the bias is added, then the residual.
 * Lanes run over n, blocks and threads split r and n alone, and a chain that is cut into blocks of k passes through
 * memory as the fp32 number it is. So a row's bits are the same whatever rows stand beside it and whoever computes it.
 *
 * Few rows are bound by the bytes of the weights: each panel is read once, forward, and unpacked in registers. More
 * rows are bound by arithmetic: BLOCK_K k of a panel are unpacked into scratch, where they stay in the nearest cache
 * while tiles of rows pass over them. */
#include "products.h"

enum {
    BLOCK_K = 192,   /* k unpacked at once: 24 KiB of scratch, of which a tile of 16 columns uses half */
    BLOCK_ROWS = 192 /* rows that share an unpacked block: with more, it and they leave the second cache */
};

/* FEW_ROWS: unpacking in registers beats unpacking into scratch up to here. A tile's chains fill the registers, but for
 * the weights and the broadcast activation. Measured on AVX2, reasoned for the others. */
#if defined(PD_ISA_AVX512)
enum { FEW_ROWS = 8, TILE_ROWS = 12, TILE_VECTORS = 2 };
#elif defined(PD_ISA_AVX2)
enum { FEW_ROWS = 4, TILE_ROWS = 6, TILE_VECTORS = 1 };
#else
enum { FEW_ROWS = 4, TILE_ROWS = 6, TILE_VECTORS = 1 };
#endif

/* ---- Few rows: unpacked in registers ---- */

PD_INLINE void few(const int rows, const int format, const uint8_t *panel, int in, const float *x, int64_t ldx,
                   const target *to) {
    const int64_t bytes = pd_group_bytes(format);
    v16 acc[MOST_ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = v16_zero();
    for (int k = 0; k < in; k += PD_GROUP, panel += bytes) {
#pragma GCC unroll 64
        for (int line = 0; line < bytes; line += 64) pd_prefetch(panel + 4 * bytes + line);
        pd_unpack(rows, format, panel, in - k < PD_GROUP ? in - k : PD_GROUP, (pd_sink){x + k, ldx, NULL}, acc);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        finish(to, r, 0, acc[r][0]);
        finish(to, r, 16, acc[r][1]);
    }
}

typedef void few_rows(int rows, const uint8_t *panel, int in, const float *x, int64_t ldx, const target *to);

#define FEW(name, format)                                                                                       \
    static void name(int rows, const uint8_t *panel, int in, const float *x, int64_t ldx, const target *to) {   \
        WITH_ROWS(rows, FEW_ROWS, few, format, panel, in, x, ldx, to)                                           \
    }
FEW(few_f32, PD_F32)
FEW(few_f16, PD_F16)
FEW(few_bf16, PD_BF16)
FEW(few_q8, PD_Q8)
FEW(few_q4_0, PD_Q4_0)
FEW(few_q4_1, PD_Q4_1)
FEW(few_k4, PD_K4)
FEW(few_k8, PD_K8)
FEW(few_f8, PD_F8)

static few_rows *const FEW_OF[] = {few_f32, few_f16, few_bf16, few_q8, few_q4_0, few_q4_1,
                                   few_k4,  few_k8,  few_f8};

/* ---- Many rows: unpacked into scratch ---- */

/* `count` k of a panel as float[32] a k: in `scratch`, or where they lie. */
static const float *unpacked(int format, const uint8_t *panel, int count, float *scratch) {
    if (format == PD_F32) return (const float *)panel;
    const int64_t bytes = pd_group_bytes(format);
    for (int k = 0; k < count; k += PD_GROUP, panel += bytes) {
        pd_sink sink = {NULL, 0, scratch + k * PD_PANEL};
        int n = count - k < PD_GROUP ? count - k : PD_GROUP;
        switch (format) {
        case PD_F16: pd_unpack(0, PD_F16, panel, n, sink, NULL); break;
        case PD_BF16: pd_unpack(0, PD_BF16, panel, n, sink, NULL); break;
        case PD_Q8: pd_unpack(0, PD_Q8, panel, n, sink, NULL); break;
        case PD_Q4_0: pd_unpack(0, PD_Q4_0, panel, n, sink, NULL); break;
        case PD_Q4_1: pd_unpack(0, PD_Q4_1, panel, n, sink, NULL); break;
        case PD_K4: pd_unpack(0, PD_K4, panel, n, sink, NULL); break;
        case PD_K8: pd_unpack(0, PD_K8, panel, n, sink, NULL); break;
        default: pd_unpack(0, PD_F8, panel, n, sink, NULL); break;
        }
    }
    return scratch;
}

/* Chains of `rows` rows by TILE_VECTORS * 16 columns over `count` k. `sums` [rows][32] holds them between blocks of k
 * (not y, which may be the residual): they begin there unless `first`, and end there unless `to` says where. */
PD_INLINE void tile(const int rows, const float *x, int64_t ldx, const float *weights, int count, float *sums,
                    int first, const target *to, int row, int column) {
    v16 acc[MOST_ROWS][TILE_VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < TILE_VECTORS; v++) acc[r][v] = first ? v16_zero() : v16_load(sums + r * PD_PANEL + 16 * v);
    for (int k = 0; k < count; k++, weights += PD_PANEL) {
        v16 w[TILE_VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < TILE_VECTORS; v++) w[v] = v16_load(weights + 16 * v);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            v16 a = v16_set(x[r * ldx + k]);
#pragma GCC unroll 2
            for (int v = 0; v < TILE_VECTORS; v++) acc[r][v] = v16_fma(a, w[v], acc[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < TILE_VECTORS; v++) {
            if (to) finish(to, row + r, column + 16 * v, acc[r][v]);
            else v16_store(sums + r * PD_PANEL + 16 * v, acc[r][v]);
        }
}

/* All rows of a block over `count` k of a panel. */
static void tiles(int rows, const float *x, int64_t ldx, const float *weights, int count, float *sums, int first,
                  const target *to) {
    for (int column = 0; column < PD_PANEL; column += 16 * TILE_VECTORS)
        for (int row = 0, n; row < rows; row += n) {
            n = even_share(rows - row, TILE_ROWS);
            WITH_ROWS(n, TILE_ROWS, tile, x + row * ldx, ldx, weights + column, count, sums + row * PD_PANEL + column,
                      first, to, row, column)
        }
}

static void many(const pd_matrix *w, int64_t panel, const float *x, int64_t ldx, int rows, const target *to,
                 float *scratch) {
    float *sums = scratch + BLOCK_K * PD_PANEL;
    for (int k = 0; k < w->in; k += BLOCK_K) {
        int count = w->in - k < BLOCK_K ? w->in - k : BLOCK_K;
        const float *weights = unpacked(w->format, pd_panel(w, panel, k), count, scratch);
        tiles(rows, x + k, ldx, weights, count, sums, k == 0, k + count == w->in ? to : NULL);
    }
}

int64_t pd_product_scratch(void) { return (BLOCK_K + BLOCK_ROWS) * PD_PANEL; }

void pd_product(const pd_matrix *w, const float *x, int64_t ldx, int32_t rows, float *y, int64_t ldy,
                const float *bias, const float *residual, int64_t ldr, float *scratch, int32_t part, int32_t parts) {
    share mine = share_of(w, rows, rows <= FEW_ROWS ? rows : BLOCK_ROWS, TILE_ROWS, part, parts);
    for (int64_t unit = mine.begin; unit < mine.end; unit++) {
        block b = block_at(&mine, unit, rows);
        target to = target_at(w, &b, y, ldy, bias, residual, ldr);
        const float *from = x + b.row * ldx;
        if (b.rows <= FEW_ROWS) FEW_OF[w->format](b.rows, pd_panel(w, b.panel, 0), w->in, from, ldx, &to);
        else many(w, b.panel, from, ldx, b.rows, &to, scratch);
    }
}
