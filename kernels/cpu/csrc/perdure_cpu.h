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
    PD_BAD_FACTS = -6, /* of a program, from here on; pd_error_text says more */
    PD_BAD_KIND = -7,
    PD_BAD_BUFFER = -8,
    PD_BAD_WIDTH = -9,
    PD_BAD_MATRIX = -10,
    PD_BAD_WEIGHT = -11,
    PD_BAD_LAYER = -12,
    PD_BAD_ORDER = -13,
    PD_BAD_SPANS = -14, /* of a step, from here on */
    PD_BAD_TABLE = -15,
    PD_BAD_IDS = -16,
    PD_BAD_SAMPLED = -17,
    PD_BAD_WORK = -18,
};

/* ---- the crew (crew.c) ---- */

/* Threads that are made once, number 0 being whoever calls; see crew.h. */
typedef struct pd_crew pd_crew;

/* 0 and a crew of `threads` >= 1; PD_BAD_SIZE, PD_NO_MEMORY or PD_NO_THREADS and NULL. */
int32_t pd_crew_open(int32_t threads, pd_crew **opened);

/* Ends the threads. In a forked child, which has none of them, frees the memory alone. NULL is nothing. */
void pd_crew_close(pd_crew *crew);

int32_t pd_crew_threads(const pd_crew *crew);

/* ---- rows (rows.c): what is done to each token's activations; `ld` is a row's stride in floats ---- */

/* y = x / sqrt(mean(x^2) + eps) * weight over `width` columns of each row; y may be x. */
void pd_rms_norm(const float *x, int64_t ldx, int32_t rows, int32_t width, const float *weight, float eps, float *y,
                 int64_t ldy, int part, int parts);

/* The same in place over each of `heads` neighbours of `dim` columns. */
void pd_head_norm(float *x, int64_t ld, int32_t rows, int32_t heads, int32_t dim, const float *weight, float eps,
                  int part, int parts);

/* y = silu(gate) * up, a row of x being gate [width], up [width]. */
void pd_swiglu(const float *x, int64_t ldx, int32_t rows, int32_t width, float *y, int64_t ldy, int part, int parts);

/* y = x * factor, and y = x + z; y may be x. */
void pd_scale(const float *x, int64_t ldx, int32_t rows, int32_t width, float factor, float *y, int64_t ldy, int part,
              int parts);
void pd_add(const float *x, int64_t ldx, const float *z, int64_t ldz, int32_t rows, int32_t width, float *y,
            int64_t ldy, int part, int parts);

/* y[i] = x[which[i]] for `rows` ascending row numbers; y may be x. */
void pd_take_rows(const float *x, int64_t ldx, const int32_t *which, int32_t rows, int32_t width, float *y, int64_t ldy,
                  int part, int parts);

/* ---- rotation and the KV pool (rope.c) ---- */

enum { PD_KV_F32 = 0, PD_KV_F16 = 1, PD_KV_BF16 = 2 };

/* One block of the pool: layer -> K, V -> kv head -> K as [dim][token], V as [token][dim]. */
typedef struct {
    void *memory;   /* whole blocks */
    int32_t blocks;
    int32_t layers, kv_heads, dim; /* dim: a multiple of 16, at most 256 */
    int32_t dtype;  /* PD_KV_... */
    int32_t block_tokens;
} pd_pool;

/* Each token's place: position in its sequence, and the pool's block that holds that position. */
typedef struct {
    const int32_t *position, *block; /* [tokens] */
} pd_places;

/* Rows of qkv [tokens, ld] are q heads, k heads, v heads. Rotates q and k in place by the tables cos, sin
 * [positions, rope_dims / 2], pair i of a head being (i, i + rope_dims / 2), and stores k and v in the pool, rounded to
 * the nearest even. health[token] becomes infinite when one of them is not finite then. */
void pd_rope_write_kv(float *qkv, int64_t ld, int32_t tokens, int32_t heads, int32_t rope_dims, const float *cos,
                      const float *sin, pd_places places, const pd_pool *pool, int32_t layer, float *health, int part,
                      int parts);

/* ---- sampling (sample.c) ---- */

/* How one row becomes a token; the stages and their order are those of kernels/reference/sampler.py. */
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

/* ---- attention (attention.c) ---- */

