/* Matrix products whose rows have the same bits in every program, compiled on the machine that runs
   them.

   A weight [columns, depth] is stored in panels of PANEL columns, [columns / PANEL, depth, PANEL],
   the last one filled up with zeros. Each sum is added up in the order of `depth`, from 0. So a row
   of a product depends on this row and the weight alone: not on the number of rows, the number of
   threads, or the place of the row.

   The input of a bfloat16 weight is rounded to bfloat16, and its sums are float32. CPUs with an
   instruction for the sum of two bfloat16 products use it: a panel then holds two successive rows
   of `depth` side by side, [depth / 2, PANEL, 2]. Other CPUs multiply the same numbers in float32. */

#include "pieces.h"

#define PARTS 2
#define PANEL (LANES * PARTS)
#if LANES == 16
#define TILE 12 /* rows whose sums fit into the registers */
#else
#define TILE 6
#endif
#define ROWS (TILE * 16) /* rows of one piece of work: they stay in the second cache */

#ifdef __AVX512BF16__
#include <immintrin.h>
#define PAIRS 1
#else
#define PAIRS 0
#endif

int64_t panel(void) { return PANEL; }

/* 1 if panels of bfloat16 weights hold pairs of bfloat16 numbers, 0 if they hold float32. */
int64_t has_pairs(void) { return PAIRS; }

inline_ float widened(uint16_t value) {
    const uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

inline_ uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Packing: weights into panels, one panel a piece. */

typedef struct {
    const void *weight;
    void *panels;
    int64_t columns, depth;
} pack_t;

static void pack_piece(const void *task, int64_t at) {
    const pack_t *t = task;
    const int64_t depth = t->depth, count = least(PANEL, t->columns - at * PANEL);
    const float *from = (const float *)t->weight + at * PANEL * depth;
    float *to = (float *)t->panels + at * PANEL * depth;
    for (int64_t low = 0; low < depth; low += LANES)
        for (int64_t j = 0; j < PANEL; j++)
            for (int64_t k = low; k < least(low + LANES, depth); k++)
                to[k * PANEL + j] = j < count ? from[j * depth + k] : 0;
}

/* Pack a float32 weight [columns, depth]. */
void pack(parallel_t parallel, int64_t num, const float *weight, float *panels, int64_t columns,
          int64_t depth) {
    const threads_t threads = {parallel, num};
    const pack_t task = {weight, panels, columns, depth};
    divide(&threads, (columns + PANEL - 1) / PANEL, pack_piece, &task);
}

static void pack_bfloat16_piece(const void *task, int64_t at) {
    const pack_t *t = task;
    const int64_t depth = t->depth, count = least(PANEL, t->columns - at * PANEL);
    const uint16_t *from = (const uint16_t *)t->weight + at * PANEL * depth;
#if PAIRS
    uint32_t *to = (uint32_t *)t->panels + at * PANEL * depth / 2;
    for (int64_t low = 0; low < depth / 2; low += LANES)
        for (int64_t j = 0; j < PANEL; j++)
            for (int64_t k = low; k < least(low + LANES, depth / 2); k++) {
                uint32_t pair = 0;
                if (j < count) memcpy(&pair, from + j * depth + 2 * k, 4);
                to[k * PANEL + j] = pair;
            }
#else
    float *to = (float *)t->panels + at * PANEL * depth;
    for (int64_t low = 0; low < depth; low += LANES)
        for (int64_t j = 0; j < PANEL; j++)
            for (int64_t k = low; k < least(low + LANES, depth); k++)
                to[k * PANEL + j] = j < count ? widened(from[j * depth + k]) : 0;
#endif
}

/* Pack a bfloat16 weight [columns, depth], whose `depth` is even. */
void pack_bfloat16(parallel_t parallel, int64_t num, const uint16_t *weight, void *panels,
                   int64_t columns, int64_t depth) {
    const threads_t threads = {parallel, num};
    const pack_t task = {weight, panels, columns, depth};
    divide(&threads, (columns + PANEL - 1) / PANEL, pack_bfloat16_piece, &task);
}

/* Products: ROWS rows by one panel a piece. */

typedef struct {
    const float *x, *bias;
    const void *panels;
    float *out;
    int64_t rows, columns, depth;
    int is_bfloat16;
} product_t;

/* Write `rows` rows of sums to `out`, of which `width` columns exist. */
inline_ void finish(floats sums[TILE][PARTS], const float *bias, float *out, int64_t stride,
                    int64_t width, int rows) {
    for (int row = 0; row < rows; row++, out += stride) {
        float whole[PANEL];
        memcpy(whole, sums[row], sizeof whole);
        if (bias)
            for (int64_t j = 0; j < width; j++) whole[j] += bias[j];
        memcpy(out, whole, width * sizeof *out);
    }
}

inline_ void tile(const float *x, const float *panels, int64_t depth, floats sums[TILE][PARTS],
                  int rows) {
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < PARTS; part++) sums[row][part] = all(0);
    for (int64_t k = 0; k < depth; k++, panels += PANEL) {
        floats right[PARTS];
        for (int part = 0; part < PARTS; part++) right[part] = loaded(panels + part * LANES);
        for (int row = 0; row < rows; row++) {
            const float left = x[row * depth + k];
            for (int part = 0; part < PARTS; part++) sums[row][part] += right[part] * left;
        }
    }
}

