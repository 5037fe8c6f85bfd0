/* What program.c (is it sound?) and step.c (run it) share. */
#pragma once
#include "perdure_cpu.h"

enum { MOST_BUFFERS = 64, MOST_OPS = 1 << 20, MOST_RUNS = 1 << 10 /* of a matrix */ };

/* Rows up to which an op runs inside its neighbour instead of behind a barrier. */
enum {
    NORM_ROWS = 8,   /* every thread norms all rows for itself: more cost more than the barrier saved */
    GATED_ROWS = 32, /* a product's threads hold whole columns, of gate and up alike */
};

/* How an op is run with few rows; found once a step, as it depends on what its neighbours read. */
enum {
    PLAIN = 0,
    NORM_IN_PRODUCT = 1,  /* this norm's result is read by the next op alone, a product */
    SWIGLU_IN_PRODUCT = 2 /* this product's result is the next op's gate and up */
};

/* Bytes from the beginning of `work` to each piece of it, all multiples of 64. */
typedef struct {
    int64_t buffer[MOST_BUFFERS]; /* [tokens, row_floats] */
    int64_t first;                /* [tokens] */
    int64_t places;               /* position, block: [2, tokens] */
    int64_t selected;             /* first, count, start, table: [4, tokens] */
    int64_t ways;                 /* [ops] bytes */
    int64_t rounded;              /* rounded_bytes of all tokens, where a product rounds its input */
    int64_t own, own_bytes;       /* for each thread: a product's scratch, NORM_ROWS rows, NORM_ROWS rounded rows */
    int64_t own_normed, own_rounded;
    int64_t attention;
    int64_t bytes;
} pd_layout;

/* Floats from one row of a buffer to the next. */
static inline int64_t row_floats(int32_t width) { return ((int64_t)width + 15) / 16 * 16; }

/* Bytes of rows rounded to 8 bits, with a scale and a sum for each group of 32. */
static inline int64_t rounded_bytes(int64_t rows, int64_t floats) { return rows * floats / 32 * (32 + 8); }

pd_layout pd_layout_of(const pd_program *program, int32_t tokens, int32_t longest, int32_t threads);

/* An op's way, one of the above. */
int pd_way_of(const pd_program *program, int32_t op);

/* 0, or what is wrong with a step of a sound program; `longest` becomes the tokens of its longest sequence. */
int32_t pd_step_check(const pd_program *program, const pd_step *step, int32_t *longest);
