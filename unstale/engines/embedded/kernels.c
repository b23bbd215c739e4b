/* The parts of a decoding step between its matrix products, compiled on the machine that runs it.

   Macros set by the caller: HEADS, KV_HEADS, HEAD_DIM, PAGE, RUN, LANES (divides HEAD_DIM and
   PAGE), and BFLOAT16 if the model is bfloat16. Sums are always float32. `number` is the model's
   type. The cache is paged: keys are [page, KV_HEADS, HEAD_DIM, PAGE], values are
   [page, KV_HEADS, PAGE, HEAD_DIM]. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define REP (HEADS / KV_HEADS)
#define MOST 4 /* queries whose sums fit into registers together */
#define LEAST -1e30f
#define inline_ static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

inline_ floats all(float value) { return (floats){0} + value; }

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

inline_ float highest(floats x) {
    float most = x[0];
    for (int lane = 1; lane < LANES; lane++) most = x[lane] > most ? x[lane] : most;
    return most;
}

inline_ float total(floats x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

/* Return 1 / sqrt(mean square + eps). */
inline_ float root(const number *x, int64_t count, float eps) {
    floats squares = all(0);
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) squares += loaded(x + at) * loaded(x + at);
    float sum = total(squares);
    for (; at < count; at++) sum += widened(x[at]) * widened(x[at]);
    return 1.0f / sqrtf(sum / count + eps);
}

/* A query, and its softmax over the pages so far. */
typedef struct {
    float query[HEAD_DIM];
    float top, weight;
    float mixed[HEAD_DIM];
    int64_t visible;
} query_;

/* A page's keys and values of one head. */
typedef struct {
    const number *keys, *values;
} page_;

/* How a layer departs from full attention: a query sees itself and `window - 1` tokens before it,
   scores are cap * tanh(score / cap) if `cap` is positive, and each head has a further score
   `sinks` without a value, unless that is NULL. */
typedef struct {
    int64_t window;
    float cap;
    const float *sinks;
} limits_;

/* tanh, to 4 units in the last place. */
inline_ floats tangent(floats x) {
    const floats square = x * x;
    floats near = all(2.18694885e-2f);
    near = near * square - 5.39682540e-2f;
    near = near * square + 1.33333333e-1f;
    near = near * square - 3.33333333e-1f;
    near = x + x * square * near;
    const floats decay = exponential(2 * either(x < 0, x, -x));
    const floats far = (1 - decay) / (1 + decay);
    return either(square < 0.0625f, near, either(x < 0, -far, far));
}

/* Attend with `width` queries over a page whose first token has position `start`. Prefetches the
   page `next`. `limits` is NULL for full attention. */
