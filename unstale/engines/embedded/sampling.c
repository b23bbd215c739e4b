/* Sampling of tokens from logits, compiled on the machine that runs it. LANES is 16 or less. */

#include <stdlib.h>

#include "vectors.h"

#define HALF (LANES / 2)
#define BLOCK 64 /* tokens whose probabilities are summed up apart from the others */

typedef float halves __attribute__((vector_size(4 * HALF)));
typedef double doubles __attribute__((vector_size(8 * HALF)));

static uint64_t mix(uint64_t value) {
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
    value = (value ^ value >> 27) * 0x94D049BB133111EBu;
    return value ^ value >> 31;
}

/* `uniforms` of sampling.py. */
static double uniform(uint64_t seed, int64_t position) {
    const uint64_t golden = 0x9E3779B97F4A7C15u;
    const uint64_t stream = mix(seed + golden);
    const uint64_t bits = mix(stream ^ mix(((uint64_t)position + 1) * golden));
    return ((double)(bits >> 16) + 0.5) / 281474976710656.0;
}

/* A token of the vocabulary that may be kept, with its weight. */
typedef struct {
    float weight;
    int32_t token;
} candidate;

/* The limits of `Truncation` of kept_sets.py. */
typedef struct {
    double top_p, top_k, min_p;
} truncation;

/* Numbers of scratch memory, in bytes, for `vocab` tokens. */
int64_t scratch(int64_t vocab) {
    return (vocab + BLOCK) * 4 + (vocab / BLOCK + 1) * 8 + vocab * (int64_t)sizeof(candidate);
}

/* Write the weights exp(logit / heat - top) of a row and their sums by block. Return the sum. */
static double weigh(const float *from, int64_t vocab, float heat, float *weights, double *sums,
                    float *top) {
    const int64_t num_blocks = (vocab + BLOCK - 1) / BLOCK;
    const int divides = heat != 0 && heat != 1;
    floats tops = all(-INFINITY);
    for (int64_t at = 0; at < num_blocks * BLOCK; at += LANES) {
        floats x = all(-INFINITY);
        if (at + LANES <= vocab)
            memcpy(&x, from + at, sizeof x);
        else if (at < vocab)
            memcpy(&x, from + at, (vocab - at) * sizeof *from);
        if (divides) x = x / heat;
        memcpy(weights + at, &x, sizeof x);
        tops = either(tops > x, tops, x);
    }
    *top = highest(tops);
    double whole = 0;
    for (int64_t block = 0; block < num_blocks; block++) {
        doubles sum = {0};
        for (int64_t at = block * BLOCK; at < (block + 1) * BLOCK; at += LANES) {
            floats x;
            memcpy(&x, weights + at, sizeof x);
            x = exponential(x - *top);
            memcpy(weights + at, &x, sizeof x);
            for (int part = 0; part < LANES; part += HALF) {
                halves half;
                memcpy(&half, (char *)&x + part * 4, sizeof half);
                sum += __builtin_convertvector(half, doubles);
            }
        }
        sums[block] = 0;
        for (int lane = 0; lane < HALF; lane++) sums[block] += sum[lane];
        whole += sums[block];
    }
    return whole;
}

static int heavier(const void *one, const void *other) {
    const candidate *a = one, *b = other;
    if (a->weight != b->weight) return a->weight < b->weight ? 1 : -1;
    return a->token < b->token ? -1 : 1;
}

static int ascending(const void *one, const void *other) {
    const int32_t a = *(const int32_t *)one, b = *(const int32_t *)other;
    return a < b ? -1 : a > b;
}

/* Write the tokens with a weight of at least `least` to `found`. Return their number. */
static int64_t collect(const float *weights, const double *sums, int64_t num_blocks, double least,
                       candidate *found, double *mass) {
    int64_t count = 0;
    *mass = 0;
    for (int64_t block = 0; block < num_blocks; block++) {
        if (sums[block] < least) continue; /* no weight is larger than the sum */
        for (int64_t at = block * BLOCK; at < (block + 1) * BLOCK; at++)
            if (weights[at] >= least && weights[at] > 0) {
                *mass += weights[at];
                found[count++] = (candidate){weights[at], (int32_t)at};
            }
    }
    return count;
}

/* Write the kept tokens to `kept`, ascending. Return their number. The most probable token, whose
   weight is 1, is always kept. Only tokens above a bound are sorted; the bound falls until
   they suffice. */
