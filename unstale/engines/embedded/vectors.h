/* Vectors of LANES floats, and numbers of the model's type: bfloat16 if BFLOAT16 is defined, else
   float32. LANES becomes smaller if the CPU's registers are. NATIVE may be set by a test. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef NATIVE
#if defined __AVX512F__
#define NATIVE 16
#elif defined __AVX__
#define NATIVE 8
#else
#define NATIVE 4
#endif
#endif
#if defined __AVX512F__ || defined __aarch64__
#define SUMS 16
#else
#define SUMS 8
#endif
/* NATIVE is the floats of a register; wider vectors are slow, since the compiler takes them apart.
   WIDE is LANES as it was given, the width of the panels of experts' weights.
   SUMS is the registers that hold sums, about half of all. */
#if LANES == 16
#define WIDE 16
#elif LANES == 8
#define WIDE 8
#else
#define WIDE 4
#endif
#if LANES > NATIVE
#undef LANES
#define LANES NATIVE
#endif

#include "floats.h"

#ifdef BFLOAT16
typedef uint16_t number;
typedef uint16_t numbers __attribute__((vector_size(2 * LANES)));

inline_ float widened(number value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

inline_ number rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return (number)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline_ floats loaded(const number *at) {
    numbers packed;
    memcpy(&packed, at, sizeof packed);
    return (floats)(__builtin_convertvector(packed, ints) << 16);
}

inline_ void stored(number *at, floats value) {
    ints bits = (ints)value, bad = value != value;
    ints upper = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    numbers packed = __builtin_convertvector((upper & ~bad) | (0x7fc0 & bad), numbers);
    memcpy(at, &packed, sizeof packed);
}
#else
typedef float number;
inline_ float widened(number value) { return value; }
inline_ number rounded(float value) { return value; }

inline_ floats loaded(const number *at) {
    floats value;
    memcpy(&value, at, sizeof value);
    return value;
}

inline_ void stored(number *at, floats value) { memcpy(at, &value, sizeof value); }
#endif

inline_ float highest(floats x) {
    float most[LANES];
    memcpy(most, &x, sizeof most);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            most[lane] = most[lane] > most[lane + half] ? most[lane] : most[lane + half];
    return most[0];
}

inline_ float total(floats x) {
    float sum[LANES];
    memcpy(sum, &x, sizeof sum);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) sum[lane] += sum[lane + half];
    return sum[0];
}