#if PAIRS
/* Rows of x are pairs of bfloat16 numbers here. */
inline_ void tile_pairs(const uint32_t *x, const uint32_t *panels, int64_t depth,
                        floats sums[TILE][PARTS], int rows) {
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < PARTS; part++) sums[row][part] = all(0);
    for (int64_t k = 0; k < depth / 2; k++, panels += PANEL) {
        __m512bh right[PARTS];
        for (int part = 0; part < PARTS; part++)
            right[part] = (__m512bh)_mm512_loadu_si512(panels + part * LANES);
        for (int row = 0; row < rows; row++) {
            const __m512bh left = (__m512bh)_mm512_set1_epi32((int)x[row * (depth / 2) + k]);
            for (int part = 0; part < PARTS; part++)
                sums[row][part] =
                    (floats)_mm512_dpbf16_ps((__m512)sums[row][part], right[part], left);
        }
    }
}
#endif

inline_ void some_rows(const product_t *t, const void *x, const char *panels, const float *bias,
                       float *out, int64_t width, int rows) {
    floats sums[TILE][PARTS];
#if PAIRS
    if (t->is_bfloat16)
        tile_pairs(x, (const uint32_t *)panels, t->depth, sums, rows);
    else
#endif
        tile(x, (const float *)panels, t->depth, sums, rows);
    finish(sums, bias, out, t->columns, width, rows);
}

static void product_piece(const void *task, int64_t number) {
    const product_t *t = task;
    const int64_t num_panels = (t->columns + PANEL - 1) / PANEL;
    const int64_t first = number / num_panels * ROWS, at = number % num_panels;
    const int64_t rows = least(ROWS, t->rows - first), width = least(PANEL, t->columns - at * PANEL);
    const int64_t size = PAIRS && t->is_bfloat16 ? 2 : 4; /* bytes of a number of x and panels */
    const char *panels = (const char *)t->panels + at * PANEL * t->depth * size;
    const float *bias = t->bias ? t->bias + at * PANEL : NULL;
    const int64_t num = (rows + TILE - 1) / TILE;
    for (int64_t i = 0; i < num; i++) { /* tiles of nearly equal height */
        const int64_t row = first + rows * i / num, height = first + rows * (i + 1) / num - row;
        const char *x = (const char *)t->x + row * t->depth * size;
        float *out = t->out + row * t->columns + at * PANEL;
        switch (height) {
#define CASE(N) \
    case N: some_rows(t, x, panels, bias, out, width, N); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE > 6
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
        }
    }
}

/* out [rows, columns] = x [rows, depth] times a float32 weight in panels, plus `bias` or NULL. */
void product(parallel_t parallel, int64_t num, const float *x, const float *panels,
             const float *bias, float *out, int64_t rows, int64_t columns, int64_t depth) {
    const threads_t threads = {parallel, num};
    const product_t task = {x, bias, panels, out, rows, columns, depth, 0};
    const int64_t blocks = (rows + ROWS - 1) / ROWS;
    divide(&threads, blocks * ((columns + PANEL - 1) / PANEL), product_piece, &task);
}

