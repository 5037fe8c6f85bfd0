/* K and V of one tile of positions: where they lie in the pool's blocks, and unpacked for many rows. */
#pragma once
#include "attention.h"
#include "attention_chains.h"

enum { PD_STRIPS = PD_TILE / 16, PD_MOST_DIM = 256 };

/* Up to so many rows read the pool as it is stored, more share one unpacking. Conversions take a multiplier's place on
 * CPUs with AVX-512; with AVX2 it was a draw from 24 rows to 96 on an AMD Milan, and asking ahead line by line is worth
 * more to few rows. */
#if defined(PD_ISA_AVX512)
enum { PD_FEW_ROWS = 3 * PD_CHAIN_ROWS };
#else
enum { PD_FEW_ROWS = 8 * PD_CHAIN_ROWS };
#endif

static inline int64_t element_bytes(const pd_attention *a) { return a->dtype == PD_KV_F32 ? 4 : 2; }

/* K and V of one tile as panels; the arrays are what the panels point to. */
struct tile {
    struct panel k, v;
    const char *k_runs[1], *v_runs[PD_STRIPS];
    int64_t k_strips[PD_STRIPS], v_strips[PD_MOST_DIM / 16];
};

/* The tile of positions [from, from + positions) where it lies in the pool; what is missing of a whole tile points to
 * its last strip, for those who ask for memory ahead. */
static void find_tile(const pd_attention *a, struct job j, int64_t from, int32_t positions, struct tile *t) {
    const int64_t size = element_bytes(a), head = (int64_t)a->dim * a->block_tokens * size;
    const int32_t run = a->block_tokens < PD_TILE ? a->block_tokens : PD_TILE;
    const char *k = (const char *)a->pool + a->layer_offset + j.head * head, *v = k + a->kv_heads * head;
    const int32_t *block = a->blocks + a->table[j.span] + from / a->block_tokens;
    int32_t slot = (int32_t)(from % a->block_tokens);
    for (int32_t p = 0; p < PD_TILE; p += 16) {
        const char *strip = k + *block * a->block_bytes + slot * size;
        if (p == 0) t->k_runs[0] = strip;
        t->k_strips[p / 16] = strip - t->k_runs[0];
        if (p % run == 0) t->v_runs[p / run] = v + *block * a->block_bytes + slot * a->dim * size;
        if (p + 16 >= positions) continue;
        slot += 16;
        if (slot == a->block_tokens) block++, slot = 0;
    }
    for (int32_t s = 0; s < a->dim / 16; s++) t->v_strips[s] = 16 * s * size;
    t->k = (struct panel){t->k_runs, t->k_strips, &t->k, a->block_tokens * size, a->dim, a->dtype};
    t->v = (struct panel){t->v_runs, t->v_strips, &t->v, a->dim * size, run, a->dtype};
}

PD_INLINE void unpack_as(const int kind, const struct panel *from, int32_t strips, int32_t steps, float *to,
                         int32_t strip_steps) {
    const char *const *runs = from->runs, *const *next_runs = from->next->runs;
    for (int32_t left = steps; left > 0; left -= from->run) {
        const char *p = *runs++, *q = *next_runs++;
        for (int32_t k = 0; k < from->run && k < left; k++, p += from->step, q += from->step, to += 16)
            for (int32_t s = 0; s < strips; s++) {
                pd_prefetch(q + from->next->strips[s]);
                v16_store(to + s * strip_steps * 16, load_as(kind, p + from->strips[s]));
            }
    }
}

/* The panel's numbers as fp32, each strip's steps one after another, and the panel that says so. */
static void unpack(struct panel *panel, const char **run, int64_t *strip_at, int32_t strips, int32_t steps, float *to,
                   int32_t strip_steps) {
    if (panel->kind == PD_KV_F16) unpack_as(PD_KV_F16, panel, strips, steps, to, strip_steps);
    else unpack_as(PD_KV_BF16, panel, strips, steps, to, strip_steps);
    *run = (const char *)to;
    for (int32_t s = 0; s < strips; s++) strip_at[s] = s * strip_steps * 16 * (int64_t)sizeof(float);
    *panel = (struct panel){panel->runs, strip_at, panel->next, 16 * sizeof(float), strip_steps, PD_UNPACKED};
}

/* Positions of the tile at `from` in a sequence that ends at `end`. */
static int32_t positions_from(int64_t end, int64_t from) {
    return end - from < PD_TILE ? (int32_t)(end - from) : PD_TILE;
}

/* The tile that is read next: this job's at `from`, else the first of the job after it, else this job's first again. */
static void find_next(const pd_attention *a, struct job j, int64_t from, int64_t end, struct job after,
                      struct tile *t) {
    if (from < end) find_tile(a, j, from, positions_from(end, from), t);
    else if (after.span < a->spans) find_tile(a, after, 0, positions_from(pd_job_end(a, after), 0), t);
    else find_tile(a, j, 0, positions_from(end, 0), t);
}
