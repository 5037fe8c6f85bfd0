/* Trials of csrc/crew.c, a program so that it can fork, be sanitised and be run beside a busy neighbour.
 * `crew_trial phases THREADS REGIONS BARRIERS`, or the name of another trial and THREADS; exits with 0 if all held. */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "crew.h"

#define CHECK(truth) \
    do { \
        if (!(truth)) { \
            fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #truth); \
            exit(1); \
        } \
    } while (0)

static pd_crew *opened(int threads) {
    pd_crew *crew;
    CHECK(pd_crew_open(threads, &crew) == 0);
    CHECK(pd_crew_threads(crew) == threads);
    return crew;
}

/* ---- phases: what every thread wrote in one phase, every other one reads in the next ---- */

typedef struct {
    pd_crew *crew;
    int barriers;
    long *counts; /* plain memory [parts] on purpose: only barriers order it */
    atomic_int wrong;
} phases;

static void count(void *argument, int part, int parts) {
    phases *p = argument;
    const long before = p->counts[part];
    for (long phase = 1; phase <= p->barriers; phase++) {
        p->counts[part] = before + phase;
        pd_crew_barrier(p->crew);
        for (int other = 0; other < parts; other++)
            if (p->counts[other] != before + phase) atomic_store(&p->wrong, 1);
        pd_crew_barrier(p->crew);
    }
}

static void trial_phases(int threads, int regions, int barriers) {
    phases p = {.crew = opened(threads), .barriers = barriers, .counts = calloc((size_t)threads, sizeof(long))};
    struct timespec begun, ended;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (int region = 1; region <= regions; region++) {
        CHECK(pd_crew_run(p.crew, count, &p) == 0);
        for (int part = 0; part < threads; part++) CHECK(p.counts[part] == (long)region * barriers);
    }
    clock_gettime(CLOCK_MONOTONIC, &ended);
    CHECK(!atomic_load(&p.wrong));
    const double us = (ended.tv_sec - begun.tv_sec) * 1e6 + (ended.tv_nsec - begun.tv_nsec) / 1e3;
    printf("%.2f us a region, %.3f us a barrier\n", us / regions, us / regions / (2 * barriers + 1));
    pd_crew_close(p.crew);
    free(p.counts);
}

/* ---- forked: a child has the crew's memory and none of its threads ---- */

static void nothing(void *argument, int part, int parts) { (void)argument, (void)part, (void)parts; }

static void trial_forked(int threads) {
    pd_crew *crew = opened(threads);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        const int refused = pd_crew_run(crew, nothing, NULL) == PD_FORKED;
        pd_crew_close(crew);
        _exit(refused ? 0 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(pd_crew_run(crew, nothing, NULL) == 0);
    pd_crew_close(crew);
}

/* ---- busy: one region at a time ---- */

static void run_inside(void *argument, int part, int parts) {
    (void)parts;
    if (part == 0) CHECK(pd_crew_run(argument, nothing, NULL) == PD_BUSY);
}

static void trial_busy(int threads) {
    pd_crew *crew = opened(threads);
    CHECK(pd_crew_run(crew, run_inside, crew) == 0);
    CHECK(pd_crew_run(crew, nothing, NULL) == 0);
    pd_crew_close(crew);
}

/* ---- floats: every thread rounds to nearest and keeps denormals, and the caller's mode comes back ---- */

static int rounds_and_keeps(void) {
    volatile float tiny = 1e-40f, one = 1.0f, three = 3.0f, ulp = 0x1p-24f;
    return tiny * one != 0.0f && one / three == 0x1.555556p-2f && one + ulp == one;
}

static void check_floats(void *argument, int part, int parts) {
    (void)part, (void)parts;
    if (!rounds_and_keeps()) atomic_store((atomic_int *)argument, 1);
}

static void trial_floats(int threads) {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(0xdfc0); /* FTZ, DAZ, upwards: a caller's strange mode, also handed to new threads */
#else
    const uint64_t strange = UINT64_C(1) << 24 | UINT64_C(1) << 22;
    __asm__ volatile("msr fpcr, %0" : : "r"(strange));
#endif
    atomic_int wrong = 0;
    CHECK(!rounds_and_keeps());
    pd_crew *crew = opened(threads);
    CHECK(pd_crew_run(crew, check_floats, &wrong) == 0);
    CHECK(!atomic_load(&wrong));
    CHECK(!rounds_and_keeps());
    pd_crew_close(crew);
}

/* ---- idle: between regions all threads sleep, and a closed crew leaves none ---- */

static int threads_in_state(char state) {
    int found = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    for (struct dirent *task; (task = readdir(tasks));) {
        char path[300], text[200];
        snprintf(path, sizeof path, "/proc/self/task/%s/stat", task->d_name);
        FILE *file = task->d_name[0] == '.' ? NULL : fopen(path, "r");
        if (!file) continue;
        const size_t size = fread(text, 1, sizeof text - 1, file);
        fclose(file);
        text[size] = 0;
        const char *name_ends = strrchr(text, ')');
        if (name_ends && (state == '*' || name_ends[2] == state)) found++;
    }
    closedir(tasks);
    return found;
}

static void trial_idle(int threads) {
    const int before = threads_in_state('*');
    pd_crew *crew = opened(threads);
    for (int region = 0; region < 3; region++) {
        CHECK(pd_crew_run(crew, nothing, NULL) == 0);
        while (threads_in_state('S') < threads - 1) sched_yield(); /* for ever, if they do not sleep */
    }
    CHECK(threads_in_state('*') == before + threads - 1);
    pd_crew_close(crew);
    while (threads_in_state('*') > before) sched_yield(); /* a joined thread is in /proc for a moment longer */
}

/* ---- sizes: what cannot be is refused ---- */

static void trial_sizes(void) {
    pd_crew *crew = (pd_crew *)&crew;
    CHECK(pd_crew_open(0, &crew) == PD_BAD_SIZE && !crew);
    CHECK(pd_crew_open(-1, &crew) == PD_BAD_SIZE && !crew);
    CHECK(pd_crew_open(1 << 20, &crew) == PD_BAD_SIZE && !crew);
    pd_crew_close(NULL);
}

int main(int count_of, char **words) {
    CHECK(count_of >= 3);
    const char *name = words[1];
    const int threads = atoi(words[2]);
    if (!strcmp(name, "phases") && count_of == 5) trial_phases(threads, atoi(words[3]), atoi(words[4]));
    else if (!strcmp(name, "forked")) trial_forked(threads);
    else if (!strcmp(name, "busy")) trial_busy(threads);
    else if (!strcmp(name, "floats")) trial_floats(threads);
    else if (!strcmp(name, "idle")) trial_idle(threads);
    else if (!strcmp(name, "sizes")) trial_sizes();
    else CHECK(!"a known trial");
    return 0;
}