inline_ void attend_page(query_ *queries, int width, page_ page, int64_t start, page_ next,
                         const limits_ *limits) {
    const number *keys = page.keys, *values = page.values;
    floats scores[MOST][PAGE / LANES];
    for (int q = 0; q < width; q++)
        for (int part = 0; part < PAGE / LANES; part++) scores[q][part] = all(0);
    for (int d = 0; d < HEAD_DIM; d++) {
        for (int byte = 0; byte < PAGE * (int)sizeof *keys; byte += 64) {
            __builtin_prefetch((const char *)(next.keys + d * PAGE) + byte);
            __builtin_prefetch((const char *)(next.values + d * PAGE) + byte);
        }
        for (int part = 0; part < PAGE / LANES; part++) {
            floats key = loaded(keys + d * PAGE + part * LANES);
            for (int q = 0; q < width; q++) scores[q][part] += key * queries[q].query[d];
        }
    }
    float weights[MOST][PAGE];
    int most = 0;
    for (int q = 0; q < width; q++) {
        int64_t left = queries[q].visible - start;
        int seen = left < 0 ? 0 : left < PAGE ? (int)left : PAGE;
        most = seen > most ? seen : most;
        int hidden = 0;
        if (limits) {
            const int64_t before = left - limits->window;
            hidden = before < 0 ? 0 : before < PAGE ? (int)before : PAGE;
            if (limits->cap > 0)
                for (int part = 0; part < PAGE / LANES; part++)
                    scores[q][part] = tangent(scores[q][part] / limits->cap) * limits->cap;
        }
        floats tops = all(LEAST);
        for (int part = 0; part < PAGE / LANES; part++) {
            ints place;
            for (int lane = 0; lane < LANES; lane++) place[lane] = part * LANES + lane;
            const ints visible = limits ? (place < seen) & (place >= hidden) : place < seen;
            scores[q][part] = either(visible, scores[q][part], all(2 * LEAST));
            tops = either(tops > scores[q][part], tops, scores[q][part]);
        }
        float top = highest(tops);
        top = top > queries[q].top ? top : queries[q].top;
        float before = expf(queries[q].top - top);
        floats sums = all(0);
        for (int part = 0; part < PAGE / LANES; part++) {
            floats weight = exponential(scores[q][part] - top);
            sums += weight;
            memcpy(weights[q] + part * LANES, &weight, sizeof weight);
        }
        queries[q].top = top;
        queries[q].weight = queries[q].weight * before + total(sums);
        for (int d = 0; d < HEAD_DIM; d++) queries[q].mixed[d] *= before;
    }
    for (int d = 0; d < HEAD_DIM; d += LANES) {
        floats even[MOST], odd[MOST];
        for (int q = 0; q < width; q++) {
            memcpy(&even[q], queries[q].mixed + d, sizeof even[q]);
            odd[q] = all(0);
        }
        int token = 0;
        for (; token + 1 < most; token += 2) {
            floats first = loaded(values + token * HEAD_DIM + d);
            floats second = loaded(values + (token + 1) * HEAD_DIM + d);
            for (int q = 0; q < width; q++) {
                even[q] += first * weights[q][token];
                odd[q] += second * weights[q][token + 1];
            }
        }
        if (token < most) {
            floats last = loaded(values + token * HEAD_DIM + d);
            for (int q = 0; q < width; q++) even[q] += last * weights[q][token];
        }
        for (int q = 0; q < width; q++) {
            even[q] += odd[q];
            memcpy(queries[q].mixed + d, &even[q], sizeof even[q]);
        }
    }
}

inline_ page_ page_of(const number *keys, const number *values, int64_t page, int head) {
    const int64_t at = (page * KV_HEADS + head) * HEAD_DIM * PAGE;
    return (page_){keys + at, values + at};
}

/* The page of the first token that a query at position `at` sees. */
inline_ int64_t first_page(int64_t at, int64_t window) {
    return at < window ? 0 : (at - window + 1) / PAGE;
}

/* Attention of runs `first` to `last`. A run is up to RUN successive tokens of a sequence, so that
   its pages are read once for all of them: `counts` tokens from index `begins` of the step, at
   position `held` of the sequence. `query` [T, HEADS, HEAD_DIM] includes the softmax scale; `of`
   [slots, width] are the pages. */
inline_ void attend_runs(const float *query, const number *keys, const number *values,
                         const int64_t *of, int64_t width, const int64_t *begins,
                         const int64_t *counts, const int64_t *slots, const int64_t *held,
                         number *out, int64_t first, int64_t last, const limits_ *limits) {
    query_ queries[RUN * REP];
    for (int64_t run = first; run < last; run++)
        for (int head = 0; head < KV_HEADS; head++) {
            const int64_t begin = begins[run];
            const int64_t count = counts[run];
            const int64_t *pages = of + slots[run] * width;
            const int64_t begin_page = limits ? first_page(held[run], limits->window) : 0;
            const int num = (int)count * REP;
            for (int q = 0; q < num; q++) {
                query_ *one = queries + q;
                const int64_t row = (begin + q / REP) * HEADS + head * REP + q % REP;
                memcpy(one->query, query + row * HEAD_DIM, sizeof one->query);
                memset(one->mixed, 0, sizeof one->mixed);
                const int sinks = limits && limits->sinks;
                one->top = sinks ? limits->sinks[head * REP + q % REP] : LEAST;
                one->weight = sinks ? 1 : 0;
                one->visible = held[run] + q / REP + 1;
            }
            page_ next = page_of(keys, values, pages[begin_page], head);
            for (int64_t start = begin_page * PAGE; start < held[run] + count; start += PAGE) {
                const page_ page = next;
                if (start + PAGE < held[run] + count)
                    next = page_of(keys, values, pages[start / PAGE + 1], head);
                else if (head + 1 < KV_HEADS)
                    next = page_of(keys, values, pages[begin_page], head + 1);
                else if (run + 1 < last)
                    next = page_of(keys, values, of[slots[run + 1] * width], 0);
                int q = 0;
                for (; q + 4 <= num; q += 4)
                    attend_page(queries + q, 4, page, start, next, limits);
                for (; q + 2 <= num; q += 2)
                    attend_page(queries + q, 2, page, start, next, limits);
                for (; q < num; q++) attend_page(queries + q, 1, page, start, next, limits);
            }
            for (int q = 0; q < num; q++) {
                number *to = out + ((begin + q / REP) * HEADS + head * REP + q % REP) * HEAD_DIM;
                for (int d = 0; d < HEAD_DIM; d++)
                    to[d] = rounded(queries[q].mixed[d] / queries[q].weight);
            }
        }
}

