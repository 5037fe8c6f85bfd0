/* What Python may call. cffi parses this text: plain C, lines that begin with # are left out.
 *
 * Functions are pure and part-wise: `part` of `parts` does its share, and results do not depend on `parts`. None
 * allocates; scratch is the caller's, its size asked for by the function's name with _scratch. Pointers are not kept. */
#pragma once
#include <stdint.h>
#pragma GCC visibility push(default)

/* Digest of the sources and flags that this library was built of, see build.py. */
const char *pd_sources(void);

/* Name of the library's instruction set: avx2, avx512 or neon. */
const char *pd_isa(void);

/* y = exp(x), see exact_exp.h: by vectors; by vectors for x <= 0; one by one. All three give the same bits. */
void pd_exp_vector(const float *x, float *y, int64_t n);
void pd_exp_vector_falling(const float *x, float *y, int64_t n);
void pd_exp_each(const float *x, float *y, int64_t n);

#pragma GCC visibility pop
