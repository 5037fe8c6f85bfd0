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

/* y = exp(x), see exact_exp.h: by vectors; by vectors for x <= 0; one by one. All three give the same bits. */
void pd_exp_vector(const float *x, float *y, int64_t n);
void pd_exp_vector_falling(const float *x, float *y, int64_t n);
void pd_exp_each(const float *x, float *y, int64_t n);

/* What a function that can refuse returns: 0, or one of these. */
enum {
    PD_FORKED = -1,     /* the crew was opened by this process's parent */
    PD_BUSY = -2,       /* another thread is running this crew */
    PD_NO_THREADS = -3, /* the system would not start them */
    PD_NO_MEMORY = -4,
    PD_BAD_SIZE = -5,
};

/* ---- the crew (crew.c) ---- */

/* Threads that are made once, number 0 being whoever calls; see crew.h. */
typedef struct pd_crew pd_crew;

/* 0 and a crew of `threads` >= 1; PD_BAD_SIZE, PD_NO_MEMORY or PD_NO_THREADS and NULL. */
int32_t pd_crew_open(int32_t threads, pd_crew **opened);

/* Ends the threads. In a forked child, which has none of them, frees the memory alone. NULL is nothing. */
void pd_crew_close(pd_crew *crew);

int32_t pd_crew_threads(const pd_crew *crew);

/* ---- sampling (sample.c) ---- */

/* How one row becomes a token; the stages and their order are those of services/worker/sampler.py. */
typedef struct {
    double temperature; /* not above 0: the largest logit */
    double top_p, min_p;
    double point;         /* the row's random number, a multiple of 2^-53 in [0, 1) */
    int32_t top_k;        /* 0: all */
    int32_t forced;       /* -1, or a token that is not drawn but given: its log-probability alone is wanted */
    int32_t alternatives; /* -1: no log-probabilities; else how many best tokens come with the token's own */
    int32_t biases;
    const int32_t *bias_ids; /* [biases] */
    const double *bias;      /* [biases], added to the logits */
} pd_sampling;

/* Why a row has no token. */
enum {
    PD_LOGITS_NOT_FINITE = -1,
    PD_BIAS_OUT_OF_VOCABULARY = -2,
    PD_BIAS_NOT_FINITE = -3, /* no largest logit is left that is finite */
    PD_FORCED_OUT_OF_VOCABULARY = -4,
};

/* `token` >= 0, or the error above. `logprob`: log-softmax of the raw logits at the token, where asked for. */
typedef struct {
    int32_t token;
    double logprob;
} pd_drawn;

/* Bytes of scratch for each part. */
int64_t pd_sample_scratch(int32_t vocab);

/* Rows of logits [rows, ld] become drawn [rows], and their `alternatives` best tokens top_ids, top_logprobs
 * [rows, top_ld], descending, ties to the lower id (no more than top_ld or vocab of them). */
void pd_sample(const float *logits, int64_t ld, int32_t rows, int32_t vocab, const pd_sampling *sampling,
               pd_drawn *drawn, int32_t *top_ids, double *top_logprobs, int32_t top_ld, void *scratch, int part,
               int parts);

/* The same on a crew, `scratch` being pd_sample_scratch for each of its threads: 0, PD_FORKED, PD_BUSY or PD_BAD_SIZE. */
int32_t pd_crew_sample(pd_crew *crew, const float *logits, int64_t ld, int32_t rows, int32_t vocab,
                       const pd_sampling *sampling, pd_drawn *drawn, int32_t *top_ids, double *top_logprobs,
                       int32_t top_ld, void *scratch);

#pragma GCC visibility pop
