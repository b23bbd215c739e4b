/* The parts of a decoding step between its matrix products, compiled on the machine that runs it.

   Macros set by the caller: HEADS, KV_HEADS, HEAD_DIM, PAGE, RUN, LANES (divides HEAD_DIM and
   PAGE), and BFLOAT16 if the model is bfloat16. Sums are always float32. `number` is the model's
   type. The cache is paged: keys are [page, KV_HEADS, HEAD_DIM, PAGE], values are
   [page, KV_HEADS, PAGE, HEAD_DIM]. */

#include "vectors.h"

#define REP (HEADS / KV_HEADS)
#define MOST 4 /* queries that are computed together */

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

/* Read `count` numbers into the cache. */
inline_ void prefetch(const number *from, int count) {
    for (int byte = 0; byte < count * (int)sizeof *from; byte += 64)
        __builtin_prefetch((const char *)from + byte);
}

/* Scores of `width` queries with `parts` vectors of keys of a page, from token `at` on. */
inline_ void score(const query_ *queries, int width, const number *keys, const number *next, int at,
                   int parts, float scores[MOST][PAGE]) {
    floats sums[MOST][SUMS];
    for (int q = 0; q < width; q++)
        for (int part = 0; part < parts; part++) sums[q][part] = all(0);
    for (int d = 0; d < HEAD_DIM; d++) {
        floats key[SUMS];
        prefetch(next + d * PAGE + at, parts * LANES);
        for (int part = 0; part < parts; part++)
            key[part] = loaded(keys + d * PAGE + at + part * LANES);
        for (int q = 0; q < width; q++)
            for (int part = 0; part < parts; part++)
                sums[q][part] += key[part] * queries[q].query[d];
    }
    for (int q = 0; q < width; q++)
        for (int part = 0; part < parts; part++)
            memcpy(scores[q] + at + part * LANES, &sums[q][part], sizeof sums[q][part]);
}

/* Add the first `count` values of a page, by weight, to `parts` vectors of the results from `d`. */
inline_ void mix(query_ *queries, int width, const number *values, const number *next, int count,
                 int d, int parts, float weights[MOST][PAGE]) {
    floats sums[MOST][SUMS];
    for (int q = 0; q < width; q++)
        for (int part = 0; part < parts; part++)
            memcpy(&sums[q][part], queries[q].mixed + d + part * LANES, sizeof sums[q][part]);
    for (int token = 0; token < count; token++) {
        floats value[SUMS];
        prefetch(next + token * HEAD_DIM + d, parts * LANES);
        for (int part = 0; part < parts; part++)
            value[part] = loaded(values + token * HEAD_DIM + d + part * LANES);
        for (int q = 0; q < width; q++)
            for (int part = 0; part < parts; part++)
                sums[q][part] += value[part] * weights[q][token];
    }
    for (int q = 0; q < width; q++)
        for (int part = 0; part < parts; part++)
            memcpy(queries[q].mixed + d + part * LANES, &sums[q][part], sizeof sums[q][part]);
}

/* Attend with `width` queries over a page whose first token has position `start`. Prefetches the
   page `next`. `limits` is NULL for full attention. */
inline_ void attend_page(query_ *queries, int width, page_ page, int64_t start, page_ next,
                         const limits_ *limits) {
    const int parts = SUMS / width;
    float scores[MOST][PAGE] __attribute__((aligned(64)));
    int at = 0;
    for (; at + parts * LANES <= PAGE; at += parts * LANES)
        score(queries, width, page.keys, next.keys, at, parts, scores);
    for (; at < PAGE; at += LANES) score(queries, width, page.keys, next.keys, at, 1, scores);
    int most = 0;
    ints place;
    for (int lane = 0; lane < LANES; lane++) place[lane] = lane;
    for (int q = 0; q < width; q++) {
        int64_t left = queries[q].visible - start;
        int seen = left < 0 ? 0 : left < PAGE ? (int)left : PAGE;
        most = seen > most ? seen : most;
        int hidden = 0;
        if (limits) {
            const int64_t before = left - limits->window;
            hidden = before < 0 ? 0 : before < PAGE ? (int)before : PAGE;
        }
        floats tops = all(LEAST);
        for (int part = 0; part < PAGE / LANES; part++) {
            floats score;
            memcpy(&score, scores[q] + part * LANES, sizeof score);
            if (limits && limits->cap > 0) score = tangent(score / limits->cap) * limits->cap;
            if (seen < PAGE || hidden) {
                const ints here = place + part * LANES;
                score = either((here < seen) & (here >= hidden), score, all(2 * LEAST));
            }
            memcpy(scores[q] + part * LANES, &score, sizeof score);
            tops = either(tops > score, tops, score);
        }
        float top = highest(tops);
        top = top > queries[q].top ? top : queries[q].top;
        const float before = exponential(all(queries[q].top - top))[0];
        floats sums = all(0);
        for (int part = 0; part < PAGE / LANES; part++) {
            floats weight;
            memcpy(&weight, scores[q] + part * LANES, sizeof weight);
            weight = exponential(weight - top);
            sums += weight;
            memcpy(scores[q] + part * LANES, &weight, sizeof weight);
        }
        queries[q].top = top;
        queries[q].weight = queries[q].weight * before + total(sums);
        for (int d = 0; d < HEAD_DIM; d++) queries[q].mixed[d] *= before;
    }
    int d = 0;
    for (; d + parts * LANES <= HEAD_DIM; d += parts * LANES)
        mix(queries, width, page.values, next.values, most, d, parts, scores);
    for (; d < HEAD_DIM; d += LANES) mix(queries, width, page.values, next.values, most, d, 1, scores);
}

