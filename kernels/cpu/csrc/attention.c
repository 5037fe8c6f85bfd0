/* Exact causal attention of a ragged step over paged KV, fp32 arithmetic whatever the pool's dtype.
 *
 * What one row (token, q head) sees is defined without a word about steps, blocks or threads:
 *
 *   score     q times scale, then one chain of fused multiply-adds over ascending dims
 *   tile      64 absolute positions: maximum m of the scores so far, weights exp(score - m), their sum by 16 lanes over
 *             ascending strips, then the lanes' fixed tree
 *   partial   512 absolute positions, (m, l, o) over its tiles: l and o scaled by exp(old m - new m), then l + sum and
 *             one chain o + weight * v over ascending positions
 *   result    partials folded left to right by their maxima, then o / l
 *
 * So whole prefill, any chunks, decode and any split over threads give the same bits. Positions a row does not see add
 * nothing, not even a zero: what later tokens hold can't reach an earlier one, not by a NaN, not by the sign of a zero.
 * Lanes of a strip beyond the sequence's end are computed and dropped.
 *
 * Many rows share one unpacking of a tile to fp32; few rows (a decode) read the pool's own numbers. */
#include "attention.h"
#include "attention_chains.h"
#include "exact_exp.h"

enum { PD_STRIPS = PD_TILE / 16, PD_MOST_DIM = 256 };

/* (m, l, o) of each row. */
struct partial {
    float *top, *sum, *out;
};

struct work {
    struct partial now, folded;
    float *q, *weights; /* [rows][dim], scaled; [rows][PD_TILE], scores at first */
    float *top, *scale; /* [rows + 16] of this tile */
    float *k, *v;       /* unpacked tile: strips of [dim][16] and of [PD_TILE][16] */
    int32_t *seen;      /* [rows] positions that a row sees: all before this one */
};

static int64_t element_bytes(const pd_attention *a) { return a->dtype == PD_KV_F32 ? 4 : 2; }

static struct partial partial_at(const pd_attention *a, float *at) {
    return (struct partial){at, at + pd_most_rows(a), at + 2 * pd_most_rows(a)};
}

int64_t pd_work_floats(const pd_attention *a) {
    int64_t rows = pd_most_rows(a);
    return 2 * pd_partial_floats(a) + rows * (a->dim + PD_TILE) + 2 * (rows + 16) + 2 * PD_TILE * (int64_t)a->dim + rows;
}

static struct work work_at(const pd_attention *a, float *at) {
    int64_t rows = pd_most_rows(a), partial = pd_partial_floats(a);
    struct work w = {.now = partial_at(a, at), .folded = partial_at(a, at + partial)};
    w.q = at + 2 * partial;
    w.weights = w.q + rows * a->dim;
    w.k = w.weights + rows * PD_TILE;
    w.v = w.k + PD_TILE * a->dim;
    w.top = w.v + PD_TILE * a->dim;
    w.scale = w.top + rows + 16;
    w.seen = (int32_t *)(w.scale + rows + 16);
    return w;
}

/* Rows of a job, token by token: their q, and what they see. Returns how many. */
static int32_t take_rows(const pd_attention *a, struct job j, struct work *w) {
    int32_t group = pd_group(a), token = j.tile * pd_tile_tokens(a), tokens = pd_job_tokens(a, j);
    const float *q = a->qkv + (a->first[j.span] + token) * a->qkv_row + (int64_t)j.head * group * a->dim;
    v16 scale = v16_set(a->scale);
    for (int32_t t = 0; t < tokens; t++) {
        float *to = w->q + (int64_t)t * group * a->dim;
        for (int32_t i = 0; i < group * a->dim; i += 16)
            v16_store(to + i, v16_mul(v16_load(q + t * a->qkv_row + i), scale));
        for (int32_t g = 0; g < group; g++) w->seen[t * group + g] = a->start[j.span] + token + t + 1;
    }
    return tokens * group;
}

