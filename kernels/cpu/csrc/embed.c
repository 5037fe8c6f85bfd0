/* Rows of a weight matrix as fp32: the embedding, from the very panels that a tied head multiplies by. */
#include "panels.h"

PD_INLINE int nibble(const uint32_t *q, int k, int column) {
    return q[k / 8 * PD_PANEL + column] >> (4 * (k % 8)) & 15;
}

/* One column's `count` <= 32 k of a group. Each expression rounds at most once, as panels.h says. */
static void unpack_column(int format, const uint8_t *group, int column, int count, float *y) {
    const uint16_t *half = (const uint16_t *)group;
    const int8_t *q8 = (const int8_t *)(half + PD_PANEL);
    const uint32_t *q4 = (const uint32_t *)(half + (format == PD_Q4_1 ? 2 : 1) * PD_PANEL);
    float d = pd_from_f16(half[column]);
    float m = format == PD_Q4_1 ? pd_from_f16(half[PD_PANEL + column]) : -8.0f * d;
    for (int k = 0; k < count; k++) {
        int at = k * PD_PANEL + column;
        switch (format) {
        case PD_F32: y[k] = ((const float *)group)[at]; break;
        case PD_F16: y[k] = pd_from_f16(half[at]); break;
        case PD_BF16: y[k] = pd_from_bf16(half[at]); break;
        case PD_Q8: y[k] = d * (float)q8[at]; break;
        default: y[k] = d * (float)nibble(q4, k, column) + m; break;
        }
    }
}

void pd_embed_rows(const pd_matrix *table, const int32_t *ids, int32_t rows, float *y, int64_t ldy, int32_t part,
                   int32_t parts) {
    int32_t begin = (int32_t)((int64_t)rows * part / parts), end = (int32_t)((int64_t)rows * (part + 1) / parts);
    for (int32_t row = begin; row < end; row++)
        for (int32_t k = 0; k < table->in; k += PD_GROUP) {
            int32_t count = table->in - k < PD_GROUP ? table->in - k : PD_GROUP;
            unpack_column(table->format, pd_panel(table, ids[row] / PD_PANEL, k), ids[row] % PD_PANEL, count,
                          y + row * ldy + k);
        }
}
