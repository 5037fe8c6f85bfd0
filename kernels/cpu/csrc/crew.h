/* The crew: threads that are made once and run one region after another.
 *
 *     caller (number 0)     run(region) ─ work ─ barrier ─ work ─ end of region ──► returns
 *     numbers 1..threads-1  sleep ─────── work ─ barrier ─ work ─ end of region ──► sleep
 *
 * One region is one step of a model: some two hundred phases of 5 to 100 us with a barrier after each. A barrier that
 * only sleeps costs tens of microseconds, and one that only spins is a disaster where cores are few and somebody else
 * needs them. So a thread that waits spins for SPIN_NS, then offers its core between looks for YIELD_NS, then sleeps.
 * Between regions nobody spins.
 *
 * Owns threads, never memory that a region works on. Numbers decide who does which share, and shares never decide a
 * result, so a crew of any size computes the same. */
#pragma once
#include <stdint.h>

#include "perdure_cpu.h"

/* A region: does the share of number `part` of `parts`. */
typedef void (*pd_region)(void *argument, int part, int parts);

/* Runs `region` on all threads with the rounding mode that exact kernels need, and returns when all have ended: 0, or
 * PD_FORKED in a child of the process that opened the crew (its threads are not there), or PD_BUSY when another thread
 * is running a region. */
int pd_crew_run(pd_crew *crew, pd_region region, void *argument);

/* Inside a region: waits until all threads have called it as often. What they wrote before is seen behind it. */
void pd_crew_barrier(pd_crew *crew);
