/* Dividing a step's attention into parts of about equal cost, see attention.h. */
#include "attention.h"

/* In multiplications of one position with one row: beside its rows, a position costs about as much as five of them to
 * fetch and unpack, and a piece the setting up of its sums. */
enum { PD_POSITION_COST = 5, PD_PIECE_COST = 1024 };

static int64_t piece_cost(int64_t rows, int64_t positions) {
    return positions * (rows + PD_POSITION_COST) + PD_PIECE_COST;
}

static int64_t job_cost(const pd_attention *a, struct job j) {
    int64_t rows = (int64_t)pd_job_tokens(a, j) * pd_group(a), end = pd_job_end(a, j);
    int64_t last = (end - 1) % PD_PARTIAL + 1;
    return (end - last) / PD_PARTIAL * piece_cost(rows, PD_PARTIAL) + piece_cost(rows, last);
}

/* The first cuts that lie in this job, which begins `before`, are set; returns the next one that does not. */
static int32_t set_cuts(const pd_attention *a, const struct plan *plan, int32_t parts, struct job j, int32_t next,
                        int64_t before, int64_t total) {
    int64_t cost = job_cost(a, j), full = piece_cost((int64_t)pd_job_tokens(a, j) * pd_group(a), PD_PARTIAL);
    int32_t partials = pd_job_partials(a, j), slot = -1;
    for (; next < parts; next++) {
        int64_t wanted = total * next / parts - before;
        if (wanted >= cost) break;
        int64_t nearest = (wanted + full / 2) / full;
        int32_t partial = nearest < partials ? (int32_t)nearest : partials;
        if (slot < 0 && partial > 0 && partial < partials) slot = next - 1;
        plan->cuts[next] = (struct cut){j, partial, partial > 0 && partial < partials ? slot : -1};
    }
    return next;
}

static int64_t align(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t cuts_bytes(int32_t parts) { return align((parts + 1) * (int64_t)sizeof(struct cut)); }
static int64_t done_bytes(int32_t parts) { return align(parts * (int64_t)sizeof(atomic_int)); }
static int64_t slot_floats(const pd_attention *a, int64_t longest) {
    return (longest + PD_PARTIAL - 1) / PD_PARTIAL * pd_partial_floats(a);
}

struct plan pd_plan_in(const pd_attention *a, void *scratch, int32_t parts) {
    char *at = (char *)scratch + align(sizeof(struct plan_head));
    struct plan plan = {.head = scratch, .cuts = (struct cut *)at};
    plan.done = (atomic_int *)(at + cuts_bytes(parts));
    plan.work = (float *)(at + cuts_bytes(parts) + done_bytes(parts));
    plan.partials = plan.work + parts * pd_work_floats(a);
    return plan;
}

int64_t pd_attention_scratch(const pd_attention *a, int64_t longest, int32_t parts) {
    int64_t floats = parts * pd_work_floats(a) + (parts - 1) * slot_floats(a, longest);
    return align(sizeof(struct plan_head)) + cuts_bytes(parts) + done_bytes(parts) + floats * (int64_t)sizeof(float);
}

void pd_attention_plan(const pd_attention *a, void *scratch, int32_t parts) {
    struct plan plan = pd_plan_in(a, scratch, parts);
    int64_t before = 0, total = 0, longest = 0;
    int32_t next = 1;
    const struct job first = pd_first_job(a, 0), end = {a->spans, 0, 0};
    for (struct job j = first; j.span < a->spans; j = pd_next_job(a, j)) {
        total += job_cost(a, j);
        longest = pd_job_end(a, j) > longest ? pd_job_end(a, j) : longest;
    }
    plan.cuts[0] = (struct cut){first, 0, -1};
    for (struct job j = first; j.span < a->spans; j = pd_next_job(a, j)) {
        next = set_cuts(a, &plan, parts, j, next, before, total);
        before += job_cost(a, j);
    }
    for (; next <= parts; next++) plan.cuts[next] = (struct cut){end, 0, -1};
    for (int32_t part = 0; part < parts; part++) atomic_init(&plan.done[part], 0);
    *plan.head = (struct plan_head){parts, slot_floats(a, longest)};
}