/* Causal attention of a ragged step in one layer over the paged pool, see attention.c. New tokens' K and V are in the
 * pool already. Lengths of rows and of the pool's heads are in elements, strides of the pool in bytes. */
typedef struct {
    const void *pool;
    int64_t block_bytes;  /* from one block to the next */
    int64_t layer_offset; /* of the layer in a block: K [kv_heads][dim][block_tokens], then V [kv_heads][block_tokens][dim] */
    int32_t dtype;        /* PD_KV_... */
    int32_t block_tokens; /* 16, 32 or a multiple of 64 */
    int32_t heads;        /* a multiple of kv_heads */
    int32_t kv_heads;
    int32_t dim;          /* a multiple of 16, at most 256 */
    float scale;          /* q is multiplied by it once */
    const float *qkv;     /* [T][qkv_row], q heads first */
    int64_t qkv_row;
    float *out;           /* [T][out_row], heads side by side */
    int64_t out_row;
    int32_t spans;        /* a span: rows [first, first + count) are positions [start, start + count) of a sequence */
    const int32_t *first;
    const int32_t *count;
    const int32_t *start;
    const int32_t *table; /* where a span's physical blocks begin in `blocks` */
    const int32_t *blocks;
} pd_attention;

/* Bytes of scratch, aligned to 64, for steps whose sequences are `longest` positions at most; uses heads, kv_heads and
 * dim alone. All parts share it, and only one attention at a time. */
int64_t pd_attention_scratch(const pd_attention *a, int64_t longest, int32_t parts);

/* Divides a step among parts. Once a step, before any run: it looks at spans and shapes, not at layer, qkv or out. */
void pd_attention_plan(const pd_attention *a, void *scratch, int32_t parts);

/* One part's share of a layer. When every part has returned, `out` is complete; they may run at the same time or in any
 * order. */
void pd_attention_run(const pd_attention *a, void *scratch, int32_t part);

/* ---- Weight matrices and their products, products.c ---- */

enum {
    PD_F32 = 0,
    PD_F16 = 1,
    PD_BF16 = 2,
    PD_Q8 = 3, /* quantised, from here on */
    PD_Q4_0 = 4,
    PD_Q4_1 = 5,
    PD_K4 = 6, /* not for pd_product_i8, from here on */
    PD_K8 = 7,
    PD_F8 = 8,
    PD_FORMATS
};

/* A matrix [out, in] in panels of 32 outputs, see panels.h; made by packing.py. Panels begin at a multiple of 64 bytes;
 * `in` is a multiple of 32 for PD_Q8 and beyond. `next`: outputs behind these, in another format, or NULL; only a
 * program's PD_LINEAR and PD_LOGITS look at it. */
typedef struct pd_matrix pd_matrix;
struct pd_matrix {
    int32_t format;
    int32_t in;
    int32_t out;
    const void *panels;
    const pd_matrix *next;
};

/* y[r, n] = sum over k of x[r, k] * w[n, k], then + bias[n], then + residual[r, n] (either may be NULL).
 * Strides in floats; the residual may be y itself. Scratch: pd_product_scratch() floats for each part. */
void pd_product(const pd_matrix *w, const float *x, int64_t ldx, int32_t rows, float *y, int64_t ldy,
                const float *bias, const float *residual, int64_t ldr, float *scratch, int32_t part, int32_t parts);
int64_t pd_product_scratch(void);

/* Activations rounded to 8 bits in groups of 32, products_i8.c: q [rows][in], d and sum [rows][in / 32]. */
typedef struct {
    int8_t *q;
    float *d, *sum;
    int32_t in;
} pd_rows_i8;
void pd_quantise_rows(const float *x, int64_t ldx, int32_t rows, const pd_rows_i8 *to, int32_t part, int32_t parts);

/* pd_product from such activations; `w` is PD_Q8, PD_Q4_0 or PD_Q4_1. */
void pd_product_i8(const pd_matrix *w, const pd_rows_i8 *x, int32_t rows, float *y, int64_t ldy, const float *bias,
                   const float *residual, int64_t ldr, float *scratch, int32_t part, int32_t parts);
int64_t pd_product_i8_scratch(void);

