/* Threads: the caller's OpenMP library runs a function in all threads. The file that includes this
   one includes floats.h first. */

#include <stdint.h>

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
