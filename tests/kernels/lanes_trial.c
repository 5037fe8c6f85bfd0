/* Each operation of lanes.h on its own, for test_cpu_lanes.py. */
#include "lanes.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT void by_lane(int op, const float *a, const float *b, const float *c, float *out) {
    v16 x = v16_load(a), y = v16_load(b), z = v16_load(c), r = v16_zero();
    switch (op) {
    case 0: r = v16_add(x, y); break;
    case 1: r = v16_sub(x, y); break;
    case 2: r = v16_mul(x, y); break;
    case 3: r = v16_div(x, y); break;
    case 4: r = v16_max(x, y); break;
    case 5: r = v16_min(x, y); break;
    case 6: r = v16_sqrt(x); break;
    case 7: r = v16_fma(x, y, z); break;
    case 8: r = v16_fnma(x, y, z); break;
    case 9: r = v16_round(x); break;
    case 10: r = v16_select(v16_lt(x, y), x, z); break;
    case 11: r = v16_select(v16_le(x, y), x, z); break;
    case 12: r = v16_select(v16_eq(x, y), x, z); break;
    }
    v16_store(out, r);
}

EXPORT void powers_of_two(const float *n, float *out) { v16_store(out, v16_pow2(v16_load(n))); }
EXPORT float sum(const float *a) { return v16_sum(v16_load(a)); }
EXPORT float top(const float *a) { return v16_top(v16_load(a)); }
EXPORT uint32_t first(int n) { return m16_bits(m16_first(n)); }
EXPORT uint32_t less(const float *a, const float *b) { return m16_bits(v16_lt(v16_load(a), v16_load(b))); }
EXPORT void part(const float *a, int n, float *loaded, float *stored) {
    v16_store(loaded, v16_load_part(a, n));
    v16_store_part(stored, v16_load(loaded), n);
}

EXPORT void from_f16(const uint16_t *a, float *out) { v16_store(out, v16_load_f16(a)); }
EXPORT void to_f16(const float *a, uint16_t *out) { v16_store_f16(out, v16_load(a)); }
EXPORT void from_bf16(const uint16_t *a, float *out) { v16_store(out, v16_load_bf16(a)); }
EXPORT void to_bf16(const float *a, uint16_t *out) { v16_store_bf16(out, v16_load(a)); }
EXPORT void from_i8(const int8_t *a, float *out) { v16_store(out, v16_load_i8(a)); }
EXPORT void from_e4m3(const uint8_t *a, float *out /* [2][16] */) {
    v16_store(out, v16_load_e4m3(a));
    for (int i = 0; i < 16; i++) out[16 + i] = pd_from_e4m3(a[i]);
}
EXPORT void nibbles(const uint32_t *a, float *out /* [8][16] */) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) v16_store(out + 16 * i, v16_mul(n16_pick(n16_load(a), i), v16_set(1.0f / n16_unit(i))));
}
EXPORT void single_halfs(const uint16_t *a, float *wide, float *wide_b, uint16_t *back) {
    for (int i = 0; i < 16; i++) {
        wide[i] = pd_from_f16(a[i]);
        wide_b[i] = pd_from_bf16(a[i]);
        back[i] = pd_to_f16(wide[i]);
    }
}
