/* Rows that are no multiple of 16 columns wide, and the share of a part; for kernels that go row by row. */
#pragma once
#include "lanes.h"

/* Columns [c, c + 16) of a row that ends at `width`. */
PD_INLINE v16 load_to(const float *row, int32_t c, int32_t width) {
    return c + 16 <= width ? v16_load(row + c) : v16_load_part(row + c, width - c);
}
PD_INLINE void store_to(float *row, int32_t c, int32_t width, v16 values) {
    if (c + 16 <= width)
        v16_store(row + c, values);
    else
        v16_store_part(row + c, values, width - c);
}

/* What is dealt to this part of n: [first, last). */
typedef struct {
    int64_t first, last;
} share;

PD_INLINE share share_of(int64_t n, int part, int parts) {
    return (share){n * part / parts, n * (part + 1) / parts};
}