void attend(const float *query, const number *keys, const number *values, const int64_t *of,
            int64_t width, const int64_t *begins, const int64_t *counts, const int64_t *slots,
            const int64_t *held, number *out, int64_t first, int64_t last) {
    attend_runs(query, keys, values, of, width, begins, counts, slots, held, out, first, last,
                NULL);
}

/* `attend` for layers that depart from full attention; see `limits_`. */
void attend_limited(const float *query, const number *keys, const number *values, const int64_t *of,
                    int64_t width, const int64_t *begins, const int64_t *counts,
                    const int64_t *slots, const int64_t *held, number *out, int64_t window,
                    float cap, const float *sinks, int64_t first, int64_t last) {
    const limits_ limits = {window, cap, sinks};
    attend_runs(query, keys, values, of, width, begins, counts, slots, held, out, first, last,
                &limits);
}

/* Scale queries [count, HEADS, HEAD_DIM] into `scaled`, and write keys and values
   [count, KV_HEADS, HEAD_DIM] to the cache; `cells` are page * PAGE + offset. */
void place(const number *query, const number *key, const number *value, const int64_t *cells,
           float scale, float *scaled, number *keys, number *values, int64_t count) {
    for (int64_t at = 0; at < count * HEADS * HEAD_DIM; at++)
        scaled[at] = widened(query[at]) * scale;
    for (int64_t token = 0; token < count; token++)
        for (int head = 0; head < KV_HEADS; head++) {
            const int64_t page = cells[token] / PAGE * KV_HEADS + head;
            const int64_t offset = cells[token] % PAGE;
            const number *from = key + (token * KV_HEADS + head) * HEAD_DIM;
            number *to = keys + page * HEAD_DIM * PAGE + offset;
            for (int d = 0; d < HEAD_DIM; d++) to[d * PAGE] = from[d];
            memcpy(values + (page * PAGE + offset) * HEAD_DIM,
                   value + (token * KV_HEADS + head) * HEAD_DIM, HEAD_DIM * sizeof *value);
        }
}

/* Normalise and rotate queries and keys, and write keys and values to the cache. `qkv` is
   [count, HEADS + 2 KV_HEADS, HEAD_DIM], `norm` [HEADS + KV_HEADS, HEAD_DIM], `rotations`
   [positions, HEAD_DIM / 2] complex; `cells` are page * PAGE + offset. */
