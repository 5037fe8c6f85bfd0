/* Whether a program and a step are sound: nothing that step.c reads or writes lies outside what it was given. Memory
 * behind pointers is taken on trust; sizes are not. */
#include <stddef.h>

#include "step.h"

static const char *const TEXTS[] = {
    [-PD_FORKED] = "the crew belongs to this process's parent",
    [-PD_BUSY] = "another thread is running this crew",
    [-PD_NO_THREADS] = "the system would not start the threads",
    [-PD_NO_MEMORY] = "there is no memory",
    [-PD_BAD_SIZE] = "a size is out of range",
    [-PD_BAD_FACTS] = "heads, sizes or tables of the program do not fit together",
    [-PD_BAD_KIND] = "there is no such kind of op",
    [-PD_BAD_BUFFER] = "it names a buffer that is not there, or one twice that must differ",
    [-PD_BAD_WIDTH] = "the widths of its buffers do not fit",
    [-PD_BAD_MATRIX] = "its matrix is missing or has another shape or format",
    [-PD_BAD_WEIGHT] = "its weight is missing",
    [-PD_BAD_LAYER] = "there is no such layer",
    [-PD_BAD_ORDER] = "it stands before or behind the selection of sampled tokens and must not",
    [-PD_BAD_SPANS] = "spans do not cover the tokens, or go beyond the model's positions",
    [-PD_BAD_TABLE] = "a block table is too short, or names a block that the pool has not",
    [-PD_BAD_IDS] = "a token's id is not in the vocabulary",
    [-PD_BAD_SAMPLED] = "sampled tokens are not ascending tokens of the step, or not all where none can be selected",
    [-PD_BAD_WORK] = "the working memory is too small or not aligned",
};

const char *pd_error_text(int32_t error) {
    const int32_t last = (int32_t)(sizeof TEXTS / sizeof *TEXTS) - 1;
    return error < 0 && error >= -last && TEXTS[-error] ? TEXTS[-error] : "";
}

/* ---- the program ---- */

static int32_t check_facts(const pd_program *p) {
    const int sizes = p->ops >= 1 && p->ops <= MOST_OPS && p->buffers >= 1 && p->buffers <= MOST_BUFFERS &&
                      p->vocab >= 1 && p->layers >= 0 && p->positions >= 1 && (p->int8_activations | 1) == 1;
    const int heads = p->heads >= 1 && p->kv_heads >= 1 && p->heads % p->kv_heads == 0 && p->heads <= 1 << 14;
    const int dim = p->head_dim >= 16 && p->head_dim <= 256 && p->head_dim % 16 == 0;
    const int rope = p->rope_dims >= 0 && p->rope_dims <= p->head_dim && p->rope_dims % 2 == 0;
    const int block = p->block_tokens == 16 || p->block_tokens == 32 || (p->block_tokens > 0 && p->block_tokens % 64 == 0);
    const int pool = p->kv_dtype >= PD_KV_F32 && p->kv_dtype <= PD_KV_BF16 && block && p->block_tokens <= 1 << 16;
    const int there = p->op && p->widths && (p->rope_dims == 0 || (p->cos && p->sin));
    if (!(sizes && heads && dim && rope && pool && there)) return PD_BAD_FACTS;
    for (int32_t b = 0; b < p->buffers; b++)
        if (p->widths[b] < 1 || p->widths[b] > 1 << 24) return PD_BAD_FACTS;
    return 0;
}

/* Width of a buffer, -1 if there is none of that number. */
static int32_t width(const pd_program *p, int32_t buffer) {
    return buffer >= 0 && buffer < p->buffers ? p->widths[buffer] : -1;
}

static int32_t check_matrix(const pd_matrix *m, int32_t out, int32_t in) {
    int64_t found = 0;
    for (int runs = 0; m && runs < MOST_RUNS; m = m->next, runs++) {
        const int known = m->panels && m->out >= 1 && m->format >= PD_F32 && m->format < PD_FORMATS;
        if (!known || m->in != in || (m->format >= PD_Q8 && m->in % 32)) return PD_BAD_MATRIX;
        found += m->out;
    }
    return m || found != out ? PD_BAD_MATRIX : 0;
}

static int32_t check_residual(const pd_program *p, const pd_op *op, int32_t out) {
    if (op->residual == -1 && op->kind == PD_LINEAR) return 0;
    const int32_t residual = width(p, op->residual);
    return residual < 0 ? PD_BAD_BUFFER : residual != out ? PD_BAD_WIDTH : 0;
}

