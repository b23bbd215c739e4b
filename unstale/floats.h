/* Vectors of LANES floats. The file that includes this one defines LANES. */

#include <stdint.h>

#define LEAST -1e30f
#define inline_ static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

inline_ floats all(float value) { return (floats){0} + value; }

/* e^x for x <= 0, to 2 units in the last place. 0 below -87, where float32 loses digits. NaN stays
   NaN. */
inline_ floats exponential(floats x) {
    ints power = __builtin_convertvector(x * 1.44269504f - 0.5f, ints);
    floats whole = __builtin_convertvector(power, floats);
    floats remainder = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
    floats sum = all(1.98756915e-4f);
    sum = sum * remainder + 1.39819995e-3f;
    sum = sum * remainder + 8.33345191e-3f;
    sum = sum * remainder + 4.16657959e-2f;
    sum = sum * remainder + 1.66666655e-1f;
    sum = sum * remainder + 0.5f;
    sum = sum * remainder * remainder + remainder + 1.0f;
    return (floats)((ints)(sum * (floats)((power + 127) << 23)) & ~(x <= -87.0f));
}

inline_ floats either(ints which, floats yes, floats no) {
    return (floats)(((ints)yes & which) | ((ints)no & ~which));
}
