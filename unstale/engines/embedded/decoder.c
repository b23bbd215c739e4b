/* A decoding step of a Qwen3 model in one call, compiled on the machine that runs it.

   A matrix [N, K] is stored in panels of PANEL rows: [N / PANEL, K, PANEL], the last one filled up
   with zeros. Sums are float32. Each is added up in the order of K, so the result of a token does
   not depend on the other tokens of the step. Activations are float32 numbers that are rounded to
   the model's type wherever torch would store them in it.

   If ROUND_LARGEST is defined, the input of each linear layer is rounded to a format with few
   values (`Format.activations` of quantisation.py): in blocks of ROUND_BLOCK features (0: all), of
   which the largest becomes ROUND_LARGEST; to e4m3 if ROUND_E4M3 is defined, else to whole
   numbers.

   Several threads may compute a step together: each calls `decode` with its own number. */

#include "kernels.c"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define WIDTH NATIVE
#define PARTS 2
#if SUMS == 16
#define TILE 12
#else
#define TILE 6
#endif
/* The sums of TILE tokens by PARTS registers fit into registers together. */
#define PANEL (WIDTH * PARTS)
#define DEPTH 256 /* rows of a panel that stay in the first cache, 16 KB */
#define SPINS 2000 /* looks at another thread's progress before this one gives up its core */

typedef float lanes_ __attribute__((vector_size(4 * WIDTH)));

inline_ lanes_ wide_loaded(const float *at) {
    lanes_ value;
    memcpy(&value, at, sizeof value);
    return value;
}

inline_ float as_stored(float value) { return widened(rounded(value)); }

/* The weights and the cache of a layer. */
typedef struct {
    const float *norm_1, *norm_2, *qk_norm;
    const number *qkv, *out, *gate_up, *down;
    number *keys, *values;
} layer_;

/* A step: the model, the tokens, and memory for intermediate results. */
typedef struct {
    const layer_ *layers;
    const number *embed, *head;
    const float *norm, *rotations;
    int64_t num_layers, hidden, inner, vocab;
    const int64_t *tokens, *positions, *cells;
    int64_t count;
    const int64_t *of;
    int64_t width;
    const int64_t *runs; /* [4, num_runs]: begins, counts, slots, held */
    int64_t num_runs;
    const int64_t *ends; /* the tokens that have logits */
    int64_t num_ends;
    float *x, *h, *qkv, *query, *gated, *logits;
    number *mixed;
    float *scratch; /* [threads, scratch_size] */
    int64_t scratch_size;
    int64_t threads;
    _Atomic int64_t arrived;
    double eps;
} step_;

typedef struct {
    step_ *step;
    int64_t thread, phase;
    float *sums, *panel;
} worker_;

typedef struct {
    int64_t first, last;
} range_;

int64_t panel(void) { return PANEL; }

/* Numbers of scratch memory that a thread needs for `count` tokens. */
int64_t scratch(int64_t count) { return (count + DEPTH) * PANEL; }

/* 1 if this CPU multiplies bfloat16 faster than float32. */
int64_t multiplies_bfloat16(void) {
#if defined __AVX512BF16__ || defined __AMX_BF16__ || defined __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    return 1;
#else
    return 0;
#endif
}

inline_ range_ share(const worker_ *worker, int64_t count) {
    const int64_t threads = worker->step->threads;
    return (range_){count * worker->thread / threads, count * (worker->thread + 1) / threads};
}

/* Wait until all threads have called this as often as this one. */
inline_ void meet(worker_ *worker) {
    step_ *step = worker->step;
    if (step->threads == 1) return;
    worker->phase++;
    atomic_fetch_add_explicit(&step->arrived, 1, memory_order_acq_rel);
    for (int looks = 0; atomic_load_explicit(&step->arrived, memory_order_acquire) <
                        worker->phase * step->threads;
         looks++)
        if (looks > SPINS) sched_yield();
}