/* Buffers that the kind has, and that differ where one is read while the other is written. */
static int32_t check_buffers(const pd_program *p, const pd_op *op) {
    const int has_out = op->kind != PD_HEAD_NORM && op->kind != PD_ROPE_WRITE_KV && op->kind != PD_LOGITS;
    if (has_out && width(p, op->out) < 0) return PD_BAD_BUFFER;
    if (op->kind != PD_EMBED && width(p, op->in) < 0) return PD_BAD_BUFFER;
    const int apart = op->kind == PD_LINEAR || op->kind == PD_ATTENTION || op->kind == PD_SWIGLU;
    if (apart && op->out == op->in) return PD_BAD_BUFFER;
    if (op->kind == PD_LINEAR && op->residual == op->in) return PD_BAD_BUFFER;
    return 0;
}

static int32_t check_shapes(const pd_program *p, const pd_op *op) {
    const int32_t in = width(p, op->in), out = width(p, op->out), dim = p->head_dim;
    const int64_t attended = (int64_t)p->heads * dim, packed = attended + 2 * (int64_t)p->kv_heads * dim;
    int32_t wrong;
    switch (op->kind) {
    case PD_EMBED: return op->matrix && op->matrix->next ? PD_BAD_MATRIX : check_matrix(op->matrix, p->vocab, out);
    case PD_RMS_NORM: return in != out ? PD_BAD_WIDTH : op->weight ? 0 : PD_BAD_WEIGHT;
    case PD_HEAD_NORM:
        if (op->first < 0 || op->heads < 1 || op->dim < 1 || op->first + (int64_t)op->heads * op->dim > in)
            return PD_BAD_WIDTH;
        return op->weight ? 0 : PD_BAD_WEIGHT;
    case PD_LINEAR: return (wrong = check_matrix(op->matrix, out, in)) ? wrong : check_residual(p, op, out);
    case PD_LOGITS: return check_matrix(op->matrix, p->vocab, in);
    case PD_ROPE_WRITE_KV:
    case PD_ATTENTION:
        if (op->layer < 0 || op->layer >= p->layers) return PD_BAD_LAYER;
        return in != packed || (op->kind == PD_ATTENTION && out != attended) ? PD_BAD_WIDTH : 0;
    case PD_SWIGLU: return in != 2 * (int64_t)out ? PD_BAD_WIDTH : 0;
    case PD_ADD: return in != out ? PD_BAD_WIDTH : check_residual(p, op, out);
    default: return in != out ? PD_BAD_WIDTH : 0;
    }
}

int32_t pd_program_check(const pd_program *program, int32_t *op) {
    *op = -1;
    int32_t wrong = check_facts(program);
    int selected = 0;
    for (int32_t n = 0; !wrong && n < program->ops; n++) {
        const pd_op *one = &program->op[n];
        *op = n;
        if (one->kind < 0 || one->kind >= PD_OP_KINDS) return PD_BAD_KIND;
        const int behind = selected && (n == 0 || program->op[n - 1].kind != PD_SELECT);
        if (one->kind == PD_SELECT && behind) return PD_BAD_ORDER;
        if (selected && (one->kind == PD_EMBED || one->kind == PD_ROPE_WRITE_KV)) return PD_BAD_ORDER;
        selected |= one->kind == PD_SELECT;
        wrong = check_buffers(program, one);
        if (!wrong) wrong = check_shapes(program, one);
    }
    if (!wrong) *op = -1;
    return wrong;
}

/* ---- the step ---- */

static int32_t check_spans(const pd_program *p, const pd_step *s, int32_t *longest) {
    int64_t tokens = 0;
    for (int32_t span = 0; span < s->spans; span++) {
        if (s->count[span] < 1 || s->start[span] < 0) return PD_BAD_SPANS;
        const int64_t end = (int64_t)s->start[span] + s->count[span];
        if (end > p->positions) return PD_BAD_SPANS;
        *longest = end > *longest ? (int32_t)end : *longest;
        tokens += s->count[span];
        const int64_t blocks = (end + p->block_tokens - 1) / p->block_tokens, first = s->table[span];
        if (first < 0 || first + blocks > s->table_entries) return PD_BAD_TABLE;
        for (int64_t i = first; i < first + blocks; i++)
            if (s->tables[i] < 0 || s->tables[i] >= s->pool_blocks) return PD_BAD_TABLE;
    }
    return tokens == s->tokens ? 0 : PD_BAD_SPANS;
}

int32_t pd_step_check(const pd_program *program, const pd_step *step, int32_t *longest) {
    *longest = 0;
    if (step->tokens < 1 || step->spans < 1) return PD_BAD_SPANS;
    const int32_t wrong = check_spans(program, step, longest);
    if (wrong) return wrong;
    for (int32_t token = 0; token < step->tokens; token++)
        if (step->ids[token] < 0 || step->ids[token] >= program->vocab) return PD_BAD_IDS;
    int selects = 0, tells = 0;
    for (int32_t n = 0; n < program->ops; n++) {
        selects |= program->op[n].kind == PD_SELECT;
        tells |= program->op[n].kind == PD_LOGITS && !selects;
    }
    if (step->sampled < 0 || (tells && step->sampled != step->tokens)) return PD_BAD_SAMPLED;
    for (int32_t i = 0, least = 0; i < step->sampled; least = step->sample[i++] + 1)
        if (step->sample[i] < least || step->sample[i] >= step->tokens) return PD_BAD_SAMPLED;
    return 0;
}