/* K and V of one tile as panels; the arrays are what the panels point to. */
struct tile {
    struct panel k, v;
    const char *k_runs[1], *v_runs[PD_STRIPS];
    int64_t k_strips[PD_STRIPS], v_strips[PD_MOST_DIM / 16];
};

/* The tile of positions [from, from + positions) where it lies in the pool. */
static void find_tile(const pd_attention *a, struct job j, int64_t from, int32_t positions, struct tile *t) {
    const int64_t size = element_bytes(a), tokens = a->block_tokens, head = a->dim * tokens * size;
    const int32_t *blocks = a->blocks + a->table[j.span], run = tokens < PD_TILE ? (int32_t)tokens : PD_TILE;
    const char *k = (const char *)a->pool + a->layer_offset + j.head * head, *v = k + a->kv_heads * head;
    for (int32_t p = 0; p < positions; p += 16) {
        int64_t block = blocks[(from + p) / tokens] * a->block_bytes, slot = (from + p) % tokens;
        const char *strip = k + block + slot * size;
        if (p == 0) t->k_runs[0] = strip;
        t->k_strips[p / 16] = strip - t->k_runs[0];
        if (p % run == 0) t->v_runs[p / run] = v + block + slot * a->dim * size;
    }
    for (int32_t s = 0; s < a->dim / 16; s++) t->v_strips[s] = 16 * s * size;
    t->k = (struct panel){t->k_runs, t->k_strips, tokens * size, a->dim, a->dtype};
    t->v = (struct panel){t->v_runs, t->v_strips, a->dim * size, run, a->dtype};
}

PD_INLINE void unpack_as(const int dtype, const struct panel *from, int32_t strips, int32_t steps, float *to,
                         int32_t strip_steps) {
    for (int32_t k = 0; k < steps; k++) {
        const char *p = from->runs[k / from->run] + k % from->run * from->step;
        for (int32_t s = 0; s < strips; s++)
            v16_store(to + (s * strip_steps + k) * 16, load_as(dtype, p + from->strips[s]));
    }
}

/* The panel's numbers as fp32, each strip's steps one after another, and the panel that says so. */
static void unpack(struct panel *panel, const char **run, int64_t *strip_at, int32_t strips, int32_t steps, float *to,
                   int32_t strip_steps) {
    if (panel->dtype == PD_KV_F16) unpack_as(PD_KV_F16, panel, strips, steps, to, strip_steps);
    else unpack_as(PD_KV_BF16, panel, strips, steps, to, strip_steps);
    *run = (const char *)to;
    for (int32_t s = 0; s < strips; s++) strip_at[s] = s * strip_steps * 16 * (int64_t)sizeof(float);
    *panel = (struct panel){panel->runs, strip_at, 16 * sizeof(float), strip_steps, PD_KV_F32};
}

/* Scores to weights for rows [row, end) of the tile at `from`; their sums and maxima go on, their values are scaled. */
static void weigh(struct work *w, int32_t dim, int32_t row, int32_t end, int64_t from) {
    const v16 never = v16_set(-__builtin_inff());
    for (int32_t r = row; r < end; r++) {
        float *s = w->weights + r * PD_TILE;
        int32_t sees = w->seen[r] - from < PD_TILE ? (int32_t)(w->seen[r] - from) : PD_TILE;
        int32_t last = (sees - 1) / 16;
        if (sees % 16) v16_store(s + 16 * last, v16_select(m16_first(sees % 16), v16_load(s + 16 * last), never));
        v16 top = v16_load(s);
        for (int32_t i = 1; i <= last; i++) top = v16_max(top, v16_load(s + 16 * i));
        float now = v16_top(top);
        w->top[r] = now > w->now.top[r] ? now : w->now.top[r];
    }
    for (int32_t r = row; r < end; r += 16)
        v16_store(w->scale + r, v16_exp_falling(v16_sub(v16_load(w->now.top + r), v16_load(w->top + r))));
    for (int32_t r = row; r < end; r++) {
        float *s = w->weights + r * PD_TILE, *o = w->now.out + (int64_t)r * dim;
        v16 top = v16_set(w->top[r]), sum = v16_zero();
        for (int32_t i = 0; i < PD_STRIPS && from + 16 * i < w->seen[r]; i++) {
            v16 weight = v16_exp_falling(v16_sub(v16_load(s + 16 * i), top));
            v16_store(s + 16 * i, weight);
            sum = v16_add(sum, weight);
        }
        w->now.top[r] = w->top[r];
        w->now.sum[r] = __builtin_fmaf(w->now.sum[r], w->scale[r], v16_sum(sum));
        if (w->scale[r] == 1.0f) continue; /* the bits would stay */
        v16 scale = v16_set(w->scale[r]);
        for (int32_t i = 0; i < dim; i += 16) v16_store(o + i, v16_mul(v16_load(o + i), scale));
    }
}

