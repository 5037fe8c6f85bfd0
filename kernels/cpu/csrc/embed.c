/* Rows of a weight matrix as fp32: the embedding, from the very panels that a tied head multiplies by. */
#include "panels.h"

static int nibble(const uint8_t *quants, int k, int column) {
    uint32_t eight;
    memcpy(&eight, quants + 4 * (k / 8 * PD_PANEL + column), sizeof eight);
    return eight >> (4 * (k % 8)) & 15;
}

/* Of one column of a group: w = d * q + m, or d * q, and where the group's q begin. */
typedef struct {
    float d[2], m[2]; /* of 16 k each */
    const uint8_t *q;
} column_scales;

static column_scales scales_of(int format, const uint8_t *group, int column) {
    const uint16_t *half = (const uint16_t *)group;
    const int8_t *s = (const int8_t *)(half + 2 * PD_PANEL) + column;
    const int runs = format == PD_K8 ? 2 : 1; /* pairs of s, and of t behind them */
    float d = format == PD_F8 ? ((const float *)group)[column] : pd_from_f16(half[column]), m = -0.0f;
    if (format == PD_Q4_0) m = -8.0f * d;
    if (format == PD_Q4_1 || format == PD_K4 || format == PD_K8) m = pd_from_f16(half[PD_PANEL + column]);
    switch (format) {
    case PD_K4:
    case PD_K8: {
        const int8_t *t = s + runs * PD_PANEL;
        const int last = (runs - 1) * PD_PANEL;
        return (column_scales){{d * s[0], d * s[last]}, {m * t[0], m * t[last]},
                               (const uint8_t *)(t - column + runs * PD_PANEL)};
    }
    case PD_Q4_1:
    case PD_F8: return (column_scales){{d, d}, {m, m}, group + 4 * PD_PANEL};
    default: return (column_scales){{d, d}, {m, m}, group + 2 * PD_PANEL};
    }
}

static void unpack_quants(int format, const uint8_t *group, int column, float *y) {
    const column_scales of = scales_of(format, group, column);
    for (int k = 0; k < PD_GROUP; k++) {
        const int at = k * PD_PANEL + column;
        const float d = of.d[k / 16], m = of.m[k / 16];
        switch (format) {
        case PD_Q8: y[k] = d * (float)(int8_t)of.q[at]; break;
        case PD_K8: y[k] = d * (float)(int8_t)of.q[at] + m; break;
        case PD_F8: y[k] = d * pd_from_e4m3(of.q[at]); break;
        default: y[k] = d * (float)nibble(of.q, k, column) + m; break;
        }
    }
}

/* One column's `count` <= 32 k of a group. Each expression rounds at most once, as panels.h says. */
static void unpack_column(int format, const uint8_t *group, int column, int count, float *y) {
    if (format >= PD_Q8) {
        unpack_quants(format, group, column, y);
        return;
    }
    for (int k = 0; k < count; k++) {
        const int at = k * PD_PANEL + column;
        switch (format) {
        case PD_F32: y[k] = ((const float *)group)[at]; break;
        case PD_F16: y[k] = pd_from_f16(((const uint16_t *)group)[at]); break;
        default: y[k] = pd_from_bf16(((const uint16_t *)group)[at]); break;
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
