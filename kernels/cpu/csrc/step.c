#define _POSIX_C_SOURCE 199309L
/* Runs a program of ops in one region of the crew, every thread its share of every op.
 *
 * Behind an op stands a barrier, as what one thread wrote the others read next. With few rows two kinds of pair do
 * without the one in between, and bits do not change, as a kernel's results do not depend on who computes how many:
 * a norm that only the next product reads is computed by every thread for itself, and a product of gate and up is
 * divided so that a thread has both halves of its columns and can gate them.
 *
 *     work:  buffers ─ places of tokens ─ spans of selected tokens ─ ways of ops ─ rounded ─ threads' own ─ attention's scratch
 *            all threads' between barriers                                                   private       attention.c's */
#include "step.h"

#include <string.h>
#include <time.h>

#include "crew.h"
#include "panels.h"
#include "rows.h"

/* Spans as attention wants them. */
typedef struct {
    int32_t rows, spans;
    int32_t *first;
    const int32_t *count, *start, *table;
} spans;

/* What all threads share during a step. */
typedef struct {
    pd_crew *crew;
    const pd_program *program;
    const pd_step *step;
    float *buffer[MOST_BUFFERS];
    uint8_t *ways;
    char *rounded, *own;
    int64_t own_bytes, own_normed, own_rounded;
    void *attention_scratch;
    pd_places places;
    spans all, selected;
    pd_pool pool;
} stage;

/* What each thread knows for itself. */
typedef struct {
    stage *stage;
    int part, parts;
    const spans *now; /* all tokens, or behind PD_SELECT the selected ones */
    float *scratch;   /* a product's */
    float *normed;    /* [NORM_ROWS] rows of the widest buffer */
    char *rounded;    /* the same, rounded to 8 bits */
} player;

static int64_t stride(const player *p, int32_t buffer) { return row_floats(p->stage->program->widths[buffer]); }

/* ---- ops ---- */

static void embed(const player *p, const pd_op *op) {
    const stage *s = p->stage;
    float *out = s->buffer[op->out];
    const int64_t ld = stride(p, op->out);
    pd_embed_rows(op->matrix, s->step->ids, p->now->rows, out, ld, p->part, p->parts);
    if (op->number == 1.0f) return;
    pd_crew_barrier(s->crew);
    pd_scale(out, ld, p->now->rows, s->program->widths[op->out], op->number, out, ld, p->part, p->parts);
}

static void norm(const player *p, const pd_op *op, float *out, int64_t ld, int part, int parts) {
    pd_rms_norm(p->stage->buffer[op->in], stride(p, op->in), p->now->rows, p->stage->program->widths[op->in], op->weight,
                op->number, out, ld, part, parts);
}

/* A product's input: the buffer, or this thread's own norm of it; and the same rounded, where the product wants that. */
typedef struct {
    const float *x;
    int64_t ld;
    pd_rows_i8 rounded;
} input;

static int is_normed_here(const player *p, int32_t n) {
    return n > 0 && p->stage->ways[n - 1] == NORM_IN_PRODUCT && p->now->rows <= NORM_ROWS;
}

/* Other formats multiply activations in fp32 in such a program, too. */
static int rounds(const player *p, const pd_op *op) {
    for (const pd_matrix *w = op->matrix; w; w = w->next)
        if (w->format < PD_Q8 || w->format > PD_Q4_1) return 0;
    return p->stage->program->int8_activations;
}

static pd_rows_i8 rounded_in(char *memory, int64_t rows, int32_t width) {
    float *scales = (float *)(memory + rows * width);
    return (pd_rows_i8){(int8_t *)memory, scales, scales + rows * width / 32, width};
}

/* Few rows are rounded by every thread for itself, more by all together. */
static void round_input(const player *p, const pd_op *op, input *in) {
    const int32_t rows = p->now->rows;
    const int own = rows <= NORM_ROWS;
    in->rounded = rounded_in(own ? p->rounded : p->stage->rounded, rows, op->matrix->in);
    pd_quantise_rows(in->x, in->ld, rows, &in->rounded, own ? 0 : p->part, own ? 1 : p->parts);
    if (!own) pd_crew_barrier(p->stage->crew);
}

