/* Sampling of tokens from logits, compiled on the machine that runs it. LANES is 16 or less. */

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

/* Numbers of scratch memory, in bytes, for `vocab` tokens. */
int64_t scratch(int64_t vocab) { return (vocab + BLOCK) * 4 + (vocab / BLOCK + 1) * 8; }

/* Draw a token of each of the rows `first` to `last` of logits [rows, vocab], by inverting the
   cumulative distribution at a random number. The distribution is that of `logp`, in nats. At
   temperature 0 the token is the most probable one and its `logp` 0. `scratch` is as many bytes
   as `scratch` returns. A row with logits that are not finite gets token -1. */
void draw(const float *logits, int64_t vocab, const float *temperature, const uint64_t *seeds,
          const int64_t *positions, char *scratch, int64_t *tokens, float *logp, int64_t first,
          int64_t last) {
    const int64_t num_blocks = (vocab + BLOCK - 1) / BLOCK;
    double *sums = (double *)scratch;
    float *weights = (float *)(sums + num_blocks);
    for (int64_t row = first; row < last; row++) {
        const float *from = logits + row * vocab;
        const float heat = temperature[row];
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
        const float top = highest(tops);
        double whole = 0;
        for (int64_t block = 0; block < num_blocks; block++) {
            doubles sum = {0};
            for (int64_t at = block * BLOCK; at < (block + 1) * BLOCK; at += LANES) {
                floats x;
                memcpy(&x, weights + at, sizeof x);
                x = exponential(x - top);
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
        if (!(whole < INFINITY)) {
            tokens[row] = -1;
            continue;
        }
        int64_t token = -1;
        if (heat == 0) {
            for (token = 0; from[token] != top;) token++;
            tokens[row] = token;
            logp[row] = 0;
            continue;
        }
        double rest = uniform(seeds[row], positions[row]) * whole;
        int64_t block = 0;
        while (block < num_blocks - 1 && rest >= sums[block]) rest -= sums[block++];
        for (int64_t at = block * BLOCK; at < (block + 1) * BLOCK && rest >= 0; at++)
            if (weights[at] > 0) {
                token = at;
                rest -= weights[at];
            }
        if (token < 0) /* the last blocks are without weight, and the sums were rounded */
            for (token = block * BLOCK - 1; weights[token] <= 0;) token--;
        tokens[row] = token;
        const float scaled = divides ? from[token] / heat : from[token];
        logp[row] = (float)((double)(scaled - top) - log(whole));
    }
}
