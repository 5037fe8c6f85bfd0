/* How one step's attention is divided; shared by attention_plan.c and attention.c.
 *
 * A job is one KV head of a span and a tile of its tokens, all q heads of that KV head with them; a piece is one
 * partial (512 absolute positions) of a job. All pieces stand in one line, span by span, head by head, tile by tile,
 * and each part takes a run of about equal cost. A job whose pieces fall to one part is folded there; one that is cut
 * leaves its partials in scratch, and the part that completes it folds them. Where the cuts lie changes no bit:
 * partials end at absolute positions and are always folded left to right. */
#pragma once
#include <stdatomic.h>
#include "perdure_cpu.h"

enum {
    PD_TILE = 64,     /* positions whose scores share one maximum */
    PD_PARTIAL = 512, /* positions of a partial */
    PD_ROWS = 96,     /* rows (token, q head) of a job, unless one token has more */
};

struct job {
    int32_t span, head, tile;
};

/* Before piece `partial` of `job`; `slot` is where the job's partials go when it is cut here, else -1. */
struct cut {
    struct job job;
    int32_t partial, slot;
};

/* What scratch holds, in this order. */
struct plan {
    struct plan_head {
        int32_t parts;
        int64_t slot_floats; /* floats of all partials of one cut job */
    } *head;
    struct cut *cuts;  /* [parts + 1] */
    atomic_int *done;  /* [parts] partials that lie in a slot by now */
    float *work;       /* [parts][pd_work_floats] */
    float *partials;   /* [parts - 1][slot_floats] */
};

static inline int32_t pd_group(const pd_attention *a) { return a->heads / a->kv_heads; }

/* Tokens of a tile. */
static inline int32_t pd_tile_tokens(const pd_attention *a) {
    int32_t tokens = PD_ROWS / pd_group(a);
    return tokens > 0 ? tokens : 1;
}

static inline int32_t pd_tiles(const pd_attention *a, int32_t span) {
    return (a->count[span] + pd_tile_tokens(a) - 1) / pd_tile_tokens(a);
}

/* The line of all jobs; its end has span == a->spans. */
static inline struct job pd_first_job(const pd_attention *a, int32_t span) {
    while (span < a->spans && a->count[span] == 0) span++;
    return (struct job){span, 0, 0};
}
static inline struct job pd_next_job(const pd_attention *a, struct job j) {
    if (++j.tile < pd_tiles(a, j.span)) return j;
    if (++j.head < a->kv_heads) return (struct job){j.span, j.head, 0};
    return pd_first_job(a, j.span + 1);
}

/* Tokens of this tile, and the position after its last. */
static inline int32_t pd_job_tokens(const pd_attention *a, struct job j) {
    int32_t left = a->count[j.span] - j.tile * pd_tile_tokens(a);
    return left < pd_tile_tokens(a) ? left : pd_tile_tokens(a);
}
static inline int64_t pd_job_end(const pd_attention *a, struct job j) {
    return (int64_t)a->start[j.span] + j.tile * pd_tile_tokens(a) + pd_job_tokens(a, j);
}
static inline int32_t pd_job_partials(const pd_attention *a, struct job j) {
    return (int32_t)((pd_job_end(a, j) + PD_PARTIAL - 1) / PD_PARTIAL);
}

/* Most rows of a job, rounded up to whole vectors. */
static inline int64_t pd_most_rows(const pd_attention *a) {
    return ((int64_t)pd_tile_tokens(a) * pd_group(a) + 15) / 16 * 16;
}

/* Floats of one partial: maximum, sum and weighted values of each row. */
static inline int64_t pd_partial_floats(const pd_attention *a) { return pd_most_rows(a) * (a->dim + 2); }

int64_t pd_work_floats(const pd_attention *a);
struct plan pd_plan_in(const pd_attention *a, void *scratch, int32_t parts);