static int32_t seen_here(const struct work *w, int32_t row, int64_t from) {
    int64_t seen = w->seen[row] - from;
    return seen < PD_TILE ? (int32_t)seen : PD_TILE;
}

/* The next rows whose chains run side by side: of n, an even share that fits. */
static int32_t share(int32_t n) {
    int32_t shares = (n + PD_CHAIN_ROWS - 1) / PD_CHAIN_ROWS;
    return (n + shares - 1) / shares;
}

/* Rows [row, end), which all see some of the tile at `from`. */
static void attend_tile(const struct tile *t, struct work *w, int32_t dim, int32_t row, int32_t end, int64_t from) {
    for (int32_t r = row, n; r < end; r += n) {
        n = share(end - r);
        int32_t strips = (seen_here(w, r + n - 1, from) + 15) / 16;
        multiply(w->q + (int64_t)r * dim, dim, n, &t->k, strips, dim, 1, w->weights + r * PD_TILE, PD_TILE);
    }
    weigh(w, dim, row, end, from);
    for (int32_t r = row, n; r < end; r += n) {
        int32_t sees = seen_here(w, r, from), same = 1;
        while (r + same < end && seen_here(w, r + same, from) == sees) same++;
        n = share(same);
        multiply(w->weights + r * PD_TILE, PD_TILE, n, &t->v, dim / 16, sees, 0, w->now.out + (int64_t)r * dim, dim);
    }
}

/* First row that sees position `from`. */
static int32_t first_seeing(const struct work *w, int32_t rows, int64_t from) {
    int32_t row = 0;
    while (row < rows && w->seen[row] <= from) row++;
    return row;
}

/* One partial of a job into w->now. */
static void attend(const pd_attention *a, struct job j, int32_t partial, int32_t rows, struct work *w) {
    const int32_t dim = a->dim;
    const int64_t begin = (int64_t)partial * PD_PARTIAL, job_end = w->seen[rows - 1];
    const int64_t end = begin + PD_PARTIAL < job_end ? begin + PD_PARTIAL : job_end;
    for (int32_t r = 0; r < rows; r += 16) {
        v16_store(w->now.top + r, v16_set(-__builtin_inff()));
        v16_store(w->now.sum + r, v16_zero());
    }
    memset(w->now.out, 0, (size_t)rows * (size_t)dim * sizeof(float));
    for (int64_t from = begin; from < end; from += PD_TILE) {
        int32_t row = first_seeing(w, rows, from), positions = seen_here(w, rows - 1, from);
        struct tile t;
        find_tile(a, j, from, positions, &t);
        if (rows - row > PD_CHAIN_ROWS && a->dtype != PD_KV_F32) {
            unpack(&t.k, t.k_runs, t.k_strips, (positions + 15) / 16, dim, w->k, dim);
            unpack(&t.v, t.v_runs, t.v_strips, dim / 16, positions, w->v, PD_TILE);
        }
        attend_tile(&t, w, dim, row, rows, from);
    }
}

