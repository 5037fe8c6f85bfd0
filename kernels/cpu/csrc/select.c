/* See select.h. */
#include "select.h"

enum { BLOCK = 32 };

static void swap(pd_ranked *one, pd_ranked *other) {
    const pd_ranked kept = *one;
    *one = *other;
    *other = kept;
}

/* ---- the first few: a heap whose root ranks last ---- */

static void sift_down(pd_ranked *heap, int32_t size, int32_t at) {
    for (int32_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && ranks_before(heap[child], heap[child + 1])) child++;
        if (!ranks_before(heap[at], heap[child])) return;
        swap(&heap[at], &heap[child]);
    }
}

/* Nearly all scores are below the root soon: whole blocks are passed over by one comparison each. */
static bool any_above(const double *scores, double bound) {
    int any = 0;
    for (int i = 0; i < BLOCK; i++) any |= scores[i] > bound;
    return any;
}

void pd_select_first(const double *scores, int32_t n, pd_ranked *best, int32_t count) {
    if (count < 1) return;
    for (int32_t id = 0; id < count; id++) best[id] = (pd_ranked){scores[id], id};
    for (int32_t at = count / 2 - 1; at >= 0; at--) sift_down(best, count, at);
    for (int32_t id = count; id < n;) {
        if (id + BLOCK <= n && !any_above(scores + id, best[0].score)) {
            id += BLOCK;
            continue;
        }
        for (const int32_t end = id + BLOCK < n ? id + BLOCK : n; id < end; id++) {
            if (!(scores[id] > best[0].score)) continue; /* an equal one has the higher id */
            best[0] = (pd_ranked){scores[id], id};
            sift_down(best, count, 0);
        }
    }
    for (int32_t size = count - 1; size > 0; size--) {
        swap(&best[0], &best[size]);
        sift_down(best, size, 0);
    }
}

/* ---- as many as it takes: quickselect by weight ---- */

/* Leaves the middle one of the first, the middle and the last element at the end. */
static void pivot_to_end(pd_ranked *ranked, int32_t n) {
    pd_ranked *first = &ranked[0], *middle = &ranked[n / 2], *last = &ranked[n - 1];
    if (ranks_before(*middle, *first)) swap(first, middle);
    if (ranks_before(*middle, *last)) swap(middle, last);
    if (ranks_before(*last, *first)) swap(first, last);
}

pd_ranked pd_select_reaching(pd_ranked *ranked, int32_t n, const int64_t *weights, int64_t bound) {
    while (n > 1) {
        pivot_to_end(ranked, n);
        const pd_ranked pivot = ranked[n - 1];
        int32_t before = 0;
        int64_t weight = 0; /* of those that rank before the pivot */
        for (int32_t i = 0; i < n - 1; i++) {
            if (!ranks_before(ranked[i], pivot)) continue;
            weight += weights[ranked[i].id];
            swap(&ranked[i], &ranked[before++]);
        }
        if (weight >= bound) {
            n = before;
            continue;
        }
        weight += weights[pivot.id];
        if (weight >= bound) return pivot;
        bound -= weight;
        ranked[n - 1] = ranked[before]; /* the pivot's place; what ranks behind it lies from before + 1 on */
        ranked += before + 1;
        n -= before + 1;
    }
    return ranked[0];
}
