/* What is done to each token's activations alone; every value is a function of its own row.
 *
 *   norm    s = sum of x * x: 16 lanes, each an fma chain over ascending columns (missing ones add 0), then v16_sum;
 *           r = 1 / sqrt(s / width + eps); y = (x * r) * weight
 *   swiglu  y = (gate / (1 + exp(-gate))) * up
 *
 * Rows are dealt out whole. pd_take_rows deals out columns instead, so that it may work in place. */
#include "columns.h"
#include "exact_exp.h"
#include "rows.h"

static void norm_row(const float *x, int32_t width, const float *weight, float eps, float *y) {
    v16 squares = v16_zero();
    for (int32_t c = 0; c < width; c += 16) {
        const v16 values = load_to(x, c, width);
        squares = v16_fma(values, values, squares);
    }
    const v16 mean = v16_div(v16_set(v16_sum(squares)), v16_set((float)width));
    const v16 inverse = v16_div(v16_set(1.0f), v16_sqrt(v16_add(mean, v16_set(eps))));
    for (int32_t c = 0; c < width; c += 16)
        store_to(y, c, width, v16_mul(v16_mul(load_to(x, c, width), inverse), load_to(weight, c, width)));
}

void pd_rms_norm(const float *x, int64_t ldx, int32_t rows, int32_t width, const float *weight, float eps, float *y,
                 int64_t ldy, int part, int parts) {
    const share mine = share_of(rows, part, parts);
    for (int64_t row = mine.first; row < mine.last; row++)
        norm_row(x + row * ldx, width, weight, eps, y + row * ldy);
}

void pd_head_norm(float *x, int64_t ld, int32_t rows, int32_t heads, int32_t dim, const float *weight, float eps,
                  int part, int parts) {
    const share mine = share_of((int64_t)rows * heads, part, parts);
    for (int64_t each = mine.first; each < mine.last; each++) {
        float *head = x + each / heads * ld + each % heads * dim;
        norm_row(head, dim, weight, eps, head);
    }
}

void pd_swiglu_columns(const float *x, int64_t ldx, int32_t rows, int32_t width, int32_t first, int32_t last, float *y,
                       int64_t ldy) {
    const v16 one = v16_set(1.0f);
    for (int64_t row = 0; row < rows; row++) {
        const float *gates = x + row * ldx, *ups = gates + width;
        for (int32_t c = first; c < last; c += 16) {
            const v16 gate = load_to(gates, c, last);
            const v16 fall = v16_exp(v16_sub(v16_zero(), gate));
            store_to(y + row * ldy, c, last, v16_mul(v16_div(gate, v16_add(one, fall)), load_to(ups, c, last)));
        }
    }
}

void pd_swiglu(const float *x, int64_t ldx, int32_t rows, int32_t width, float *y, int64_t ldy, int part, int parts) {
    const share mine = share_of(rows, part, parts);
    pd_swiglu_columns(x + mine.first * ldx, ldx, (int32_t)(mine.last - mine.first), width, 0, width,
                      y + mine.first * ldy, ldy);
}

void pd_scale(const float *x, int64_t ldx, int32_t rows, int32_t width, float factor, float *y, int64_t ldy, int part,
              int parts) {
    const share mine = share_of(rows, part, parts);
    for (int64_t row = mine.first; row < mine.last; row++)
        for (int32_t c = 0; c < width; c += 16)
            store_to(y + row * ldy, c, width, v16_mul(load_to(x + row * ldx, c, width), v16_set(factor)));
}

void pd_add(const float *x, int64_t ldx, const float *z, int64_t ldz, int32_t rows, int32_t width, float *y,
            int64_t ldy, int part, int parts) {
    const share mine = share_of(rows, part, parts);
    for (int64_t row = mine.first; row < mine.last; row++)
        for (int32_t c = 0; c < width; c += 16) {
            const v16 sum = v16_add(load_to(x + row * ldx, c, width), load_to(z + row * ldz, c, width));
            store_to(y + row * ldy, c, width, sum);
        }
}

void pd_take_rows(const float *x, int64_t ldx, const int32_t *which, int32_t rows, int32_t width, float *y, int64_t ldy,
                  int part, int parts) {
    const share mine = share_of((width + 15) / 16, part, parts);
    const int32_t end = 16 * mine.last < width ? (int32_t)(16 * mine.last) : width;
    for (int64_t row = 0; row < rows; row++) /* which[row] >= row: nothing is overwritten before it is read */
        for (int32_t c = (int32_t)(16 * mine.first); c < end; c += 16)
            store_to(y + row * ldy, c, end, load_to(x + which[row] * ldx, c, end));
}
