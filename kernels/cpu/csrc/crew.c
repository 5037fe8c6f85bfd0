/* See crew.h. Futexes are used where Linux has them, as glibc's own barrier and condition variables do not spin. */
#define _GNU_SOURCE
#include "crew.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    SPIN_NS = 3000,     /* what threads that share work fairly differ by, mostly */
    YIELD_NS = 100000,  /* a futex's sleep and wake cost half of it */
    MOST_THREADS = 1024,
};

/* A futex word and how many sleep on it, on a cache line of their own. */
typedef struct {
    _Alignas(64) atomic_uint word;
    atomic_uint sleepers;
} signpost;

struct pd_crew {
    signpost region_number, phase;
    _Alignas(64) atomic_uint arrived;
    _Alignas(64) pd_region region; /* of the region that region_number names; NULL ends the threads */
    void *argument;
    atomic_flag running;
    int threads, started;
    pid_t owner;
    pthread_t *ids;
    atomic_int next_number;
};

/* ---- waiting ---- */

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static void futex(signpost *post, int operation, unsigned value) {
    syscall(SYS_futex, &post->word, operation, value, NULL, NULL, 0);
}

/* A sleeper counts itself before the kernel compares the word, the one that moves on changes the word before it reads
 * the count: at least one of them sees the other (both orders are sequentially consistent). */
static void sleep_while(signpost *post, unsigned seen) {
    atomic_fetch_add(&post->sleepers, 1);
    while (atomic_load(&post->word) == seen) futex(post, FUTEX_WAIT_PRIVATE, seen);
    atomic_fetch_sub(&post->sleepers, 1);
}

static void move_on(signpost *post) {
    atomic_fetch_add(&post->word, 1);
    if (atomic_load(&post->sleepers)) futex(post, FUTEX_WAKE_PRIVATE, INT32_MAX);
}

static void wait_while(signpost *post, unsigned seen) {
    const int64_t begun = now_ns();
    for (int64_t spent = 0; spent < SPIN_NS + YIELD_NS; spent = now_ns() - begun) {
        for (int look = 0; look < 16; look++) {
            if (atomic_load_explicit(&post->word, memory_order_acquire) != seen) return;
            if (spent < SPIN_NS) relax();
        }
        if (spent >= SPIN_NS) sched_yield();
    }
    sleep_while(post, seen);
}

void pd_crew_barrier(pd_crew *crew) {
    const unsigned phase = atomic_load(&crew->phase.word); /* cannot move before this thread arrives */
    if (atomic_fetch_add(&crew->arrived, 1) + 1 == (unsigned)crew->threads) {
        atomic_store(&crew->arrived, 0);
        move_on(&crew->phase);
    } else {
        wait_while(&crew->phase, phase);
    }
}

/* ---- floating point ---- */

#if defined(__x86_64__)
enum { EXACT_MODE = 0x1f80 }; /* all exceptions masked, nearest even, denormals kept (no FTZ, no DAZ) */
static uint64_t float_mode(void) { return __builtin_ia32_stmxcsr(); }
static void set_float_mode(uint64_t mode) { __builtin_ia32_ldmxcsr((unsigned)mode); }
#elif defined(__aarch64__)
enum { EXACT_MODE = 0 }; /* no traps, nearest even, denormals kept (no FZ, no FZ16), NaNs handed on */
static uint64_t float_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static void set_float_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#endif

/* ---- regions ---- */

static void *serve(void *of) {
    pd_crew *crew = of;
    const int number = atomic_fetch_add(&crew->next_number, 1);
    set_float_mode(EXACT_MODE);
    for (unsigned done = 0;; done++) {
        sleep_while(&crew->region_number, done);
        if (!crew->region) return NULL;
        crew->region(crew->argument, number, crew->threads);
        pd_crew_barrier(crew);
    }
}

int pd_crew_run(pd_crew *crew, pd_region region, void *argument) {
    if (getpid() != crew->owner) return PD_FORKED;
    if (atomic_flag_test_and_set(&crew->running)) return PD_BUSY;
    const uint64_t callers_mode = float_mode();
    set_float_mode(EXACT_MODE);
    crew->region = region;
    crew->argument = argument;
    move_on(&crew->region_number);
    region(argument, 0, crew->threads);
    pd_crew_barrier(crew); /* nobody is left in the region: its argument may go */
    set_float_mode(callers_mode);
    atomic_flag_clear(&crew->running);
    return 0;
}

/* ---- opening and closing ---- */

/* Threads take no signals: those belong to the interpreter's main thread. */
static int start(pd_crew *crew) {
    sigset_t all, callers;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &callers);
    int failed = 0;
    while (!failed && crew->started < crew->threads) {
        failed = pthread_create(&crew->ids[crew->started], NULL, serve, crew);
        crew->started += !failed;
    }
    pthread_sigmask(SIG_SETMASK, &callers, NULL);
    return failed ? PD_NO_THREADS : 0;
}

int32_t pd_crew_open(int32_t threads, pd_crew **opened) {
    *opened = NULL;
    if (threads < 1 || threads > MOST_THREADS) return PD_BAD_SIZE;
    pd_crew *crew = aligned_alloc(64, sizeof *crew);
    pthread_t *ids = calloc((size_t)threads, sizeof *ids);
    if (!crew || !ids) {
        free(crew);
        free(ids);
        return PD_NO_MEMORY;
    }
    *crew = (pd_crew){.running = ATOMIC_FLAG_INIT, .threads = threads, .started = 1, .owner = getpid(), .ids = ids};
    atomic_store(&crew->next_number, 1);
    const int failed = start(crew);
    if (failed)
        pd_crew_close(crew);
    else
        *opened = crew;
    return failed;
}

void pd_crew_close(pd_crew *crew) {
    if (!crew) return;
    if (getpid() == crew->owner) {
        crew->region = NULL;
        move_on(&crew->region_number);
        for (int number = 1; number < crew->started; number++) pthread_join(crew->ids[number], NULL);
    }
    free(crew->ids);
    free(crew);
}

int32_t pd_crew_threads(const pd_crew *crew) { return crew->threads; }