inline_ page_ page_of(const number *keys, const number *values, int64_t page, int head) {
    const int64_t at = (page * KV_HEADS + head) * HEAD_DIM * PAGE;
    return (page_){keys + at, values + at};
}

/* The page of the first token that a query at position `at` sees. */
inline_ int64_t first_page(int64_t at, int64_t window) {
    return at < window ? 0 : (at - window + 1) / PAGE;
}

/* The runs of a step. A run is up to RUN successive tokens of a sequence, so that its pages are read
   once for all of them: `counts` tokens from index `begins` of the step, at position `held` of the
   sequence. `of` [slots, width] are the pages. */
typedef struct {
    const int64_t *of;
    int64_t width;
    const int64_t *begins, *counts, *slots, *held;
} runs_;

inline_ int64_t page_at(const runs_ *runs, int64_t run, int64_t index) {
    return runs->of[runs->slots[run] * runs->width + index];
}

/* Return the page with this index if the run attends it, else -1. */
inline_ int64_t attended(const runs_ *runs, int64_t run, int64_t index, const limits_ *limits) {
    if (index * PAGE >= runs->held[run] + runs->counts[run]) return -1;
    if (limits && index < first_page(runs->held[run], limits->window)) return -1;
    return page_at(runs, run, index);
}

/* Successive runs with at most RUN tokens together. */
typedef struct {
    const runs_ *runs;
    int64_t first, last;
    int64_t begin, end; /* the pages that any of them attends, by index */
    const limits_ *limits;
} group_;

/* A page, and the runs that attend it. It is `num` queries from `query` on. */
typedef struct {
    int head;
    int64_t index, page, next_run;
    int query, num;
} shared_;

/* Return the next page of a group, or its first page of the next head. Runs that have the same page
   at the same place attend it together. */
inline_ shared_ following(const group_ *group, shared_ now) {
    now.query += now.num;
    while (1) {
        if (now.next_run == group->last) {
            now.next_run = group->first;
            now.query = 0;
            if (++now.index >= group->end) {
                now.index = group->begin;
                now.head++;
            }
        }
        now.num = 0;
        now.page = attended(group->runs, now.next_run, now.index, group->limits);
        do now.num += group->runs->counts[now.next_run++] * REP;
        while (now.next_run < group->last &&
               attended(group->runs, now.next_run, now.index, group->limits) == now.page);
        if (now.page >= 0) return now;
        now.query += now.num;
    }
}

inline_ void begin_queries(query_ *queries, const float *query, const group_ *group, int head) {
    const limits_ *limits = group->limits;
    const runs_ *runs = group->runs;
    for (int64_t run = group->first; run < group->last; run++)
        for (int q = 0; q < runs->counts[run] * REP; q++, queries++) {
            const int64_t row = (runs->begins[run] + q / REP) * HEADS + head * REP + q % REP;
            memcpy(queries->query, query + row * HEAD_DIM, sizeof queries->query);
            memset(queries->mixed, 0, sizeof queries->mixed);
            const int sinks = limits && limits->sinks;
            queries->top = sinks ? limits->sinks[head * REP + q % REP] : LEAST;
            queries->weight = sinks ? 1 : 0;
            queries->visible = runs->held[run] + q / REP + 1;
        }
}

inline_ void end_queries(const query_ *queries, number *out, const group_ *group, int head) {
    const runs_ *runs = group->runs;
    for (int64_t run = group->first; run < group->last; run++)
        for (int q = 0; q < runs->counts[run] * REP; q++, queries++) {
            const int64_t row = (runs->begins[run] + q / REP) * HEADS + head * REP + q % REP;
            for (int d = 0; d < HEAD_DIM; d++)
                out[row * HEAD_DIM + d] = rounded(queries->mixed[d] / queries->weight);
        }
}