/* Add the products of `rows` tokens with `depth` rows of a panel to `sums` [rows, PANEL]. */
inline_ void tile(const float *a, int64_t stride, const float *panel, int64_t depth, float *sums,
                  int rows, int begin) {
    lanes_ sum[TILE][PARTS];
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < PARTS; part++)
            sum[row][part] = begin ? (lanes_){0} : wide_loaded(sums + row * PANEL + part * WIDTH);
    for (int64_t k = 0; k < depth; k++) {
        lanes_ right[PARTS];
        for (int part = 0; part < PARTS; part++)
            right[part] = wide_loaded(panel + k * PANEL + part * WIDTH);
        for (int row = 0; row < rows; row++) {
            const float left = a[row * stride + k];
            for (int part = 0; part < PARTS; part++) sum[row][part] += right[part] * left;
        }
    }
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < PARTS; part++)
            memcpy(sums + row * PANEL + part * WIDTH, &sum[row][part], sizeof sum[row][part]);
}

static void tiles(const float *a, int64_t stride, const float *panel, int64_t depth, float *sums,
                  int64_t rows, int begin) {
    /* Tiles of nearly equal height: a low one would wait for its own sums. */
    const int64_t num = (rows + TILE - 1) / TILE;
    for (int64_t at = 0; at < num; at++) {
        const int64_t row = rows * at / num, height = rows * (at + 1) / num - row;
        const float *from = a + row * stride;
        float *to = sums + row * PANEL;
        switch (height) {
#define CASE(N) \
    case N: tile(from, stride, panel, depth, to, N, begin); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE > 6
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
        }
    }
}

/* Multiply `rows` tokens `a` by a panel; the products are in `sums` [rows, PANEL]. */
static void panel_product(worker_ *worker, const float *a, int64_t rows, int64_t depth,
                     const number *weight) {
    for (int64_t k = 0; k < depth; k += DEPTH) {
        const int64_t part = depth - k < DEPTH ? depth - k : DEPTH;
#ifdef BFLOAT16
        for (int64_t i = 0; i < part * PANEL; i++)
            worker->panel[i] = widened(weight[k * PANEL + i]);
        const float *wide = worker->panel;
#else
        const float *wide = weight + k * PANEL;
#endif
        tiles(a + k, depth, wide, part, worker->sums, rows, k == 0);
    }
}

/* out [rows, columns] = a [rows, depth] times a matrix, or that added to `out`. */
static void product(worker_ *worker, const float *a, int64_t rows, int64_t depth,
                    const number *weight, float *out, int64_t columns, int add) {
    const range_ panels = share(worker, (columns + PANEL - 1) / PANEL);
    for (int64_t at = panels.first; at < panels.last; at++) {
        panel_product(worker, a, rows, depth, weight + at * depth * PANEL);
        const int64_t left = columns - at * PANEL, width = left < PANEL ? left : PANEL;
        for (int64_t row = 0; row < rows; row++) {
            const float *from = worker->sums + row * PANEL;
            float *to = out + row * columns + at * PANEL;
            for (int64_t i = 0; i < width; i++)
                to[i] = add ? as_stored(to[i] + as_stored(from[i])) : as_stored(from[i]);
        }
    }
}

/* silu(gate) * up of two products. Each panel of the matrix has PANEL / 2 gates, then their ups. */
static void gated_product(worker_ *worker, const float *a, int64_t rows, int64_t depth,
                          const number *weight, float *out, int64_t inner) {
    const int64_t half = PANEL / 2;
    const range_ panels = share(worker, (inner + half - 1) / half);
    for (int64_t at = panels.first; at < panels.last; at++) {
        panel_product(worker, a, rows, depth, weight + at * depth * PANEL);
        const int64_t left = inner - at * half, width = left < half ? left : half;
        for (int64_t row = 0; row < rows; row++) {
            const float *from = worker->sums + row * PANEL;
            float *to = out + row * inner + at * half;
            float both[2][PANEL / 2];
            for (int64_t i = 0; i < half; i++) both[0][i] = as_stored(from[i]);
            for (int64_t i = 0; i < half; i++) both[1][i] = as_stored(from[half + i]);
            for (int64_t i = 0; i < half; i += LANES) {
                floats gate, up;
                memcpy(&gate, both[0] + i, sizeof gate);
                memcpy(&up, both[1] + i, sizeof up);
                const floats small = exponential(either(gate < 0, gate, -gate));
                gate = gate * either(gate < 0, small, all(1)) / (1 + small) * up;
                memcpy(both[0] + i, &gate, sizeof gate);
            }
            for (int64_t i = 0; i < width; i++) to[i] = as_stored(both[0][i]);
        }
    }
}