typedef struct {
    const float *x;
    void *out;
    int64_t depth, rows;
} round_t;

static void round_piece(const void *task, int64_t number) {
    const round_t *t = task;
    const int64_t end = least((number + 1) * ROWS, t->rows) * t->depth;
    for (int64_t i = number * ROWS * t->depth; i < end; i++) {
#if PAIRS
        ((uint16_t *)t->out)[i] = rounded(t->x[i]);
#else
        ((float *)t->out)[i] = widened(rounded(t->x[i]));
#endif
    }
}

/* The same for a bfloat16 weight. `memory` has space for x. */
void product_bfloat16(parallel_t parallel, int64_t num, const float *x, const void *panels,
                      const float *bias, float *out, float *memory, int64_t rows, int64_t columns,
                      int64_t depth) {
    const threads_t threads = {parallel, num};
    const round_t rounds = {x, memory, depth, rows};
    const int64_t blocks = (rows + ROWS - 1) / ROWS;
    divide(&threads, blocks, round_piece, &rounds);
    const product_t task = {memory, bias, panels, out, rows, columns, depth, 1};
    divide(&threads, blocks * ((columns + PANEL - 1) / PANEL), product_piece, &task);
}

/* Log-probabilities. */

typedef double doubles __attribute__((vector_size(8 * LANES)));

typedef struct {
    const float *logits, *temperature;
    const int64_t *targets;
    float *logp, *total, *entropy;
    int64_t rows, vocab;
} score_t;

/* LANES logits from `at` on, divided by the temperature. Those after the last one are -infinity. */
inline_ floats divided(const float *logits, int64_t at, int64_t vocab, float temperature) {
    floats x = all(-INFINITY);
    if (at + LANES <= vocab)
        x = loaded(logits + at);
    else
        memcpy(&x, logits + at, (vocab - at) * sizeof *logits);
    return temperature == 1 ? x : x / temperature;
}

static void score_piece(const void *task, int64_t row) {
    const score_t *t = task;
    const float *logits = t->logits + row * t->vocab, temperature = t->temperature[row];
    floats most = all(-INFINITY);
    for (int64_t at = 0; at < t->vocab; at += LANES)
        most = larger(divided(logits, at, t->vocab, temperature), most);
    const float top = highest(most);
    doubles sums = {0};
    for (int64_t at = 0; at < t->vocab; at += LANES) {
        const floats x = divided(logits, at, t->vocab, temperature) - top;
        sums += __builtin_convertvector(exponential(x), doubles);
    }
    double whole = 0;
    for (int lane = 0; lane < LANES; lane++) whole += sums[lane];
    const float logit = logits[t->targets[row]];
    const float chosen = temperature == 1 ? logit : logit / temperature;
    t->logp[row] = (float)((double)(chosen - top) - log(whole));
    if (t->total) t->total[row] = (float)((double)top + log(whole));
    if (!t->entropy) return;
    doubles products = {0};
    for (int64_t at = 0; at < t->vocab; at += LANES) {
        const floats x = divided(logits, at, t->vocab, temperature) - top;
        products += __builtin_convertvector(exponential(x) * larger(x, all(LEAST)), doubles);
    }
    double mean = 0;
    for (int lane = 0; lane < LANES; lane++) mean += products[lane];
    t->entropy[row] = (float)(log(whole) - mean / whole);
}

/* `logp` [rows] of the targets in the softmax of logits [rows, vocab] / temperature [rows]. `total`
   gets the logarithms of the denominators, `entropy` the entropies. Both may be NULL. */
void score(parallel_t parallel, int64_t num, const float *logits, const float *temperature,
           const int64_t *targets, float *logp, float *total, float *entropy, int64_t rows,
           int64_t vocab) {
    const threads_t threads = {parallel, num};
    const score_t task = {logits, temperature, targets, logp, total, entropy, rows, vocab};
    divide(&threads, rows, score_piece, &task);
}