/* ---- working memory ---- */

static int64_t taken(pd_layout *layout, int64_t bytes) {
    const int64_t at = (layout->bytes + 63) / 64 * 64;
    layout->bytes = (at + bytes + 63) / 64 * 64;
    return at;
}

pd_layout pd_layout_of(const pd_program *program, int32_t tokens, int32_t longest, int32_t threads) {
    pd_layout layout = {.bytes = 0};
    int64_t widest = 0;
    for (int32_t b = 0; b < program->buffers; b++) {
        const int64_t floats = row_floats(program->widths[b]);
        widest = floats > widest ? floats : widest;
        layout.buffer[b] = taken(&layout, 4 * floats * tokens);
    }
    layout.first = taken(&layout, 4 * (int64_t)tokens);
    layout.places = taken(&layout, 4 * 2 * (int64_t)tokens);
    layout.selected = taken(&layout, 4 * 4 * (int64_t)tokens);
    layout.ways = taken(&layout, program->ops);
    widest = (widest + 31) / 32 * 32;
    const int32_t rounds = program->int8_activations;
    const int64_t rounding = rounds ? pd_product_i8_scratch() : 0, plain = pd_product_scratch();
    layout.rounded = taken(&layout, rounds ? rounded_bytes(tokens, widest) : 0);
    pd_layout own = {.bytes = 4 * (rounding > plain ? rounding : plain)};
    layout.own_normed = taken(&own, 4 * NORM_ROWS * widest);
    layout.own_rounded = taken(&own, rounds ? rounded_bytes(NORM_ROWS, widest) : 0);
    layout.own_bytes = own.bytes;
    layout.own = taken(&layout, threads * layout.own_bytes);
    const pd_attention shape = {.heads = program->heads, .kv_heads = program->kv_heads, .dim = program->head_dim};
    layout.attention = taken(&layout, pd_attention_scratch(&shape, longest, threads));
    return layout;
}

int64_t pd_step_bytes(const pd_program *program, int32_t tokens, int32_t longest, int32_t threads) {
    if (check_facts(program)) return PD_BAD_FACTS;
    if (tokens < 1 || longest < 1 || threads < 1) return PD_BAD_SIZE;
    return pd_layout_of(program, tokens, longest, threads).bytes;
}

/* ---- ways ---- */

static int reads(const pd_op *op, int32_t buffer) {
    return (op->kind != PD_EMBED && op->in == buffer) ||
           ((op->kind == PD_LINEAR || op->kind == PD_ADD) && op->residual == buffer);
}

static int writes(const pd_op *op, int32_t buffer) {
    return op->kind != PD_HEAD_NORM && op->kind != PD_ROPE_WRITE_KV && op->kind != PD_LOGITS && op->out == buffer;
}

/* Whether nobody from op `n` on reads what the buffer holds before it. */
static int is_dead(const pd_program *program, int32_t n, int32_t buffer) {
    for (; n < program->ops; n++) {
        if (reads(&program->op[n], buffer)) return 0;
        if (writes(&program->op[n], buffer)) return 1;
    }
    return 1;
}

/* The norm's input is read by every thread while others are in the product already, so neither that product nor a
 * SwiGLU that runs inside it may write there. */
static int norms_in_product(const pd_program *program, int32_t n) {
    const pd_op *op = &program->op[n], *next = op + 1;
    if (next->kind != PD_LINEAR && next->kind != PD_LOGITS) return 0;
    if (op->in == op->out || next->in != op->out || !is_dead(program, n + 2, op->out)) return 0;
    if (next->kind == PD_LOGITS) return 1;
    const int gated = n + 2 < program->ops && op[2].kind == PD_SWIGLU && op[2].out == op->in;
    return next->residual != op->out && next->out != op->in && !gated;
}

/* A product's input is read by every thread while others write columns of the SwiGLU's result. */
static int gates_in_product(const pd_program *program, int32_t n) {
    const pd_op *op = &program->op[n], *next = op + 1;
    return next->kind == PD_SWIGLU && next->in == op->out && next->out != op->in && op->residual == -1 &&
           !op->matrix->next && op->matrix->out % 64 == 0;
}

int pd_way_of(const pd_program *program, int32_t n) {
    if (n + 1 >= program->ops) return PLAIN;
    if (program->op[n].kind == PD_RMS_NORM && norms_in_product(program, n)) return NORM_IN_PRODUCT;
    if (program->op[n].kind == PD_LINEAR && gates_in_product(program, n)) return SWIGLU_IN_PRODUCT;
    return PLAIN;
}