static input input_of(const player *p, int32_t n) {
    const pd_op *op = &p->stage->program->op[n];
    input in = {.x = p->stage->buffer[op->in], .ld = stride(p, op->in)};
    if (is_normed_here(p, n)) {
        norm(p, op - 1, p->normed, in.ld, 0, 1);
        in.x = p->normed;
    }
    if (rounds(p, op)) round_input(p, op, &in);
    return in;
}

static void multiply(const player *p, const pd_op *op, const pd_matrix *w, input in, float *y, int64_t ldy,
                     const float *bias, const float *residual, int64_t ldr, int part, int parts) {
    const int32_t rows = p->now->rows;
    const int rounded = rounds(p, op);
    for (; w; w = w->next) {
        if (rounded) pd_product_i8(w, &in.rounded, rows, y, ldy, bias, residual, ldr, p->scratch, part, parts);
        else pd_product(w, in.x, in.ld, rows, y, ldy, bias, residual, ldr, p->scratch, part, parts);
        y += w->out;
        if (bias) bias += w->out;
        if (residual) residual += w->out;
    }
}

static void linear(const player *p, const pd_op *op, input in) {
    const float *residual = op->residual < 0 ? NULL : p->stage->buffer[op->residual];
    const int64_t ldr = op->residual < 0 ? 0 : stride(p, op->residual);
    multiply(p, op, op->matrix, in, p->stage->buffer[op->out], stride(p, op->out), op->weight, residual, ldr, p->part,
             p->parts);
}

/* A product of gate and up, and what gates them: this part's panels of gate, the same of up, the columns they give. */
static void gated(const player *p, const pd_op *op, input in) {
    const pd_matrix *both = op->matrix;
    const int64_t panels = both->out / 2 / PD_PANEL, bytes = pd_panel_bytes(both->format, both->in);
    const int64_t first = panels * p->part / p->parts, last = panels * (p->part + 1) / p->parts;
    if (first == last) return;
    float *out = p->stage->buffer[op->out];
    const int64_t ld = stride(p, op->out);
    for (int64_t from = first; from < 2 * panels; from += panels) {
        const int32_t width = (int32_t)(last - first) * PD_PANEL;
        const pd_matrix half = {both->format, both->in, width, (const char *)both->panels + from * bytes, NULL};
        const int64_t column = from * PD_PANEL;
        multiply(p, op, &half, in, out + column, ld, op->weight ? op->weight + column : NULL, NULL, 0, 0, 1);
    }
    const pd_op *gate = op + 1;
    pd_swiglu_columns(out, ld, p->now->rows, both->out / 2, (int32_t)first * PD_PANEL, (int32_t)last * PD_PANEL,
                      p->stage->buffer[gate->out], stride(p, gate->out));
}

static pd_attention attention_of(const stage *s, const spans *now) {
    const pd_program *m = s->program;
    const int64_t layer = (int64_t)(m->kv_dtype == PD_KV_F32 ? 4 : 2) * 2 * m->kv_heads * m->head_dim * m->block_tokens;
    return (pd_attention){
        .pool = s->step->pool, .block_bytes = layer * m->layers, .dtype = m->kv_dtype, .block_tokens = m->block_tokens,
        .heads = m->heads, .kv_heads = m->kv_heads, .dim = m->head_dim, .spans = now->spans, .first = now->first,
        .count = now->count, .start = now->start, .table = now->table, .blocks = s->step->tables,
    };
}

static void attend(const player *p, const pd_op *op) {
    const stage *s = p->stage;
    pd_attention a = attention_of(s, p->now);
    a.layer_offset = a.block_bytes / s->program->layers * op->layer;
    a.scale = op->number;
    a.qkv = s->buffer[op->in];
    a.qkv_row = stride(p, op->in);
    a.out = s->buffer[op->out];
    a.out_row = stride(p, op->out);
    pd_attention_run(&a, s->attention_scratch, p->part);
}