void turn(const number *qkv, const float *norm, const float *rotations, const int64_t *positions,
          const int64_t *cells, float *query, number *keys, number *values, int64_t count,
          float eps) {
    for (int64_t token = 0; token < count; token++, qkv += (HEADS + 2 * KV_HEADS) * HEAD_DIM) {
        const float *angle = rotations + positions[token] * HEAD_DIM;
        const int64_t page = cells[token] / PAGE;
        const int64_t place = cells[token] % PAGE;
        for (int head = 0; head < HEADS + KV_HEADS; head++) {
            const float scale = root(qkv + head * HEAD_DIM, HEAD_DIM, eps);
            float x[HEAD_DIM], turned[HEAD_DIM];
            for (int d = 0; d < HEAD_DIM; d++)
                x[d] = widened(qkv[head * HEAD_DIM + d]) * scale * norm[head * HEAD_DIM + d];
            for (int d = 0; d < HEAD_DIM; d += 2) {
                turned[d] = x[d] * angle[d] - x[d + 1] * angle[d + 1];
                turned[d + 1] = x[d] * angle[d + 1] + x[d + 1] * angle[d];
            }
            if (head < HEADS) {
                for (int d = 0; d < HEAD_DIM; d++)
                    query[(token * HEADS + head) * HEAD_DIM + d] = widened(rounded(turned[d]));
            } else {
                number *key = keys + (page * KV_HEADS + head - HEADS) * HEAD_DIM * PAGE + place;
                for (int d = 0; d < HEAD_DIM; d++) key[d * PAGE] = rounded(turned[d]);
            }
        }
        for (int head = 0; head < KV_HEADS; head++)
            memcpy(values + ((page * KV_HEADS + head) * PAGE + place) * HEAD_DIM,
                   qkv + (HEADS + KV_HEADS + head) * HEAD_DIM, HEAD_DIM * sizeof *qkv);
    }
}

/* Add `more` to x and write the RMS norm of the sum; all are [count, hidden]. */
void norm(number *x, const number *more, const number *weight, number *out, int64_t count,
          int64_t hidden, float eps) {
    for (int64_t token = 0; token < count; token++, x += hidden, out += hidden) {
        for (int64_t d = 0; d < hidden; d++)
            x[d] = rounded(widened(x[d]) + widened(more[token * hidden + d]));
        const float scale = root(x, hidden, eps);
        for (int64_t d = 0; d < hidden; d++)
            out[d] = rounded(widened(rounded(widened(x[d]) * scale)) * widened(weight[d]));
    }
}

/* silu(gate) * up, for `both` [count, 2 * inner] with the gate first. */
void gated(const number *both, number *out, int64_t count, int64_t inner) {
    for (int64_t token = 0; token < count; token++, both += 2 * inner, out += inner) {
        int64_t d = 0;
        for (; d + LANES <= inner; d += LANES) {
            const floats gate = loaded(both + d), up = loaded(both + inner + d);
            const floats small = exponential(either(gate < 0, gate, -gate));
            stored(out + d, gate * either(gate < 0, small, all(1)) / (1 + small) * up);
        }
        for (; d < inner; d++) {
            const float gate = widened(both[d]);
            out[d] = rounded(gate / (1 + expf(-gate)) * widened(both[inner + d]));
        }
    }
}

/* Group the `pairs` of tokens and chosen experts by expert. Write the pairs to `order`, in which
   those of an expert begin at `begins` [experts + 1]. */
void grouped(const int64_t *chosen, int64_t pairs, int64_t experts, int64_t *begins,
             int64_t *order) {
    for (int64_t expert = 0; expert <= experts; expert++) begins[expert] = 0;
    for (int64_t pair = 0; pair < pairs; pair++) begins[chosen[pair] + 1]++;
    for (int64_t expert = 0; expert < experts; expert++) begins[expert + 1] += begins[expert];
    for (int64_t pair = 0; pair < pairs; pair++) order[begins[chosen[pair]]++] = pair;
    for (int64_t expert = experts; expert > 0; expert--) begins[expert] = begins[expert - 1];
    begins[0] = 0;
}

/* A vector that fits into a register. Compilers keep sums of wider ones in memory. */
#if LANES == 16 && !defined(__AVX512F__)
#define PART 8
#else
#define PART LANES
#endif
typedef float part_ __attribute__((vector_size(4 * PART)));
typedef int32_t bits_ __attribute__((vector_size(4 * PART)));

inline_ part_ loaded_part(const number *at) {
#ifdef BFLOAT16
    typedef uint16_t packed_ __attribute__((vector_size(2 * PART)));
    packed_ packed;
    memcpy(&packed, at, sizeof packed);
    return (part_)(__builtin_convertvector(packed, bits_) << 16);
#else
    part_ value;
    memcpy(&value, at, sizeof value);
    return value;
#endif
}

/* Multiply `width` rows [depth] by a weight [depth, LANES]. Each row's result is rounded to the
   model's precision and written `stride` after that of the row before. */
