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

#pragma GCC visibility pop