inline_ void attend_group(const float *query, const number *keys, const number *values, number *out,
                          group_ group) {
    const limits_ *limits = group.limits;
    const runs_ *runs = group.runs;
    group.begin = INT64_MAX;
    group.end = 0;
    for (int64_t run = group.first; run < group.last; run++) {
        const int64_t end = (runs->held[run] + runs->counts[run] + PAGE - 1) / PAGE;
        const int64_t begin = limits ? first_page(runs->held[run], limits->window) : 0;
        group.begin = begin < group.begin ? begin : group.begin;
        group.end = end > group.end ? end : group.end;
    }
    query_ queries[RUN * REP];
    shared_ next = following(&group, (shared_){0, group.begin - 1, -1, group.last, 0, 0});
    for (int head = 0; head < KV_HEADS; head++) {
        begin_queries(queries, query, &group, head);
        while (next.head == head) {
            const shared_ now = next;
            next = following(&group, now);
            const int64_t start = now.index * PAGE;
            const page_ page = page_of(keys, values, now.page, head);
            page_ ahead = page_of(keys, values, next.page, next.head < KV_HEADS ? next.head : 0);
            query_ *one = queries + now.query, *end = one + now.num;
            for (; one + 4 <= end; one += 4, ahead = page)
                attend_page(one, 4, page, start, ahead, limits);
            for (; one + 2 <= end; one += 2, ahead = page)
                attend_page(one, 2, page, start, ahead, limits);
            for (; one < end; one++, ahead = page)
                attend_page(one, 1, page, start, ahead, limits);
        }
        end_queries(queries, out, &group, head);
    }
}

/* Attention of runs `first` to `last`. `query` [T, HEADS, HEAD_DIM] includes the softmax scale.
   Successive runs with the same first page form a group. */
inline_ void attend_runs(const float *query, const number *keys, const number *values,
                         const runs_ *runs, number *out, int64_t first, int64_t last,
                         const limits_ *limits) {
    for (int64_t run = first, next; run < last; run = next) {
        int64_t tokens = runs->counts[run];
        for (next = run + 1; next < last; next++) {
            tokens += runs->counts[next];
            if (tokens > RUN || page_at(runs, next, 0) != page_at(runs, run, 0)) break;
        }
        attend_group(query, keys, values, out, (group_){runs, run, next, 0, 0, limits});
    }
}

void attend(const float *query, const number *keys, const number *values, const int64_t *of,
            int64_t width, const int64_t *begins, const int64_t *counts, const int64_t *slots,
            const int64_t *held, number *out, int64_t first, int64_t last) {
    const runs_ runs = {of, width, begins, counts, slots, held};
    attend_runs(query, keys, values, &runs, out, first, last, NULL);
}

/* `attend` for layers that depart from full attention; see `limits_`. */
void attend_limited(const float *query, const number *keys, const number *values, const int64_t *of,
                    int64_t width, const int64_t *begins, const int64_t *counts,
                    const int64_t *slots, const int64_t *held, number *out, int64_t window,
                    float cap, const float *sinks, int64_t first, int64_t last) {
    const limits_ limits = {window, cap, sinks};
    const runs_ runs = {of, width, begins, counts, slots, held};
    attend_runs(query, keys, values, &runs, out, first, last, &limits);
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
#if WIDE == 16 && !defined(__AVX512F__)
#define PART 8
#else
#define PART WIDE
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

/* Multiply `width` rows [depth] by a weight [depth, WIDE]. Each row's result is rounded to the
   model's precision and written `stride` after that of the row before. */
inline_ void multiply(const float *rows, int width, const number *weight, int64_t depth, float *out,
                      int64_t stride) {
    part_ sums[MOST][WIDE / PART];
    for (int row = 0; row < width; row++)
        for (int part = 0; part < WIDE / PART; part++) sums[row][part] = (part_){0};
    for (int64_t d = 0; d < depth; d++, weight += WIDE) {
        part_ column[WIDE / PART];
        for (int part = 0; part < WIDE / PART; part++)
            column[part] = loaded_part(weight + part * PART);
        for (int row = 0; row < width; row++)
            for (int part = 0; part < WIDE / PART; part++)
                sums[row][part] += rows[row * depth + d] * column[part];
    }
    for (int row = 0; row < width; row++)
        for (int lane = 0; lane < WIDE; lane++)
            out[row * stride + lane] = widened(rounded(sums[row][lane / PART][lane % PART]));
}

/* Multiply `count` rows [depth] by a weight [width / WIDE, depth, WIDE]: out is [count, width]. */
inline_ void products(const float *rows, int64_t count, const number *weight, int64_t depth,
                      int64_t width, float *out) {
    for (int64_t at = 0; at < width; at += WIDE, weight += depth * WIDE, out += WIDE) {
        int64_t row = 0;
        for (; row + MOST <= count; row += MOST)
            multiply(rows + row * depth, MOST, weight, depth, out + row * width, width);
        for (; row < count; row++)
            multiply(rows + row * depth, 1, weight, depth, out + row * width, width);
    }
}

/* Compute the experts `first` to `last` for their pairs, whose places are those of `grouped`.
   `rows` are the tokens [count, hidden], of which each has `choices` pairs. `gate_up` is
   [experts, 2 * inner / WIDE, hidden, WIDE], `down` [experts, wide / WIDE, inner, WIDE]. `input`
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
