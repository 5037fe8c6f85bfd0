/* What all products share: how the work is cut, and how a chain ends. */
#pragma once
#include "panels.h"

/* f(N, ...) with a constant N equal to `n`, so that N rows of chains are registers; N up to the constant `most`. */
#define CASE(N, most, f, ...)                \
    case N:                                  \
        if (N <= (most)) f(N, __VA_ARGS__);  \
        break;
#define WITH_ROWS(n, most, f, ...)           \
    switch (n) {                             \
        CASE(1, most, f, __VA_ARGS__)        \
        CASE(2, most, f, __VA_ARGS__)        \
        CASE(3, most, f, __VA_ARGS__)        \
        CASE(4, most, f, __VA_ARGS__)        \
        CASE(5, most, f, __VA_ARGS__)        \
        CASE(6, most, f, __VA_ARGS__)        \
        CASE(7, most, f, __VA_ARGS__)        \
        CASE(8, most, f, __VA_ARGS__)        \
        CASE(9, most, f, __VA_ARGS__)        \
        CASE(10, most, f, __VA_ARGS__)       \
        CASE(11, most, f, __VA_ARGS__)       \
        CASE(12, most, f, __VA_ARGS__)       \
    }
enum { MOST_ROWS = 12 };

/* What becomes of the chains of one panel: y and the addends at its first column and the first row. */
typedef struct {
    float *y;
    int64_t ldy;
    const float *bias, *residual;
    int64_t ldr;
    int columns; /* of the panel's 32 that exist */
} target;

PD_INLINE void finish(const target *to, int row, int column, v16 sum) {
    int n = to->columns - column;
    if (n <= 0) return;
    float *y = to->y + row * to->ldy + column;
    const float *residual = to->residual ? to->residual + row * to->ldr + column : NULL;
    if (n >= 16) {
        if (to->bias) sum = v16_add(sum, v16_load(to->bias + column));
        if (residual) sum = v16_add(sum, v16_load(residual));
        v16_store(y, sum);
    } else {
        if (to->bias) sum = v16_add(sum, v16_load_part(to->bias + column, n));
        if (residual) sum = v16_add(sum, v16_load_part(residual, n));
        v16_store_part(y, sum, n);
    }
}

/* ---- The cut: pairs of a panel and a block of rows, panels ascending within a block ---- */

typedef struct {
    int64_t begin, end, panels;
    int32_t rows; /* of a block */
} share;

typedef struct {
    int64_t row, panel;
    int32_t rows;
} block;

/* Pairs of one part. Blocks have at most `most` rows, nearly the same number each in whole tiles, and there are enough
 * of them that every part has several pairs. */
PD_INLINE share share_of(const pd_matrix *w, int32_t rows, int32_t most, int32_t tile, int32_t part, int32_t parts) {
    int64_t panels = (w->out + PD_PANEL - 1) / PD_PANEL;
    int64_t blocks = rows ? (rows + most - 1) / most : 0, limit = (rows + 4 * tile - 1) / (4 * tile);
    while (parts > 1 && blocks * panels < 4 * (int64_t)parts && blocks < limit) blocks++;
    int64_t each = blocks > 1 ? ((rows + blocks - 1) / blocks + tile - 1) / tile * tile : rows;
    blocks = rows ? (rows + each - 1) / each : 0;
    return (share){blocks * panels * part / parts, blocks * panels * (part + 1) / parts, panels, (int32_t)each};
}

PD_INLINE block block_at(const share *s, int64_t pair, int32_t rows) {
    int64_t row = pair / s->panels * s->rows;
    return (block){row, pair % s->panels, (int32_t)(rows - row < s->rows ? rows - row : s->rows)};
}

PD_INLINE target target_at(const pd_matrix *w, const block *b, float *y, int64_t ldy, const float *bias,
                           const float *residual, int64_t ldr) {
    int64_t first = b->panel * PD_PANEL, left = w->out - first;
    return (target){y + b->row * ldy + first, ldy, bias ? bias + first : NULL,
                    residual ? residual + b->row * ldr + first : NULL, ldr, (int)(left < PD_PANEL ? left : PD_PANEL)};
}

/* Rows of the next tile of `left`: tiles of nearly the same size, since small ones leave the multipliers waiting. */
PD_INLINE int even_share(int left, int tile) {
    int tiles = (left + tile - 1) / tile;
    return (left + tiles - 1) / tiles;
}
