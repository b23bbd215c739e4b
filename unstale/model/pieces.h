/* Work that is divided among the threads of the caller, and vectors of float32. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define WIDE 16 /* all widths are multiples of it */

#include "floats.h"

/* Threads: the caller's OpenMP library runs a function in all threads. */

typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);

typedef struct {
    void (*run)(const void *task, int64_t piece);
    const void *task;
    int64_t count, next;
} work_t;

static void take(void *shared) {
    work_t *work = shared;
    int64_t piece;
    while ((piece = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->count)
        work->run(work->task, piece);
}

typedef struct {
    parallel_t parallel;
    int64_t num;
} threads_t;

static void divide(const threads_t *threads, int64_t count,
                   void (*run)(const void *, int64_t), const void *task) {
    work_t work = {run, task, count, 0};
    if (threads->parallel && threads->num > 1 && count > 1)
        threads->parallel(take, &work, (unsigned)threads->num, 0);
    else
        take(&work);
}

inline_ int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Vectors. */

/* The compiler would load a vector again for each of its products. */
#ifdef __x86_64__
#define keep_in_register(vector) __asm__("" : "+v"(vector))
#else
#define keep_in_register(vector)
#endif

inline_ floats loaded(const float *at) {
    floats value;
    memcpy(&value, at, sizeof value);
    return value;
}

inline_ void stored(float *at, floats value) { memcpy(at, &value, sizeof value); }

inline_ floats larger(floats x, floats y) { return either(x > y, x, y); }

/* Exchange each lane with the one `distance` (a power of 2) away. */
inline_ floats swapped(floats x, int distance) {
    ints from;
    for (int lane = 0; lane < LANES; lane++) from[lane] = lane ^ distance;
    return __builtin_shuffle(x, from);
}

inline_ float total(floats x) {
    for (int distance = LANES / 2; distance; distance /= 2) x += swapped(x, distance);
    return x[0];
}

inline_ float highest(floats x) {
    for (int distance = LANES / 2; distance; distance /= 2) x = larger(x, swapped(x, distance));
    return x[0];
}