/* Of several selections in a row the last one moves the step to the selected tokens. */
static void take(player *p, int32_t n) {
    stage *s = p->stage;
    const pd_program *m = s->program;
    const pd_op *op = &m->op[n];
    const int all = s->selected.rows == s->all.rows;
    if (!all || op->in != op->out)
        pd_take_rows(s->buffer[op->in], stride(p, op->in), s->step->sample, s->selected.rows, m->widths[op->in],
                     s->buffer[op->out], stride(p, op->out), p->part, p->parts);
    if (n + 1 < m->ops && m->op[n + 1].kind == PD_SELECT) return;
    p->now = &s->selected;
    if (p->part == 0 && !all && s->selected.rows) {
        const pd_attention a = attention_of(s, &s->selected);
        pd_attention_plan(&a, s->attention_scratch, p->parts);
    }
}

/* Plays op n, or pairs with its neighbours; returns how many ops are done, 0 for one that the next will do itself. */
static int32_t play(player *p, int32_t n) {
    const stage *s = p->stage;
    const pd_program *m = s->program;
    const pd_op *op = &m->op[n];
    const int32_t rows = p->now->rows, width = op->out >= 0 && op->out < m->buffers ? m->widths[op->out] : 0;
    switch (op->kind) {
    case PD_EMBED: embed(p, op); break;
    case PD_RMS_NORM:
        if (s->ways[n] == NORM_IN_PRODUCT && rows <= NORM_ROWS) return 0;
        norm(p, op, s->buffer[op->out], stride(p, op->out), p->part, p->parts);
        break;
    case PD_HEAD_NORM:
        pd_head_norm(s->buffer[op->in] + op->first, stride(p, op->in), rows, op->heads, op->dim, op->weight, op->number,
                     p->part, p->parts);
        break;
    case PD_LINEAR:
        if (s->ways[n] == SWIGLU_IN_PRODUCT && rows <= GATED_ROWS) {
            gated(p, op, input_of(p, n));
            return 2;
        }
        linear(p, op, input_of(p, n));
        break;
    case PD_ROPE_WRITE_KV:
        pd_rope_write_kv(s->buffer[op->in], stride(p, op->in), rows, m->heads, m->rope_dims, m->cos, m->sin, s->places,
                         &s->pool, op->layer, s->step->health, p->part, p->parts);
        break;
    case PD_ATTENTION: attend(p, op); break;
    case PD_SWIGLU:
        pd_swiglu(s->buffer[op->in], stride(p, op->in), rows, width, s->buffer[op->out], stride(p, op->out), p->part,
                  p->parts);
        break;
    case PD_SELECT: take(p, n); break;
    case PD_LOGITS:
        multiply(p, op, op->matrix, input_of(p, n), s->step->logits, m->vocab, NULL, NULL, 0, p->part, p->parts);
        break;
    case PD_SCALE:
        pd_scale(s->buffer[op->in], stride(p, op->in), rows, width, op->number, s->buffer[op->out], stride(p, op->out),
                 p->part, p->parts);
        break;
    case PD_ADD:
        pd_add(s->buffer[op->in], stride(p, op->in), s->buffer[op->residual], stride(p, op->residual), rows, width,
               s->buffer[op->out], stride(p, op->out), p->part, p->parts);
        break;
    }
    return 1;
}

/* ---- the region ---- */

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static void play_all(void *of, int part, int parts) {
    stage *s = of;
    char *own = s->own + part * s->own_bytes;
    player p = {s, part, parts, &s->all, (float *)own, (float *)(own + s->own_normed), own + s->own_rounded};
    int64_t *spent = part == 0 ? s->step->spent : NULL;
    int64_t begun = spent ? now_ns() : 0;
    for (int32_t n = 0, done; n < s->program->ops && p.now->rows; n += done ? done : 1) {
        done = play(&p, n);
        if (!done) continue;
        if (n + done < s->program->ops) pd_crew_barrier(s->crew);
        if (!spent) continue;
        const int64_t ended = now_ns();
        spent[s->program->op[n].kind] += ended - begun;
        begun = ended;
    }
}