/* y[r] = row ids[r] of a table [out, in], as fp32 [in]. */
void pd_embed_rows(const pd_matrix *table, const int32_t *ids, int32_t rows, float *y, int64_t ldy, int32_t part,
                   int32_t parts);

/* ---- programs and steps (program.c, step.c) ---- */

/* Kinds of op; kernels/program.py says what they compute. Which fields of pd_op each reads:
 *
 *   PD_EMBED          out                the table `matrix` [vocab, width of out], number: factor
 *   PD_RMS_NORM       out, in            weight [width], number: eps
 *   PD_HEAD_NORM      in (in place)      columns [first, first + heads * dim), weight [dim], number: eps
 *   PD_LINEAR         out, in, residual  matrix [width of out, width of in]; weight: the bias [width of out] or NULL
 *   PD_ROPE_WRITE_KV  in (in place)      layer
 *   PD_ATTENTION      out, in            layer, number: scale
 *   PD_SWIGLU         out, in
 *   PD_SELECT         out, in            may be one; these ops stand together, and behind the last the step consists of
 *                                        the sampled tokens
 *   PD_LOGITS         in                 the head `matrix` [vocab, width of in]
 *   PD_SCALE          out, in            number: factor
 *   PD_ADD            out, in, residual  */
enum {
    PD_EMBED,
    PD_RMS_NORM,
    PD_HEAD_NORM,
    PD_LINEAR,
    PD_ROPE_WRITE_KV,
    PD_ATTENTION,
    PD_SWIGLU,
    PD_SELECT,
    PD_LOGITS,
    PD_SCALE,
    PD_ADD,
    PD_OP_KINDS
};

typedef struct {
    int32_t kind;
    int32_t out, in, residual; /* numbers of buffers; -1: none */
    int32_t layer;
    int32_t first, heads, dim;
    float number;
    const pd_matrix *matrix;
    const float *weight;
} pd_op;

/* A model: `op` [ops] on buffers of `widths` [buffers] columns. All that is pointed to must outlive its steps. */
typedef struct {
    const pd_op *op;
    const int32_t *widths;
    const float *cos, *sin; /* [positions, rope_dims / 2] */
    int32_t ops, buffers;
    int32_t vocab, heads, kv_heads, head_dim, layers;
    int32_t positions, rope_dims;
    int32_t kv_dtype, block_tokens; /* PD_KV_... */
    int32_t int8_activations;       /* 1: products with PD_Q8, PD_Q4_0, PD_Q4_1 are pd_product_i8, another numerics */
} pd_program;

/* One step: `tokens` of several sequences, span by span. A span's `count` tokens are positions from `start` on, and its
 * physical blocks stand in `tables` from `table` on. */
typedef struct {
    int32_t tokens, spans, sampled, table_entries;
    const int32_t *ids;                           /* [tokens] */
    const int32_t *count, *start, *table;         /* [spans] */
    const int32_t *tables;                        /* [table_entries] */
    const int32_t *sample;                        /* [sampled], ascending: the tokens that want logits */
    void *pool;                                   /* [pool_blocks], written where the tokens lie */
    int32_t pool_blocks;
    float *health;                                /* out: [tokens], 0, or infinite for a token whose KV is not finite */
    float *logits;                                /* out: [sampled, vocab] */
    void *work;                                   /* pd_step_bytes, aligned to 64 */
    int64_t work_bytes;
    int64_t *spent;                               /* NULL, or [PD_OP_KINDS] nanoseconds, added to */
} pd_step;

/* 0, or what is wrong and, in `op`, which op has it (-1: the program's own numbers). */
int32_t pd_program_check(const pd_program *program, int32_t *op);

/* Bytes of `work` for steps of up to `tokens` tokens on `threads`, `longest` being the tokens of the longest sequence
 * behind the step; PD_BAD_FACTS or PD_BAD_SIZE for what cannot be. Ops and weights are not looked at. */
int64_t pd_step_bytes(const pd_program *program, int32_t tokens, int32_t longest, int32_t threads);

/* Runs a step; checks program and step first and on an error (see pd_program_check) has touched nothing. */
int32_t pd_crew_step(pd_crew *crew, const pd_program *program, const pd_step *step, int32_t *op);

/* What an error says, in English; "" for a number that is none. */
const char *pd_error_text(int32_t error);

#pragma GCC visibility pop
