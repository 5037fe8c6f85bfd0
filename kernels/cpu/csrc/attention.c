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
 * attention_chains.h has the products, attention_tile.h finds K and V, attention.h says who does what. */
#include "attention.h"
#include "attention_chains.h"
#include "attention_tile.h"
#include "exact_exp.h"

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
    struct job after;   /* what comes after this job */
};

static struct partial partial_at(const pd_attention *a, float *at) {
    return (struct partial){at, at + pd_most_rows(a), at + 2 * pd_most_rows(a)};
}

int64_t pd_work_floats(const pd_attention *a) {
    int64_t rows = pd_most_rows(a);
    int64_t tile = 2 * PD_TILE * (int64_t)a->dim;
    return 2 * pd_partial_floats(a) + rows * (a->dim + PD_TILE) + tile + 2 * (rows + 16) + rows;
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

/* Highest score of a row that sees `sees` of the tile; scores of positions that it does not see become -inf, up to a
 * whole strip. */
PD_INLINE float highest(float *scores, const int strips, int32_t sees) {
    if (sees % 16) {
        float *last = scores + 16 * (strips - 1);
        v16_store(last, v16_select(m16_first(sees % 16), v16_load(last), v16_set(-__builtin_inff())));
    }
    v16 top = v16_load(scores);
#pragma GCC unroll 4
    for (int i = 1; i < strips; i++) top = v16_max(v16_load(scores + 16 * i), top);
    return v16_top(top);
}

/* Scores become weights; their sum. */
PD_INLINE float weigh(float *scores, const int strips, float top) {
    v16 sum = v16_zero();
#pragma GCC unroll 4
    for (int i = 0; i < strips; i++) {
        v16 weight = v16_exp_falling(v16_sub(v16_load(scores + 16 * i), v16_set(top)));
        v16_store(scores + 16 * i, weight);
        sum = i ? v16_add(sum, weight) : weight;
    }
    return v16_sum(sum);
}

static int32_t seen_here(const struct work *w, int32_t row, int64_t from) {
    int64_t seen = w->seen[row] - from;
    return seen < PD_TILE ? (int32_t)seen : PD_TILE;
}

/* Scores of rows [row, end) in the tile at `from` become weights; maxima and sums go on, values so far are scaled. */
static void take_weights(struct work *w, int32_t dim, int32_t row, int32_t end, int64_t from) {
    for (int32_t r = row; r < end; r++) {
        float *s = w->weights + r * PD_TILE, now;
        int32_t sees = seen_here(w, r, from);
        switch ((sees + 15) / 16) {
        case 1: now = highest(s, 1, sees); break;
        case 2: now = highest(s, 2, sees); break;
        case 3: now = highest(s, 3, sees); break;
        default: now = highest(s, 4, sees);
        }
        w->top[r] = now > w->now.top[r] ? now : w->now.top[r];
    }
    for (int32_t r = row; r < end; r += 16)
        v16_store(w->scale + r, v16_exp_falling(v16_sub(v16_load(w->now.top + r), v16_load(w->top + r))));
    for (int32_t r = row; r < end; r++) {
        float *s = w->weights + r * PD_TILE, *o = w->now.out + (int64_t)r * dim, top = w->top[r], sum;
        switch ((seen_here(w, r, from) + 15) / 16) {
        case 1: sum = weigh(s, 1, top); break;
        case 2: sum = weigh(s, 2, top); break;
        case 3: sum = weigh(s, 3, top); break;
        default: sum = weigh(s, 4, top);
        }
        w->now.top[r] = top;
        w->now.sum[r] = __builtin_fmaf(w->now.sum[r], w->scale[r], sum);
        if (w->scale[r] == 1.0f) continue; /* the bits would stay */
        v16 scale = v16_set(w->scale[r]);
        for (int32_t i = 0; i < dim; i += 16) v16_store(o + i, v16_mul(v16_load(o + i), scale));
    }
}

/* The next rows whose chains run side by side: of n, an even share that fits. */
static int32_t share(int32_t n) {
    int32_t shares = (n + PD_CHAIN_ROWS - 1) / PD_CHAIN_ROWS;
    return (n + shares - 1) / shares;
}

/* Rows from `row` on that see as much of the tile as this one. */
static int32_t alike(const struct work *w, int32_t row, int32_t end, int64_t from) {
    int32_t sees = seen_here(w, row, from), next = row + 1;
    if (sees == PD_TILE) return end - row; /* later rows see no less */
    while (next < end && seen_here(w, next, from) == sees) next++;
    return next - row;
}

/* Rows [row, end), which all see some of the tile at `from`. */
static void attend_tile(const struct tile *t, struct work *w, int32_t dim, int32_t row, int32_t end, int64_t from) {
    for (int32_t r = row, n; r < end; r += n) {
        n = share(end - r);
        int32_t strips = (seen_here(w, r + n - 1, from) + 15) / 16;
        multiply(w->q + (int64_t)r * dim, dim, n, &t->k, strips, dim, 1, w->weights + r * PD_TILE, PD_TILE);
    }
    take_weights(w, dim, row, end, from);
    for (int32_t r = row, n; r < end; r += n) {
        n = share(alike(w, r, end, from));
        multiply(w->weights + r * PD_TILE, PD_TILE, n, &t->v, dim / 16, seen_here(w, r, from), 0,
                 w->now.out + (int64_t)r * dim, dim);
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
    struct tile tiles[2], *tile = tiles, *next = tiles + 1;
    find_tile(a, j, begin, positions_from(job_end, begin), tile);
    for (int64_t from = begin; from < end; from += PD_TILE) {
        int32_t row = first_seeing(w, rows, from), positions = positions_from(job_end, from);
        find_next(a, j, from + PD_TILE, job_end, w->after, next);
        tile->k.next = &next->k;
        tile->v.next = &next->v;
        if (rows - row > PD_FEW_ROWS && a->dtype != PD_KV_F32) {
            unpack(&tile->k, tile->k_runs, tile->k_strips, (positions + 15) / 16, dim, w->k, dim);
            unpack(&tile->v, tile->v_runs, tile->v_strips, dim / 16, positions, w->v, PD_TILE);
        }
        attend_tile(tile, w, dim, row, rows, from);
        struct tile *done = tile;
        tile = next;
        next = done;
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
    for (struct job j = from.job; j.span < a->spans; j = w.after) {
        int32_t all = pd_job_partials(a, j), begin = is_same(j, from.job) ? from.partial : 0;
        int32_t last = is_same(j, to.job), end = last ? to.partial : all, slot = begin > 0 ? from.slot : to.slot;
        w.after = pd_next_job(a, j);
        if (end - begin == all) whole_job(a, j, w);
        else if (begin < end)
            shared_job(a, j, begin, end, w, plan.partials + slot * plan.head->slot_floats, &plan.done[slot]);
        if (last) return;
    }
}