/* The RMS norm of a vector that is stored in the model's type. */
inline_ void norm_one(const float *x, const float *weight, float *out, int64_t count, float eps) {
    floats squares = all(0);
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) {
        floats part;
        memcpy(&part, x + at, sizeof part);
        squares += part * part;
    }
    float sum = total(squares);
    for (; at < count; at++) sum += x[at] * x[at];
    const float scale = 1.0f / sqrtf(sum / count + eps);
    for (int64_t d = 0; d < count; d++) out[d] = as_stored(as_stored(x[d] * scale) * weight[d]);
}

/* `turn` of kernels.c for one token. */
inline_ void turn_one(const step_ *step, const layer_ *layer, int64_t token) {
    const float *qkv = step->qkv + token * (HEADS + 2 * KV_HEADS) * HEAD_DIM;
    const float *angle = step->rotations + step->positions[token] * HEAD_DIM;
    const int64_t page = step->cells[token] / PAGE, place = step->cells[token] % PAGE;
    for (int head = 0; head < HEADS + KV_HEADS; head++, qkv += HEAD_DIM) {
        floats squares = all(0);
        for (int d = 0; d < HEAD_DIM; d += LANES) {
            floats part;
            memcpy(&part, qkv + d, sizeof part);
            squares += part * part;
        }
        const float scale = 1.0f / sqrtf(total(squares) / HEAD_DIM + (float)step->eps);
        const float *weight = layer->qk_norm + head * HEAD_DIM;
        float x[HEAD_DIM], turned[HEAD_DIM];
        for (int d = 0; d < HEAD_DIM; d++) x[d] = qkv[d] * scale * weight[d];
        for (int d = 0; d < HEAD_DIM; d += 2) {
            turned[d] = x[d] * angle[d] - x[d + 1] * angle[d + 1];
            turned[d + 1] = x[d] * angle[d + 1] + x[d + 1] * angle[d];
        }
        if (head < HEADS) {
            float *query = step->query + (token * HEADS + head) * HEAD_DIM;
            for (int d = 0; d < HEAD_DIM; d++) query[d] = as_stored(turned[d]);
        } else {
            const int64_t at = page * KV_HEADS + head - HEADS;
            number *key = layer->keys + at * HEAD_DIM * PAGE + place;
            for (int d = 0; d < HEAD_DIM; d++) key[d * PAGE] = rounded(turned[d]);
        }
    }
    for (int head = 0; head < KV_HEADS; head++, qkv += HEAD_DIM) {
        number *value = layer->values + ((page * KV_HEADS + head) * PAGE + place) * HEAD_DIM;
        for (int d = 0; d < HEAD_DIM; d++) value[d] = rounded(qkv[d]);
    }
}

#ifdef ROUND_LARGEST
/* The nearest value of the format; `value` is at most ROUND_LARGEST. If the last digit of `large` is
   the distance between two values, adding it rounds to the nearest value, or to the even one. */
inline_ float nearest(float value) {
    uint32_t shift = 150u << 23 | 1u << 22; /* 1.5 * 2^23: the distance is 1 */
#ifdef ROUND_E4M3
    uint32_t exponent;
    memcpy(&exponent, &value, 4);
    exponent &= 255u << 23;
    if (exponent < 121u << 23) exponent = 121u << 23; /* 2^-6, the smallest normal number */
    shift += exponent - (130u << 23);
#endif
    float large;
    memcpy(&large, &shift, 4);
    return value + large - large;
}

