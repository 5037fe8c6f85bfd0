/* What step.c calls beside the exported kernels of rows.c. */
#pragma once
#include "perdure_cpu.h"

/* pd_swiglu of columns [first, last) of `width` alone. */
void pd_swiglu_columns(const float *x, int64_t ldx, int32_t rows, int32_t width, int32_t first, int32_t last, float *y,
                       int64_t ldy);
