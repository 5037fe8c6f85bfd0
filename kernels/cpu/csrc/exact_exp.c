/* exact_exp.h for those outside the library: its tests. */
#include "exact_exp.h"
#include "perdure_cpu.h"

void pd_exp_vector(const float *x, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v16_store(y + i, v16_exp(v16_load(x + i)));
    if (i < n) v16_store_part(y + i, v16_exp(v16_load_part(x + i, (int)(n - i))), (int)(n - i));
}

void pd_exp_vector_falling(const float *x, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v16_store(y + i, v16_exp_falling(v16_load(x + i)));
    if (i < n) v16_store_part(y + i, v16_exp_falling(v16_load_part(x + i, (int)(n - i))), (int)(n - i));
}

void pd_exp_each(const float *x, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = pd_exp(x[i]);
}