/* Round the input of a layer for one token. */
void round_input(float *x, int64_t count) {
    const int64_t block = ROUND_BLOCK ? ROUND_BLOCK : count;
    for (int64_t first = 0; first < count; first += block) {
        const int64_t last = first + block < count ? first + block : count;
        int32_t most = 0; /* bits of positive numbers have the order of the numbers */
        for (int64_t i = first; i < last; i++) {
            int32_t bits;
            memcpy(&bits, x + i, 4);
            bits &= 0x7fffffff;
            most = bits > most ? bits : most;
        }
        float scale;
        memcpy(&scale, &most, 4);
        scale /= ROUND_LARGEST;
        if (!(scale > 0)) scale = 1;
        for (int64_t i = first; i < last; i++) x[i] = as_stored(nearest(x[i] / scale) * scale);
    }
}
#define ROUNDS 1
#else
inline_ void round_input(float *x, int64_t count) { (void)x, (void)count; }
#define ROUNDS 0
#endif

static void embed_tokens(worker_ *worker) {
    const step_ *step = worker->step;
    const range_ rows = share(worker, step->count);
    for (int64_t row = rows.first; row < rows.last; row++)
        for (int64_t d = 0; d < step->hidden; d++)
            step->x[row * step->hidden + d] =
                widened(step->embed[step->tokens[row] * step->hidden + d]);
}

/* Write norms of `count` tokens to `h`. */
static void norm_rows(worker_ *worker, const float *weight, const int64_t *which, int64_t count) {
    const step_ *step = worker->step;
    const int64_t hidden = step->hidden;
    const range_ rows = share(worker, count);
    for (int64_t row = rows.first; row < rows.last; row++)
        norm_one(step->x + (which ? which[row] : row) * hidden, weight, step->h + row * hidden,
                 hidden, (float)step->eps);
}

/* Round this thread's rows of the input of a layer. */
static void round_rows(worker_ *worker, float *input, int64_t width) {
    const range_ rows = share(worker, worker->step->count);
    for (int64_t row = rows.first; row < rows.last; row++) round_input(input + row * width, width);
}

static void attention(worker_ *worker, const layer_ *layer) {
    const step_ *step = worker->step;
    const range_ runs = share(worker, step->num_runs);
    const int64_t *table = step->runs, num = step->num_runs;
    attend(step->query, layer->keys, layer->values, step->of, step->width, table, table + num,
           table + 2 * num, table + 3 * num, step->mixed, runs.first, runs.last);
}

/* Compute the part of one thread of a step. Returns when this part is done. */
void decode(step_ *step, int64_t thread) {
    float *scratch = step->scratch + thread * step->scratch_size;
    worker_ worker_here = {step, thread, 0, scratch + DEPTH * PANEL, scratch};
    worker_ *worker = &worker_here;
    const int64_t count = step->count, hidden = step->hidden, inner = step->inner;
    const int64_t width = HEADS * HEAD_DIM, whole = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
    embed_tokens(worker);
    for (int64_t index = 0; index < step->num_layers; index++) {
        const layer_ *layer = step->layers + index;
        norm_rows(worker, layer->norm_1, NULL, count);
        round_rows(worker, step->h, hidden);
        meet(worker);
        product(worker, step->h, count, hidden, layer->qkv, step->qkv, whole, 0);
        meet(worker);
        const range_ rows = share(worker, count);
        for (int64_t row = rows.first; row < rows.last; row++) turn_one(step, layer, row);
        meet(worker);
        attention(worker, layer);
        meet(worker);
#if defined BFLOAT16 || ROUNDS
        for (int64_t i = rows.first * width; i < rows.last * width; i++)
            step->query[i] = widened(step->mixed[i]);
        round_rows(worker, step->query, width);
        meet(worker);
        const float *mixed = step->query;
#else
        const float *mixed = step->mixed;
#endif
        product(worker, mixed, count, width, layer->out, step->x, hidden, 1);
        meet(worker);
        norm_rows(worker, layer->norm_2, NULL, count);
        round_rows(worker, step->h, hidden);
        meet(worker);
        gated_product(worker, step->h, count, hidden, layer->gate_up, step->gated, inner);
        meet(worker);
        if (ROUNDS) {
            round_rows(worker, step->gated, inner);
            meet(worker);
        }
        product(worker, step->gated, count, inner, layer->down, step->x, hidden, 1);
        meet(worker);
    }
    norm_rows(worker, step->norm, step->ends, step->num_ends);
    meet(worker);
    product(worker, step->h, step->num_ends, hidden, step->head, step->logits, step->vocab, 0);
    meet(worker);
}