static int64_t keep(const float *weights, const double *sums, int64_t num_blocks, double whole,
                    truncation limits, candidate *found, int32_t *kept) {
    double mass, least = 1.0 / 64;
    int64_t count;
    for (;;) {
        if (least < limits.min_p || least < 1e-30) least = limits.min_p;
        count = collect(weights, sums, num_blocks, least, found, &mass);
        if (least == limits.min_p) break;
        if (limits.top_k > 0 ? count >= limits.top_k : !limits.min_p && mass >= limits.top_p * whole)
            break;
        least /= 16;
    }
    qsort(found, count, sizeof *found, heavier);
    if (limits.top_k > 0 && count > limits.top_k) count = (int64_t)limits.top_k;
    if (limits.top_k > 0 || limits.min_p > 0) {
        whole = 0;
        for (int64_t at = 0; at < count; at++) whole += found[at].weight;
    }
    double sum = 0;
    int64_t used = 0;
    while (used < count && (!used || limits.top_p >= 1 || sum < limits.top_p * whole))
        sum += found[used++].weight;
    for (int64_t at = 0; at < used; at++) kept[at] = found[at].token;
    qsort(kept, used, sizeof *kept, ascending);
    return used;
}

/* Return the token at which the cumulative weight exceeds `rest`. */
static int64_t invert(const float *weights, const double *sums, int64_t num_blocks, double rest) {
    int64_t token = -1, block = 0;
    while (block < num_blocks - 1 && rest >= sums[block]) rest -= sums[block++];
    for (int64_t at = block * BLOCK; at < (block + 1) * BLOCK && rest >= 0; at++)
        if (weights[at] > 0) {
            token = at;
            rest -= weights[at];
        }
    if (token < 0) /* the last blocks are without weight, and the sums were rounded */
        for (token = block * BLOCK - 1; weights[token] <= 0;) token--;
    return token;
}

/* Draw a token of each of the rows `first` to `last` of logits [rows, vocab], by inverting the
   cumulative distribution at a random number. The distribution is that of `logp`, in nats. At
   temperature 0 the token is the most probable one and its `logp` 0. `scratch` is as many bytes
   as `scratch` returns. A row with logits that are not finite gets token -1.

   `limits` [rows] are NULL, or truncate the distribution. The kept tokens of a row are then
   written to its row of `kept` [rows, vocab], and their number to `sizes`, 0 for all. */
void draw(const float *logits, int64_t vocab, const float *temperature, const uint64_t *seeds,
          const int64_t *positions, const truncation *limits, char *scratch, int64_t *tokens,
          float *logp, int64_t *sizes, int32_t *kept, int64_t first, int64_t last) {
    const int64_t num_blocks = (vocab + BLOCK - 1) / BLOCK;
    double *sums = (double *)scratch;
    candidate *found = (candidate *)(sums + num_blocks);
    float *weights = (float *)(found + vocab);
    for (int64_t row = first; row < last; row++) {
        const float *from = logits + row * vocab;
        const float heat = temperature[row];
        float top;
        double whole = weigh(from, vocab, heat, weights, sums, &top);
        if (!(whole < INFINITY)) {
            tokens[row] = -1;
            continue;
        }
        int64_t token = 0;
        if (limits) sizes[row] = 0;
        if (heat == 0) {
            while (from[token] != top) token++;
            tokens[row] = token;
            logp[row] = 0;
            continue;
        }
        const double share = uniform(seeds[row], positions[row]);
        const truncation *own = limits + row;
        if (limits && (own->top_p < 1 || own->top_k > 0 || own->min_p > 0)) {
            int32_t *mine = kept + row * vocab;
            const int64_t size = keep(weights, sums, num_blocks, whole, *own, found, mine);
            whole = 0;
            for (int64_t at = 0; at < size; at++) whole += weights[mine[at]];
            double rest = share * whole - weights[mine[0]];
            int64_t at = 0;
            while (rest >= 0 && at < size - 1) rest -= weights[mine[++at]];
            token = mine[at];
            sizes[row] = size;
        } else {
            token = invert(weights, sums, num_blocks, share * whole);
        }
        tokens[row] = token;
        const float scaled = heat != 1 ? from[token] / heat : from[token];
        logp[row] = (float)((double)(scaled - top) - log(whole));
    }
}
