/* From logits to tokens; kernels/reference/sampler.py defines the stages, this file the arithmetic.
 *
 * Scores are doubles: a logit and its bias, exact or rounded once. Weights are exp((score - best) / temperature),
 * rounded to whole multiples of 2^-44 and from there on integers: sums of them are exact in any order, so partial
 * selections, vectors and chunks all find the same nucleus and the same draw. What weighs less than 2^-45 of the best
 * token is never drawn. A vocabulary of 2^18 tokens sums to less than 2^63.
 *
 * Log-probabilities are doubles: exp(logit - best) summed in 8 lanes over ascending ids, missing lanes 0, the lanes by
 * a tree of neighbours i and i + 4, i + 2, i + 1. */
#include "perdure_cpu.h"

#include "crew.h"
#include "exact_double.h"
#include "lanes.h"
#include "select.h"

enum { LANES = 8, CHUNK = 256, WEIGHT_BITS = 44, MOST_VOCAB = 1 << 18 };

/* One row's working memory, cut from a part's scratch; all [vocab]. */
typedef struct {
    double *scores;
    double *exps;      /* shares its memory with weights */
    int64_t *weights;
    pd_ranked *ranked;
    int32_t *ids;
} workspace;

int64_t pd_sample_scratch(int32_t vocab) {
    const int64_t bytes = (int64_t)(sizeof(double) + sizeof(int64_t) + sizeof(pd_ranked) + sizeof(int32_t)) * vocab;
    return (bytes + 63) & ~INT64_C(63);
}

static workspace cut(char *scratch, int32_t vocab) {
    workspace space;
    space.ranked = (pd_ranked *)scratch;
    space.scores = (double *)(space.ranked + vocab);
    space.weights = (int64_t *)(space.scores + vocab);
    space.exps = (double *)space.weights;
    space.ids = (int32_t *)(space.weights + vocab);
    return space;
}

/* ---- the largest logit ---- */

PD_INLINE v16 logits_from(const float *logits, int32_t id, int32_t vocab) {
    if (id + 16 <= vocab) return v16_load(logits + id);
    const v16 part = v16_load_part(logits + id, vocab - id);
    return v16_select(m16_first(vocab - id), part, v16_set(logits[id]));
}

/* The lowest id of the largest logit, or PD_LOGITS_NOT_FINITE if any is not: 0 times that one is no number. */
static int32_t largest(const float *logits, int32_t vocab) {
    v16 most = v16_set(logits[0]), zeros = v16_zero();
    for (int32_t id = 0; id < vocab; id += 16) {
        const v16 here = logits_from(logits, id, vocab);
        most = v16_max(here, most);
        zeros = v16_fma(here, v16_zero(), zeros);
    }
    if (v16_sum(zeros) != 0.0f) return PD_LOGITS_NOT_FINITE;
    most = v16_set(v16_top(most));
    for (int32_t id = 0;; id += 16) {
        const uint32_t found = m16_bits(v16_eq(logits_from(logits, id, vocab), most));
        if (found) return id + __builtin_ctz(found);
    }
}

/* ---- log-probabilities ---- */