inline_ void multiply(const float *rows, int width, const number *weight, int64_t depth, float *out,
                      int64_t stride) {
    part_ sums[MOST][LANES / PART];
    for (int row = 0; row < width; row++)
        for (int part = 0; part < LANES / PART; part++) sums[row][part] = (part_){0};
    for (int64_t d = 0; d < depth; d++, weight += LANES) {
        part_ column[LANES / PART];
        for (int part = 0; part < LANES / PART; part++)
            column[part] = loaded_part(weight + part * PART);
        for (int row = 0; row < width; row++)
            for (int part = 0; part < LANES / PART; part++)
                sums[row][part] += rows[row * depth + d] * column[part];
    }
    for (int row = 0; row < width; row++)
        for (int lane = 0; lane < LANES; lane++)
            out[row * stride + lane] = widened(rounded(sums[row][lane / PART][lane % PART]));
}

/* Multiply `count` rows [depth] by a weight [width / LANES, depth, LANES]: out is [count, width]. */
inline_ void products(const float *rows, int64_t count, const number *weight, int64_t depth,
                      int64_t width, float *out) {
    for (int64_t at = 0; at < width; at += LANES, weight += depth * LANES, out += LANES) {
        int64_t row = 0;
        for (; row + MOST <= count; row += MOST)
            multiply(rows + row * depth, MOST, weight, depth, out + row * width, width);
        for (; row < count; row++)
            multiply(rows + row * depth, 1, weight, depth, out + row * width, width);
    }
}

/* Compute the experts `first` to `last` for their pairs, whose places are those of `grouped`.
   `rows` are the tokens [count, hidden], of which each has `choices` pairs. `gate_up` is
   [experts, 2 * inner / LANES, hidden, LANES], `down` [experts, wide / LANES, inner, LANES]. `input`
   [pairs, hidden], `both` [pairs, 2 * inner] and `output` [pairs, wide] are in the order of
   `order`. */
void experts(const number *rows, const number *gate_up, const number *down, const int64_t *begins,
             const int64_t *order, int64_t choices, int64_t hidden, int64_t inner, int64_t wide,
             float *input, float *both, float *output, int64_t first, int64_t last) {
    for (int64_t expert = first; expert < last; expert++) {
        const int64_t begin = begins[expert], count = begins[expert + 1] - begin;
        float *from = input + begin * hidden, *middle = both + begin * 2 * inner;
        for (int64_t pair = 0; pair < count; pair++)
            for (int64_t d = 0; d < hidden; d++)
                from[pair * hidden + d] =
                    widened(rows[order[begin + pair] / choices * hidden + d]);
        products(from, count, gate_up + expert * 2 * inner * hidden, hidden, 2 * inner, middle);
        /* The products of gate and up are read before the rows of `gated` overwrite them. */
        for (int64_t pair = 0; pair < count; pair++)
            for (int64_t d = 0; d < inner; d += LANES) {
                floats gate, up;
                memcpy(&gate, middle + pair * 2 * inner + d, sizeof gate);
                memcpy(&up, middle + pair * 2 * inner + inner + d, sizeof up);
                const floats small = exponential(either(gate < 0, gate, -gate));
                number result[LANES];
                stored(result, gate * either(gate < 0, small, all(1)) / (1 + small) * up);
                const floats value = loaded(result);
                memcpy(middle + pair * inner + d, &value, sizeof value);
            }
        products(middle, count, down + expert * wide * inner, inner, wide, output + begin * wide);
    }
}

/* Write each token's sum of outputs [wide] of its `choices` pairs, times their `weights`, to `out`
   [count, hidden]. */
void summed(const float *output, const float *weights, const int64_t *order, int64_t pairs,
            int64_t choices, int64_t hidden, int64_t wide, int64_t *place, number *out) {
    for (int64_t at = 0; at < pairs; at++) place[order[at]] = at;
    for (int64_t token = 0; token * choices < pairs; token++)
        for (int64_t d = 0; d < hidden; d++) {
            float sum = 0;
            for (int64_t pair = token * choices; pair < (token + 1) * choices; pair++)
                sum += weights[pair] * output[place[pair] * wide + d];
            out[token * hidden + d] = rounded(sum);
        }
}
