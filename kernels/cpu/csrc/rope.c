/* RoPE, and the one place where KV is rounded and stored.
 *
 * A pair (a, b) turns into (a * cos - b * sin, b * cos + a * sin): the product with cos is rounded, the one with sin is
 * fused.
 *
 * Work is dealt out in units of one head and sixteen tokens of the batch. A K head lies [dim][token] in its block, so
 * what is consecutive there is stored together, a run of slots for each dim. */
#include "columns.h"
#include "perdure_cpu.h"

enum { UNIT = 16, MOST_DIM = 256 };

static int32_t bytes_of(int32_t dtype) { return dtype == PD_KV_F32 ? 4 : 2; }

static void rotate(float *head, int32_t pairs, const float *cos, const float *sin) {
    float *other = head + pairs;
    for (int32_t i = 0; i < pairs; i += 16) {
        const v16 a = load_to(head, i, pairs), b = load_to(other, i, pairs);
        const v16 c = load_to(cos, i, pairs), s = load_to(sin, i, pairs);
        store_to(head, i, pairs, v16_fnma(b, s, v16_mul(a, c)));
        store_to(other, i, pairs, v16_fma(a, s, v16_mul(b, c)));
    }
}

/* A head as the pool has it; returns whether it is finite there. */
static int round_head(const float *head, int32_t dim, int32_t dtype, void *rounded) {
    uint32_t greatest = 0; /* exponent bits of the largest value, all ones if it is none */
    if (dtype == PD_KV_F32) {
        memcpy(rounded, head, (size_t)dim * 4);
        const uint32_t *bits = rounded;
        for (int32_t c = 0; c < dim; c++) greatest = (bits[c] & 0x7f800000) > greatest ? bits[c] & 0x7f800000 : greatest;
        return greatest < 0x7f800000;
    }
    uint16_t *bits = rounded;
    for (int32_t c = 0; c < dim; c += 16) {
        if (dtype == PD_KV_F16)
            v16_store_f16(bits + c, v16_load(head + c));
        else
            v16_store_bf16(bits + c, v16_load(head + c));
    }
    const uint16_t exponent = dtype == PD_KV_F16 ? 0x7c00 : 0x7f80;
    for (int32_t c = 0; c < dim; c++) greatest = (uint32_t)(bits[c] & exponent) > greatest ? bits[c] & exponent : greatest;
    return greatest < exponent;
}

/* Where a head's K or V of a token lies in its block: K's first dim (the others follow at a stride of block_tokens). */
static char *place_of(const pd_pool *pool, int32_t layer, int is_value, int32_t head, int32_t block, int32_t slot) {
    const int64_t size = bytes_of(pool->dtype), piece = (int64_t)pool->dim * pool->block_tokens;
    const int64_t pieces = ((int64_t)block * pool->layers + layer) * 2 * pool->kv_heads + is_value * pool->kv_heads + head;
    return (char *)pool->memory + size * (pieces * piece + (is_value ? (int64_t)slot * pool->dim : slot));
}

/* Tokens [0, run) of `rounded` [run][dim] to consecutive slots from `k` on. */
static void store_keys(const void *rounded, int32_t run, const pd_pool *pool, char *k) {
    const int32_t dim = pool->dim, stride = pool->block_tokens;
    if (pool->dtype == PD_KV_F32) {
        for (int32_t d = 0; d < dim; d++)
            for (int32_t t = 0; t < run; t++) ((uint32_t *)k)[d * stride + t] = ((const uint32_t *)rounded)[t * dim + d];
    } else {
        for (int32_t d = 0; d < dim; d++)
            for (int32_t t = 0; t < run; t++) ((uint16_t *)k)[d * stride + t] = ((const uint16_t *)rounded)[t * dim + d];
    }
}

/* Several parts may find the same token ill: they write the same value. */
static void mark_ill(float *health) {
    float ill = __builtin_inff();
    __atomic_store(health, &ill, __ATOMIC_RELAXED);
}

typedef struct {
    float *qkv, *health;
    int64_t ld;
    int32_t rope_dims, layer;
    const float *cos, *sin;
    pd_places places;
    const pd_pool *pool;
} job;

static void rotate_tokens(const job *j, float *heads, int32_t first, int32_t last) {
    const int32_t pairs = j->rope_dims / 2;
    for (int32_t token = first; token < last; token++) {
        const int64_t row = (int64_t)j->places.position[token] * pairs;
        rotate(heads + token * j->ld, pairs, j->cos + row, j->sin + row);
    }
}

static void write_keys(const job *j, const float *heads, int32_t head, int32_t first, int32_t last) {
    _Alignas(64) char rounded[UNIT * MOST_DIM * 4];
    const pd_pool *pool = j->pool;
    const int64_t row_bytes = (int64_t)pool->dim * bytes_of(pool->dtype);
    for (int32_t token = first; token < last; token++)
        if (!round_head(heads + token * j->ld, pool->dim, pool->dtype, rounded + (token - first) * row_bytes))
            mark_ill(&j->health[token]);
    for (int32_t token = first, run; token < last; token += run) {
        const int32_t block = j->places.block[token], slot = j->places.position[token] % pool->block_tokens;
        for (run = 1; token + run < last && slot + run < pool->block_tokens; run++)
            if (j->places.block[token + run] != block ||
                j->places.position[token + run] != j->places.position[token] + run)
                break;
        store_keys(rounded + (token - first) * row_bytes, run, pool, place_of(pool, j->layer, 0, head, block, slot));
    }
}

static void write_values(const job *j, const float *heads, int32_t head, int32_t first, int32_t last) {
    const pd_pool *pool = j->pool;
    for (int32_t token = first; token < last; token++) {
        const int32_t slot = j->places.position[token] % pool->block_tokens;
        char *v = place_of(pool, j->layer, 1, head, j->places.block[token], slot);
        if (!round_head(heads + token * j->ld, pool->dim, pool->dtype, v)) mark_ill(&j->health[token]);
    }
}

void pd_rope_write_kv(float *qkv, int64_t ld, int32_t tokens, int32_t heads, int32_t rope_dims, const float *cos,
                      const float *sin, pd_places places, const pd_pool *pool, int32_t layer, float *health, int part,
                      int parts) {
    const job j = {qkv, health, ld, rope_dims, layer, cos, sin, places, pool};
    const int32_t all = heads + 2 * pool->kv_heads, keys = heads, values = heads + pool->kv_heads;
    const share mine = share_of((int64_t)(tokens + UNIT - 1) / UNIT * all, part, parts);
    for (int64_t unit = mine.first; unit < mine.last; unit++) {
        const int32_t first = (int32_t)(unit / all) * UNIT, head = (int32_t)(unit % all);
        const int32_t last = first + UNIT < tokens ? first + UNIT : tokens;
        float *columns = qkv + (int64_t)head * pool->dim;
        if (head < values) rotate_tokens(&j, columns, first, last);
        if (head >= values)
            write_values(&j, columns, head - values, first, last);
        else if (head >= keys)
            write_keys(&j, columns, head - keys, first, last);
    }
}
