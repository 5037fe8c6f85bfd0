/* Partial selections in a vocabulary's scores. Ranks descend by score; equal scores rank by id, the lower one first.
 * That is a total order, so what is selected depends neither on the method nor on pivots. Scores are no NaNs. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

typedef struct {
    double score;
    int32_t id;
} pd_ranked;

static inline bool ranks_before(pd_ranked one, pd_ranked other) {
    return one.score > other.score || (one.score == other.score && one.id < other.id);
}

/* The `count` <= n first of scores [n], in order of rank, into `best` [count]. */
void pd_select_first(const double *scores, int32_t n, pd_ranked *best, int32_t count);

/* The last one of the shortest run of first ranks whose weights reach `bound`. `ranked` [n] is permuted;
 * weights [id] >= 0; bound is positive and at most the sum of the weights of all that are ranked. */
pd_ranked pd_select_reaching(pd_ranked *ranked, int32_t n, const int64_t *weights, int64_t bound);