/* log(sum of exp(logit - best)). */
static double log_of_sum(const float *logits, int32_t vocab, double best, double *exps) {
    double lanes[LANES] = {0};
    for (int32_t id = 0; id < vocab; id++) exps[id] = exp_of_negative((double)logits[id] - best);
    int32_t id = 0;
    for (; id + LANES <= vocab; id += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += exps[id + lane];
    for (int lane = 0; id < vocab; id++, lane++) lanes[lane] += exps[id];
    for (int half = LANES / 2; half >= 1; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return log_of_large(lanes[0]);
}

static void tell_logprobs(const float *logits, int32_t vocab, int32_t best_id, int32_t alternatives, pd_drawn *drawn,
                          int32_t *top_ids, double *top_logprobs, workspace space) {
    const double best = logits[best_id], log_sum = log_of_sum(logits, vocab, best, space.exps);
    drawn->logprob = (double)logits[drawn->token] - best - log_sum;
    if (alternatives < 1) return;
    for (int32_t id = 0; id < vocab; id++) space.scores[id] = logits[id];
    pd_select_first(space.scores, vocab, space.ranked, alternatives);
    for (int32_t i = 0; i < alternatives; i++) {
        top_ids[i] = space.ranked[i].id;
        top_logprobs[i] = space.ranked[i].score - best - log_sum;
    }
}

/* ---- who may be drawn ---- */

/* The ids that may be drawn, ascending, [n] (NULL: all of them), and a score and a weight for each. */
typedef struct {
    const int32_t *ids;
    double *scores;
    int64_t *weights;
    int32_t n;
} candidates;

/* Scores with bias; returns the best one's id, or an error. */
static int32_t score(const float *logits, int32_t vocab, const pd_sampling *how, int32_t best, double *scores) {
    for (int32_t id = 0; id < vocab; id++) scores[id] = logits[id];
    for (int32_t i = 0; i < how->biases; i++) {
        const int32_t id = how->bias_ids[i];
        if (id < 0 || id >= vocab) return PD_BIAS_OUT_OF_VOCABULARY;
        scores[id] += how->bias[i];
        if (scores[id] != scores[id]) return PD_BIAS_NOT_FINITE;
    }
    if (!how->biases) return best;
    best = 0;
    for (int32_t id = 1; id < vocab; id++) best = scores[id] > scores[best] ? id : best;
    return __builtin_isfinite(scores[best]) ? best : PD_BIAS_NOT_FINITE;
}

static candidates top_k(int32_t vocab, int32_t k, workspace space) {
    candidates all = {NULL, space.scores, space.weights, vocab};
    if (k < 1 || k >= vocab) return all;
    pd_select_first(space.scores, vocab, space.ranked, k);
    const pd_ranked last = space.ranked[k - 1];
    candidates kept = {space.ids, space.scores, space.weights, 0};
    for (int32_t id = 0; id < vocab; id++) {
        const double mine = space.scores[id];
        if (mine < last.score || (mine == last.score && id > last.id)) continue;
        space.ids[kept.n] = id;
        space.scores[kept.n++] = mine; /* never ahead of id */
    }
    return kept;
}

/* Weights, and their sum. Adding 2^52 rounds to a whole number and leaves it in the low bits. */
static int64_t weigh(candidates who, double best, double temperature) {
    const double whole = 0x1p52, unit = (double)(INT64_C(1) << WEIGHT_BITS);
    int64_t sum = 0;
    for (int32_t i = 0; i < who.n; i++) {
        const double share = exp_of_negative((who.scores[i] - best) / temperature);
        who.weights[i] = bits_of_double(share * unit + whole) - bits_of_double(whole);
        sum += who.weights[i];
    }
    return sum;
}

/* Leaves a weight only to the shortest run of first ranks that reaches `p` of `sum`, at least to one.
 *
 * What weighs less than an n-th of 1 - p (and what weighs nothing) is not ranked: all of it together cannot matter, and
 * of a real vocabulary hundreds remain. */
static void keep_nucleus(candidates who, int64_t sum, double p, pd_ranked *ranked) {
    const double wanted = __builtin_ceil(p * (double)sum);
    const int64_t bound = wanted < 1.0 ? 1 : wanted < (double)sum ? (int64_t)wanted : sum;
    const int64_t least = (sum - bound) / who.n + 1;
    int32_t n = 0;
    for (int32_t i = 0; i < who.n; i++) {
        ranked[n] = (pd_ranked){who.scores[i], i};
        n += who.weights[i] >= least;
    }
    const pd_ranked last = pd_select_reaching(ranked, n, who.weights, bound);
    for (int32_t i = 0; i < who.n; i++) {
        const int behind = (who.scores[i] < last.score) | ((who.scores[i] == last.score) & (i > last.id));
        who.weights[i] = behind ? 0 : who.weights[i];
    }
}

/* Leaves a weight to those that have at least `p` of the best one's, which is 1. */
static void keep_likely(candidates who, double p) {
    const double least = (p < 1.0 ? p : 1.0) * (double)(INT64_C(1) << WEIGHT_BITS);
    for (int32_t i = 0; i < who.n; i++) who.weights[i] = (double)who.weights[i] >= least ? who.weights[i] : 0;
}

/* ---- the draw ---- */

static int64_t sum_of(const int64_t *weights, int32_t n) {
    int64_t sum = 0;
    for (int32_t i = 0; i < n; i++) sum += weights[i];
    return sum;
}

/* The first one up to which weights sum to more than `point` of all, by ascending ids. */
static int32_t pick(candidates who, double point) {
    const int64_t sum = sum_of(who.weights, who.n);
    int64_t left = (int64_t)((unsigned __int128)(uint64_t)(point * 0x1p53) * (uint64_t)sum >> 53); /* < sum */
    int32_t i = 0;
    for (; i + CHUNK < who.n; i += CHUNK) {
        const int64_t chunk = sum_of(who.weights + i, CHUNK);
        if (chunk > left) break;
        left -= chunk;
    }
    while (who.weights[i] <= left) left -= who.weights[i++];
    return who.ids ? who.ids[i] : i;
}

static int32_t draw(const float *logits, int32_t vocab, const pd_sampling *how, int32_t best, workspace space) {
    best = score(logits, vocab, how, best, space.scores);
    if (best < 0 || !(how->temperature > 0.0)) return best;
    const double best_score = space.scores[best];
    const candidates who = top_k(vocab, how->top_k, space);
    const int64_t sum = weigh(who, best_score, how->temperature);
    if (how->top_p < 1.0) keep_nucleus(who, sum, how->top_p, space.ranked);
    if (how->min_p > 0.0) keep_likely(who, how->min_p);
    return pick(who, how->point);
}

static void sample_row(const float *logits, int32_t vocab, const pd_sampling *how, pd_drawn *drawn, int32_t *top_ids,
                       double *top_logprobs, int32_t top_ld, workspace space) {
    const int32_t best = largest(logits, vocab);
    *drawn = (pd_drawn){best, 0.0};
    if (best < 0) return;
    if (how->forced >= vocab)
        drawn->token = PD_FORCED_OUT_OF_VOCABULARY;
    else if (how->forced >= 0)
        drawn->token = how->forced;
    else if (how->temperature > 0.0 || how->biases)
        drawn->token = draw(logits, vocab, how, best, space);
    if (drawn->token < 0 || how->alternatives < 0) return;
    int32_t alternatives = how->alternatives < top_ld ? how->alternatives : top_ld;
    alternatives = alternatives < vocab ? alternatives : vocab;
    tell_logprobs(logits, vocab, best, alternatives, drawn, top_ids, top_logprobs, space);
}

void pd_sample(const float *logits, int64_t ld, int32_t rows, int32_t vocab, const pd_sampling *sampling,
               pd_drawn *drawn, int32_t *top_ids, double *top_logprobs, int32_t top_ld, void *scratch, int part,
               int parts) {
    for (int32_t row = part; row < rows; row += parts)
        sample_row(logits + row * ld, vocab, &sampling[row], &drawn[row], top_ids + (int64_t)row * top_ld,
                   top_logprobs + (int64_t)row * top_ld, top_ld, cut(scratch, vocab));
}

/* ---- on a crew ---- */

typedef struct {
    const float *logits;
    int64_t ld;
    int32_t rows, vocab, top_ld;
    const pd_sampling *sampling;
    pd_drawn *drawn;
    int32_t *top_ids;
    double *top_logprobs;
    char *scratch;
} job;

static void sample_part(void *argument, int part, int parts) {
    const job *j = argument;
    pd_sample(j->logits, j->ld, j->rows, j->vocab, j->sampling, j->drawn, j->top_ids, j->top_logprobs, j->top_ld,
              j->scratch + part * pd_sample_scratch(j->vocab), part, parts);
}

int32_t pd_crew_sample(pd_crew *crew, const float *logits, int64_t ld, int32_t rows, int32_t vocab,
                       const pd_sampling *sampling, pd_drawn *drawn, int32_t *top_ids, double *top_logprobs,
                       int32_t top_ld, void *scratch) {
    if (rows < 0 || vocab < 1 || vocab > MOST_VOCAB || ld < vocab || top_ld < 0) return PD_BAD_SIZE;
    job j = {logits, ld, rows, vocab, top_ld, sampling, drawn, top_ids, top_logprobs, scratch};
    return pd_crew_run(crew, sample_part, &j);
}