/* `b`, the next partial to the right, into `into`, for rows that see some of it. */
static void fold(struct partial into, struct partial b, int32_t dim, int32_t row, int32_t end) {
    for (int32_t r = row; r < end; r++) {
        float *x = into.out + (int64_t)r * dim;
        const float *y = b.out + (int64_t)r * dim;
        float top = into.top[r] > b.top[r] ? into.top[r] : b.top[r];
        float ours = pd_exp(into.top[r] - top), theirs = pd_exp(b.top[r] - top);
        for (int32_t i = 0; i < dim; i += 16)
            v16_store(x + i, v16_fma(v16_set(theirs), v16_load(y + i), v16_mul(v16_set(ours), v16_load(x + i))));
        into.sum[r] = __builtin_fmaf(theirs, b.sum[r], ours * into.sum[r]);
        into.top[r] = top;
    }
}

static void finish(const pd_attention *a, struct job j, struct partial p, int32_t rows) {
    const int32_t group = pd_group(a), token = a->first[j.span] + j.tile * pd_tile_tokens(a);
    for (int32_t r = 0; r < rows; r++) {
        float *to = a->out + (token + r / group) * a->out_row + (int64_t)(j.head * group + r % group) * a->dim;
        v16 sum = v16_set(p.sum[r]);
        for (int32_t i = 0; i < a->dim; i += 16)
            v16_store(to + i, v16_div(v16_load(p.out + (int64_t)r * a->dim + i), sum));
    }
}

/* A job that is this part's alone. */
static void whole_job(const pd_attention *a, struct job j, struct work w) {
    int32_t rows = take_rows(a, j, &w);
    struct partial kept = w.now;
    attend(a, j, 0, rows, &w);
    w.now = w.folded;
    for (int32_t p = 1; p < pd_job_partials(a, j); p++) {
        attend(a, j, p, rows, &w);
        fold(kept, w.now, a->dim, first_seeing(&w, rows, (int64_t)p * PD_PARTIAL), rows);
    }
    finish(a, j, kept, rows);
}

/* Partials [begin, end) of a job that other parts share; the one that completes it folds. */
static void shared_job(const pd_attention *a, struct job j, int32_t begin, int32_t end, struct work w,
                       float *slot, atomic_int *done) {
    int32_t rows = take_rows(a, j, &w), all = pd_job_partials(a, j);
    for (int32_t p = begin; p < end; p++) {
        w.now = partial_at(a, slot + p * pd_partial_floats(a));
        attend(a, j, p, rows, &w);
    }
    /* Release what we wrote, acquire what the others did. */
    if (atomic_fetch_add_explicit(done, end - begin, memory_order_acq_rel) + end - begin < all) return;
    atomic_store_explicit(done, 0, memory_order_relaxed); /* for the next layer, which starts after a barrier */
    struct partial kept = partial_at(a, slot);
    for (int32_t p = 1; p < all; p++)
        fold(kept, partial_at(a, slot + p * pd_partial_floats(a)), a->dim,
             first_seeing(&w, rows, (int64_t)p * PD_PARTIAL), rows);
    finish(a, j, kept, rows);
}

static int is_same(struct job a, struct job b) { return a.span == b.span && a.head == b.head && a.tile == b.tile; }

void pd_attention_run(const pd_attention *a, void *scratch, int32_t part) {
    const struct plan plan = pd_plan_in(a, scratch, ((const struct plan_head *)scratch)->parts);
    const struct cut from = plan.cuts[part], to = plan.cuts[part + 1];
    struct work w = work_at(a, plan.work + part * pd_work_floats(a));
    for (struct job j = from.job; j.span < a->spans; j.span++, j.head = 0)
        for (; j.head < a->kv_heads; j.head++, j.tile = 0)
            for (; j.tile < pd_tiles(a, j.span); j.tile++) {
                int32_t all = pd_job_partials(a, j), begin = is_same(j, from.job) ? from.partial : 0;
                int32_t last = is_same(j, to.job), end = last ? to.partial : all;
                int32_t slot = begin > 0 ? from.slot : to.slot;
                if (end - begin == all) whole_job(a, j, w);
                else if (begin < end)
                    shared_job(a, j, begin, end, w, plan.partials + slot * plan.head->slot_floats, &plan.done[slot]);
                if (last) return;
            }
}
