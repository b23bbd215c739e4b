/* Stochastic rounding of float32 weights to bfloat16 or float16, on the bits of `rounding.py`. */

#include <stdint.h>
#include <string.h>

#define LANES 8
#include "floats.h"
#include "threads.h"

#define PIECE 65536 /* numbers of one piece of work */
#define INFINITE 0x7f800000u

/* 32 random bits of the element `index` of a tensor, by two keys. */
inline_ uint32_t random_bits(uint32_t index, uint32_t low, uint32_t high) {
    uint32_t x = index + low;
    x = (x ^ (x >> 17)) * 0xed5ad4bbu;
    x = (x ^ (x >> 11)) + high;
    x = (x ^ (x >> 16)) * 0xac4c1b51u;
    x = (x ^ (x >> 15)) * 0x31848babu;
    return x ^ (x >> 14);
}

/* The last bit of the result is raised with the probability that the 16 bits after it say. A finite
   number never becomes infinite. */
inline_ uint16_t to_bfloat16(uint32_t word, uint32_t bits) {
    const uint32_t size = word & 0x7fffffff, raised = word + (bits >> 16);
    uint32_t result = (raised & INFINITE) == INFINITE ? word : raised;
    result = size > INFINITE ? word | 0x400000 : result;
    return result >> 16;
}

/* Return `yes` or `no` without a branch, which would keep the compiler from using vectors. */
inline_ uint32_t choose(int which, uint32_t yes, uint32_t no) {
    const uint32_t mask = -(uint32_t)which;
    return (yes & mask) | (no & ~mask);
}

inline_ uint16_t to_float16(uint32_t word, uint32_t bits) {
    const uint32_t size = word & 0x7fffffff;
    uint32_t normal = (size + (bits >> 19) - (112u << 23)) >> 13;
    normal = choose(normal > 0x7bff, 0x7bff, normal);
    /* Below 2^-14 all neighbours are multiples of 2^-24. */
    const uint32_t kept = choose((size >= 0x800000) & (size < 0x38800000), size, 0);
    float value;
    memcpy(&value, &kept, sizeof value);
    value *= 0x1p24f;
    const int32_t whole = (int32_t)value;
    const float share = (float)(int32_t)(bits >> 8) * 0x1p-24f;
    const uint32_t small = (uint32_t)whole + (share < value - (float)whole);
    uint32_t result = choose(size < 0x38800000, small, normal);
    result = choose(size >= 0x47800000, 0x7c00, result); /* 65536 and more */
    result = choose(size > INFINITE, 0x7e00, result);
    return result | (word >> 16 & 0x8000);
}

typedef struct {
    const uint32_t *weights;
    uint16_t *out;
    int64_t count;
    uint32_t first, low, high;
} rounding_t;

static void bfloat16_piece(const void *task, int64_t piece) {
    const rounding_t *t = task;
    const int64_t end = least((piece + 1) * PIECE, t->count);
    for (int64_t i = piece * PIECE; i < end; i++)
        t->out[i] = to_bfloat16(t->weights[i],
                                random_bits(t->first + (uint32_t)i, t->low, t->high));
}

static void float16_piece(const void *task, int64_t piece) {
    const rounding_t *t = task;
    const int64_t end = least((piece + 1) * PIECE, t->count);
    for (int64_t i = piece * PIECE; i < end; i++)
        t->out[i] = to_float16(t->weights[i],
                               random_bits(t->first + (uint32_t)i, t->low, t->high));
}

/* `weights` [count] become `out` [count]. The first of them is the element `first` of its tensor.
   `half` is 1 for float16 and 0 for bfloat16. */
void round_weights(parallel_t parallel, int64_t num, const void *weights, void *out, int64_t count,
                   int64_t first, int64_t low, int64_t high, int64_t half) {
    const threads_t threads = {parallel, num};
    const rounding_t task = {.weights = weights, .out = out, .count = count,
                             .first = (uint32_t)first, .low = (uint32_t)low,
                             .high = (uint32_t)high};
    divide(&threads, (count + PIECE - 1) / PIECE, half ? float16_piece : bfloat16_piece, &task);
}
