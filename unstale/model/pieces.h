/* Vectors of float32, and work that is divided among threads. */

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
#include "threads.h"

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