/* ---- before it ---- */

/* Where each token of the step lies. `all.first` is written here too: spans stand one behind the other. */
static void place_tokens(stage *s, int32_t *position, int32_t *block) {
    const pd_step *step = s->step;
    const int32_t tokens = s->program->block_tokens;
    for (int32_t span = 0, token = 0; span < step->spans; span++) {
        s->all.first[span] = token;
        const int32_t *table = step->tables + step->table[span];
        for (int32_t i = 0; i < step->count[span]; i++, token++) {
            position[token] = step->start[span] + i;
            block[token] = table[position[token] / tokens];
        }
    }
    s->places = (pd_places){position, block};
}

/* Runs of sampled tokens that are neighbours in a span, as spans of the rows that they will be. */
static void select_spans(stage *s, int32_t *count, int32_t *start, int32_t *table) {
    const pd_step *step = s->step;
    spans *chosen = &s->selected;
    int32_t span = 0, last = -1;
    for (int32_t i = 0; i < step->sampled; i++, chosen->rows++) {
        const int32_t token = step->sample[i];
        const int32_t before = span;
        while (token >= s->all.first[span] + step->count[span]) span++;
        if (chosen->spans && token == last + 1 && span == before) {
            count[chosen->spans - 1]++;
        } else {
            const int32_t mine = chosen->spans++;
            chosen->first[mine] = i;
            count[mine] = 1;
            start[mine] = step->start[span] + token - s->all.first[span];
            table[mine] = step->table[span];
        }
        last = token;
    }
}

static void set(stage *s, const pd_layout *layout, int32_t parts) {
    const pd_program *m = s->program;
    const pd_step *step = s->step;
    char *work = step->work;
    for (int32_t b = 0; b < m->buffers; b++) s->buffer[b] = (float *)(work + layout->buffer[b]);
    s->ways = (uint8_t *)(work + layout->ways);
    for (int32_t n = 0; n < m->ops; n++) s->ways[n] = (uint8_t)pd_way_of(m, n);
    s->own = work + layout->own;
    s->own_bytes = layout->own_bytes;
    s->own_normed = layout->own_normed;
    s->own_rounded = layout->own_rounded;
    s->rounded = work + layout->rounded;
    s->attention_scratch = work + layout->attention;
    s->pool = (pd_pool){step->pool,  step->pool_blocks, m->layers,      m->kv_heads,
                        m->head_dim, m->kv_dtype,       m->block_tokens};
    int32_t *places = (int32_t *)(work + layout->places), *each = (int32_t *)(work + layout->selected);
    const int64_t tokens = step->tokens;
    s->all = (spans){step->tokens, step->spans, (int32_t *)(work + layout->first), step->count, step->start, step->table};
    int32_t *count = each + tokens, *start = count + tokens, *table = start + tokens;
    s->selected = (spans){0, 0, each, count, start, table};
    place_tokens(s, places, places + tokens);
    select_spans(s, count, start, table);
    memset(step->health, 0, (size_t)tokens * sizeof *step->health);
    const pd_attention a = attention_of(s, &s->all);
    pd_attention_plan(&a, s->attention_scratch, parts);
}

int32_t pd_crew_step(pd_crew *crew, const pd_program *program, const pd_step *step, int32_t *op) {
    int32_t longest, wrong = pd_program_check(program, op);
    if (wrong) return wrong;
    wrong = pd_step_check(program, step, &longest);
    if (wrong) return wrong;
    const pd_layout layout = pd_layout_of(program, step->tokens, longest, pd_crew_threads(crew));
    if (!step->work || (uintptr_t)step->work % 64 || step->work_bytes < layout.bytes) return PD_BAD_WORK;
    stage s = {.crew = crew, .program = program, .step = step};
    set(&s, &layout, pd_crew_threads(crew));
    return pd_crew_run(crew, play_all, &s);
}
