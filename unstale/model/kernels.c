/* The parts of a decoder layer between its matrix products, forward and backward, in float32.

   Compiled on the machine that runs it. A value of a token does not depend on the other rows of a
   call, nor on the number of threads. Matrices are row by row; `stride` is the distance between
   two rows where it is not the number of columns. All widths are multiples of WIDE. */

#include "pieces.h"

#define ROWS 64 /* rows of one piece of work */
#define BLOCK 64 /* queries, and keys, of one block of attention */
#define GROUP 16 /* queries that are multiplied together */

/* 1 / (1 + e^-x) */
inline_ floats sigmoid(floats x) {
    const ints negative = x < 0;
    const floats small = exponential((floats)((ints)x | INT32_MIN)); /* e^-|x| */
    const floats share = 1.0f / (1.0f + small);
    return either(negative, small * share, share);
}

/* Root-mean-square normalization. */

typedef struct {
    const float *x, *weight, *grad;
    float *out, *roots, *sums;
    int64_t rows, width;
    float eps;
} norm_t;

inline_ float inverse_root(const float *x, int64_t width, float eps) {
    floats squares = all(0);
    for (int64_t at = 0; at < width; at += LANES) squares += loaded(x + at) * loaded(x + at);
    return 1.0f / sqrtf(total(squares) / width + eps);
}

static void norm_piece(const void *task, int64_t piece) {
    const norm_t *t = task;
    const int64_t width = t->width, end = least((piece + 1) * ROWS, t->rows);
    for (int64_t row = piece * ROWS; row < end; row++) {
        const float *x = t->x + row * width;
        float *out = t->out + row * width;
        const floats root = all(t->roots[row] = inverse_root(x, width, t->eps));
        for (int64_t at = 0; at < width; at += LANES)
            stored(out + at, loaded(x + at) * root * loaded(t->weight + at));
    }
}

/* out = x / root mean square of x * weight, and `roots` [rows] the inverse roots. */
void norm(parallel_t parallel, int64_t num, const float *x, const float *weight, float eps,
          float *out, float *roots, int64_t rows, int64_t width) {
    const threads_t threads = {parallel, num};
    const norm_t task = {.x = x, .weight = weight, .out = out, .roots = roots, .rows = rows,
                         .width = width, .eps = eps};
    divide(&threads, (rows + ROWS - 1) / ROWS, norm_piece, &task);
}

/* Add the gradient of the weight to `sums`. Return the factor of x in that of x. `root` is the
   inverse root of x, and `grad` the gradient of the result. */
inline_ float norm_gradient(const float *x, const float *grad, const float *weight, float root,
                            float *sums, int64_t width) {
    floats along = all(0);
    for (int64_t at = 0; at < width; at += LANES) {
        const floats part = loaded(grad + at) * loaded(x + at);
        along += part * loaded(weight + at);
        stored(sums + at, loaded(sums + at) + part * root);
    }
    return total(along) * root * root * root / width;
}

static void norm_backward_piece(const void *task, int64_t piece) {
    const norm_t *t = task;
    const int64_t width = t->width, end = least((piece + 1) * ROWS, t->rows);
    float *sums = t->sums + piece * width;
    memset(sums, 0, width * sizeof *sums);
    for (int64_t row = piece * ROWS; row < end; row++) {
        const float *x = t->x + row * width, *grad = t->grad + row * width;
        float *out = t->out + row * width;
        const float root = t->roots[row];
        const float back = norm_gradient(x, grad, t->weight, root, sums, width);
        for (int64_t at = 0; at < width; at += LANES)
            stored(out + at, loaded(grad + at) * loaded(t->weight + at) * root
                                 - loaded(x + at) * back);
    }
}

/* out = the gradient for x. `sums` [pieces, width] are the parts of the weight's. */
void norm_backward(parallel_t parallel, int64_t num, const float *x, const float *weight,
                   const float *roots, const float *grad, float *out, float *sums, int64_t rows,
                   int64_t width) {
    const threads_t threads = {parallel, num};
    const norm_t task = {.x = x, .weight = weight, .grad = grad, .out = out,
                         .roots = (float *)roots, .sums = sums, .rows = rows, .width = width};
    divide(&threads, (rows + ROWS - 1) / ROWS, norm_backward_piece, &task);
}

/* Heads: optional normalization of each head, then rotary positions. */

typedef struct {
    const float *x, *weight, *cosine, *sine, *grad;
    float *out, *roots, *sums;
    int64_t rows, heads, width, stride;
    float eps;
} heads_t;

static void heads_piece(const void *task, int64_t piece) {
    const heads_t *t = task;
    const int64_t width = t->width, half = width / 2;
    const int64_t end = least((piece + 1) * ROWS, t->rows);
    float y[width];
    for (int64_t row = piece * ROWS; row < end; row++) {
        const float *c = t->cosine + row * width, *s = t->sine + row * width;
        for (int64_t head = 0; head < t->heads; head++) {
            const float *x = t->x + row * t->stride + head * width;
            float *out = t->out + (row * t->heads + head) * width;
            if (t->weight) {
                const float root = inverse_root(x, width, t->eps);
                t->roots[row * t->heads + head] = root;
                for (int64_t d = 0; d < width; d++) y[d] = x[d] * root * t->weight[d];
                x = y;
            }
            for (int64_t d = 0; d < half; d++) {
                out[d] = x[d] * c[d] - x[d + half] * s[d];
                out[d + half] = x[d + half] * c[d + half] + x[d] * s[d + half];
            }
        }
    }
}

/* x is [rows, heads, width] with `stride`, out is contiguous. `weight` may be null. */
void heads(parallel_t parallel, int64_t num, const float *x, int64_t stride, const float *weight,
           float eps, const float *cosine, const float *sine, float *out, float *roots,
           int64_t rows, int64_t count, int64_t width) {
    const threads_t threads = {parallel, num};
    const heads_t task = {.x = x, .weight = weight, .cosine = cosine, .sine = sine, .out = out,
                          .roots = roots, .rows = rows, .heads = count, .width = width,
                          .stride = stride, .eps = eps};
    divide(&threads, (rows + ROWS - 1) / ROWS, heads_piece, &task);
}

static void heads_backward_piece(const void *task, int64_t piece) {
    const heads_t *t = task;
    const int64_t width = t->width, half = width / 2;
    const int64_t end = least((piece + 1) * ROWS, t->rows);
    float *sums = t->sums + piece * width;
    float y[width];
    if (t->weight) memset(sums, 0, width * sizeof *sums);
    for (int64_t row = piece * ROWS; row < end; row++) {
        const float *c = t->cosine + row * width, *s = t->sine + row * width;
        for (int64_t head = 0; head < t->heads; head++) {
            const float *x = t->x + row * t->stride + head * width;
            const float *grad = t->grad + (row * t->heads + head) * width;
            float *out = t->out + row * t->stride + head * width;
            float *to = t->weight ? y : out;
            for (int64_t d = 0; d < half; d++) {
                to[d] = grad[d] * c[d] + grad[d + half] * s[d + half];
                to[d + half] = grad[d + half] * c[d + half] - grad[d] * s[d];
            }
            if (!t->weight) continue;
            const float root = t->roots[row * t->heads + head];
            const float back = norm_gradient(x, y, t->weight, root, sums, width);
            for (int64_t d = 0; d < width; d++)
                out[d] = y[d] * t->weight[d] * root - x[d] * back;
        }
    }
}

void heads_backward(parallel_t parallel, int64_t num, const float *x, int64_t stride,
                    const float *weight, const float *cosine, const float *sine,
                    const float *roots, const float *grad, float *out, float *sums, int64_t rows,
                    int64_t count, int64_t width) {
    const threads_t threads = {parallel, num};
    const heads_t task = {.x = x, .weight = weight, .cosine = cosine, .sine = sine, .grad = grad,
                          .out = out, .roots = (float *)roots, .sums = sums, .rows = rows,
                          .heads = count, .width = width, .stride = stride};
    divide(&threads, (rows + ROWS - 1) / ROWS, heads_backward_piece, &task);
}

/* SwiGLU: `both` [rows, 2 * width] has gate and up side by side. */

typedef struct {
    const float *both, *grad;
    float *out, *to;
    int64_t rows, width;
} swiglu_t;

static void swiglu_piece(const void *task, int64_t piece) {
    const swiglu_t *t = task;
    const int64_t width = t->width, end = least((piece + 1) * ROWS, t->rows);
    for (int64_t row = piece * ROWS; row < end; row++) {
        const float *gate = t->both + row * 2 * width, *up = gate + width;
        for (int64_t at = 0; at < width; at += LANES) {
            const floats g = loaded(gate + at);
            stored(t->out + row * width + at, g * sigmoid(g) * loaded(up + at));
        }
    }
}

/* out = silu(gate) * up */
void swiglu(parallel_t parallel, int64_t num, const float *both, float *out, int64_t rows,
            int64_t width) {
    const threads_t threads = {parallel, num};
    const swiglu_t task = {.both = both, .out = out, .rows = rows, .width = width};
    divide(&threads, (rows + ROWS - 1) / ROWS, swiglu_piece, &task);
}

static void swiglu_backward_piece(const void *task, int64_t piece) {
    const swiglu_t *t = task;
    const int64_t width = t->width, end = least((piece + 1) * ROWS, t->rows);
    for (int64_t row = piece * ROWS; row < end; row++) {
        const float *gate = t->both + row * 2 * width, *up = gate + width;
        const float *grad = t->grad + row * width;
        float *to = t->to + row * 2 * width;
        for (int64_t at = 0; at < width; at += LANES) {
            const floats g = loaded(gate + at), u = loaded(up + at), back = loaded(grad + at);
            const floats share = sigmoid(g), silu = g * share;
            stored(t->out + row * width + at, silu * u);
            stored(to + width + at, back * silu);
            stored(to + at, back * u * (share + silu * (1.0f - share)));
        }
    }
}

/* `out` gets the output again, and `to` the gradient for `both`. */
void swiglu_backward(parallel_t parallel, int64_t num, const float *both, const float *grad,
                     float *out, float *to, int64_t rows, int64_t width) {
    const threads_t threads = {parallel, num};
    const swiglu_t task = {.both = both, .grad = grad, .out = out, .to = to, .rows = rows,
                           .width = width};
    divide(&threads, (rows + ROWS - 1) / ROWS, swiglu_backward_piece, &task);
}

/* Attention over a prefix tree.

   Segment i has the tokens [start, end), at depth `depth` in its sequences, and its keys are the
   tokens [start, end) of its own and of the segments before it, found by `parent` (-1 at a root).
   A query's keys are divided into blocks by their position in the sequence, so the result does not
   depend on how sequences are divided into segments. */

typedef struct {
    int64_t start, end, depth, parent;
} segment_t;

typedef struct {
    const float *query, *key, *value, *out, *lse, *grad;
    float *to, *to_lse, *to_query, *to_key, *to_value;
    const segment_t *segments;
    const int64_t *pieces; /* [count, 2]: segment and first position of each block of queries */
    const int64_t *roots; /* [num + 1]: the first piece of each root */
    int64_t heads, kv_heads, width, value_stride;
    float scale;
} attention_t;

/* C [m, n] = or += A [m, k] B [k, n], where m is a multiple of 4, n of WIDE. A has any strides. */
inline_ void multiply(int64_t m, int64_t n, int64_t k, const float *a, int64_t row, int64_t column,
                      const float *b, int64_t b_stride, float *c, int64_t c_stride, int add) {
    for (int64_t i = 0; i < m; i += 4)
        for (int64_t j = 0; j < n; j += WIDE) {
            floats sums[4][WIDE / LANES];
            float *to = c + i * c_stride + j;
            for (int r = 0; r < 4; r++)
                for (int v = 0; v < WIDE / LANES; v++)
                    sums[r][v] = add ? loaded(to + r * c_stride + v * LANES) : all(0);
            const float *from = a + i * row, *right = b + j;
            for (int64_t p = 0; p < k; p++, from += column, right += b_stride)
                for (int v = 0; v < WIDE / LANES; v++) {
                    floats part = loaded(right + v * LANES);
                    keep_in_register(part);
                    for (int r = 0; r < 4; r++) sums[r][v] += from[r * row] * part;
                }
            for (int r = 0; r < 4; r++)
                for (int v = 0; v < WIDE / LANES; v++)
                    stored(to + r * c_stride + v * LANES, sums[r][v]);
        }
}

/* Write the tokens of positions [0, length) of a segment's sequences. */
static void write_tokens(const attention_t *t, int64_t segment, int64_t length, int64_t *tokens) {
    for (int64_t i = segment; i >= 0; i = t->segments[i].parent) {
        const segment_t *s = t->segments + i;
        const int64_t count = least(s->end - s->start, length - s->depth);
        for (int64_t at = 0; at < count; at++) tokens[s->depth + at] = s->start + at;
    }
}

/* Copy rows of some tokens, and zeros up to BLOCK rows. */
inline_ void gather(const float *from, int64_t stride, int64_t width, const int64_t *tokens,
                    int64_t count, float *to) {
    for (int64_t i = 0; i < count; i++)
        memcpy(to + i * width, from + tokens[i] * stride, width * sizeof *to);
    memset(to + count * width, 0, (BLOCK - count) * width * sizeof *to);
}

inline_ void transpose(const float *from, int64_t width, float *to) {
    for (int64_t d = 0; d < width; d++)
        for (int64_t i = 0; i < BLOCK; i++) to[d * BLOCK + i] = from[i * width + d];
}

/* Block of queries: positions [first, first + count) of a segment's sequences. */
typedef struct {
    int64_t segment, first, count, length;
} queries_t;

/* Return how many keys of the block at `low` query i sees, rounded up to a multiple of WIDE. */
inline_ int64_t seen_by(queries_t q, int64_t i, int64_t low) {
    return least(BLOCK, (q.first + i - low) / WIDE * WIDE + WIDE);
}

inline_ queries_t block_of(const attention_t *t, int64_t piece) {
    const int64_t segment = t->pieces[2 * piece], first = t->pieces[2 * piece + 1];
    const segment_t *s = t->segments + segment;
    const int64_t length = s->depth + s->end - s->start;
    const int64_t end = least(first / BLOCK * BLOCK + BLOCK, length);
    return (queries_t){segment, first, end - first, end};
}

static float *scratch(int64_t numbers) {
    void *memory = aligned_alloc(64, (size_t)(numbers * 4 + 63) / 64 * 64);
    if (!memory) abort();
    return memory;
}

/* Turn the scores of a query into weights of `num` keys, of which it sees `seen`, and rescale the
   sums of the keys before. */
inline_ void weigh(float *scores, float *sums, float *top, float *all_of, int64_t seen,
                   int64_t num, int64_t width, float scale) {
    for (int64_t j = seen; j < num; j++) scores[j] = LEAST;
    floats most = all(LEAST), added = all(0);
    for (int64_t j = 0; j < num; j += LANES) {
        const floats scaled = loaded(scores + j) * scale;
        stored(scores + j, scaled);
        most = larger(scaled, most);
    }
    const float before = *top, now = highest(most);
    *top = now > before ? now : before;
    for (int64_t j = 0; j < num; j += LANES) {
        const floats weight = exponential(loaded(scores + j) - *top);
        stored(scores + j, weight);
        added += weight;
    }
    const float kept = expf(before - *top);
    *all_of = *all_of * kept + total(added);
    for (int64_t d = 0; d < width; d += LANES) stored(sums + d, loaded(sums + d) * kept);
}

/* Turn scores of a query into weights again, and their gradients `slopes` into those of the scores
   before they were scaled. `along` is the product of output and gradient. */
inline_ void unweigh(float *weights, float *slopes, int64_t seen, int64_t num, float scale,
                     float lse, float along) {
    for (int64_t j = 0; j < num; j += LANES) {
        const floats weight = exponential(loaded(weights + j) * scale - lse);
        stored(weights + j, weight);
        stored(slopes + j, weight * (loaded(slopes + j) - along) * scale);
    }
    for (int64_t j = seen; j < BLOCK; j++) weights[j] = slopes[j] = 0;
}

static void attend_piece(const void *task, int64_t number) {
    const attention_t *t = task;
    const int64_t width = t->width, heads = t->heads, rep = heads / t->kv_heads;
    const int64_t kv = number % t->kv_heads;
    const queries_t q = block_of(t, number / t->kv_heads);
    const int64_t stride = heads * width, keys_stride = t->kv_heads * width;
    int64_t *tokens = (int64_t *)scratch(2 * q.length);
    write_tokens(t, q.segment, q.length, tokens);
    float *memory = scratch(BLOCK * width * (3 + 2 * rep) + GROUP * BLOCK + 2 * BLOCK * rep);
    float *keys = memory, *turned = keys + BLOCK * width, *values = turned + BLOCK * width;
    float *queries = values + BLOCK * width, *sums = queries + rep * BLOCK * width;
    float *scores = sums + rep * BLOCK * width, *tops = scores + GROUP * BLOCK;
    float *totals = tops + rep * BLOCK;
    for (int64_t r = 0; r < rep; r++) {
        gather(t->query + (kv * rep + r) * width, stride, width, tokens + q.first, q.count,
               queries + r * BLOCK * width);
        for (int64_t i = 0; i < BLOCK; i++) tops[r * BLOCK + i] = LEAST, totals[r * BLOCK + i] = 0;
    }
    memset(sums, 0, rep * BLOCK * width * sizeof *sums);
    for (int64_t low = 0; low < q.length; low += BLOCK) {
        const int64_t count = least(BLOCK, q.length - low);
        gather(t->key + kv * width, keys_stride, width, tokens + low, count, keys);
        gather(t->value + kv * width, t->value_stride, width, tokens + low, count, values);
        transpose(keys, width, turned);
        for (int64_t r = 0; r < rep; r++) {
            for (int64_t group = 0; group < q.count; group += GROUP) {
                const int64_t end = least(group + GROUP, q.count), rows = (end - group + 3) / 4 * 4;
                const int64_t num = seen_by(q, end - 1, low), at = r * BLOCK + group;
                multiply(rows, num, width, queries + at * width, width, 1, turned, BLOCK, scores,
                         BLOCK, 0);
                for (int64_t i = 0; i < end - group; i++)
                    weigh(scores + i * BLOCK, sums + (at + i) * width, tops + at + i,
                          totals + at + i, q.first + group + i - low + 1, num, width, t->scale);
                memset(scores + (end - group) * BLOCK, 0, (rows - end + group) * BLOCK * 4);
                multiply(rows, width, num, scores, BLOCK, 1, values, width, sums + at * width,
                         width, 1);
            }
        }
    }
    for (int64_t r = 0; r < rep; r++)
        for (int64_t i = 0; i < q.count; i++) {
            const int64_t token = tokens[q.first + i], head = kv * rep + r;
            const float share = 1.0f / totals[r * BLOCK + i];
            const float *sum = sums + (r * BLOCK + i) * width;
            for (int64_t d = 0; d < width; d += LANES)
                stored(t->to + token * stride + head * width + d, loaded(sum + d) * share);
            t->to_lse[token * heads + head] = tops[r * BLOCK + i] + logf(totals[r * BLOCK + i]);
        }
    free(tokens);
    free(memory);
}

void attend(parallel_t parallel, int64_t num, const float *query, const float *key,
            const float *value, int64_t value_stride, const segment_t *segments,
            const int64_t *pieces, int64_t count, float scale, float *out, float *lse,
            int64_t heads, int64_t kv_heads, int64_t width) {
    const threads_t threads = {parallel, num};
    const attention_t task = {.query = query, .key = key, .value = value, .to = out, .to_lse = lse,
                              .segments = segments, .pieces = pieces, .heads = heads,
                              .kv_heads = kv_heads, .width = width, .value_stride = value_stride,
                              .scale = scale};
    divide(&threads, count * kv_heads, attend_piece, &task);
}

/* The gradients of all queries below one root, of one head of keys. */
static void attend_backward_piece(const void *task, int64_t number) {
    const attention_t *t = task;
    const int64_t width = t->width, heads = t->heads, rep = heads / t->kv_heads;
    const int64_t kv = number % t->kv_heads, root = number / t->kv_heads;
    const int64_t stride = heads * width, keys_stride = t->kv_heads * width;
    float *memory =
        scratch(BLOCK * width * (6 + 3 * rep) + 2 * BLOCK * BLOCK + 2 * rep * BLOCK);
    float *keys = memory, *turned = keys + BLOCK * width, *values = turned + BLOCK * width;
    float *turned_values = values + BLOCK * width, *to_keys = turned_values + BLOCK * width;
    float *to_values = to_keys + BLOCK * width, *queries = to_values + BLOCK * width;
    float *grads = queries + rep * BLOCK * width, *to_queries = grads + rep * BLOCK * width;
    float *weights = to_queries + rep * BLOCK * width, *slopes = weights + BLOCK * BLOCK;
    float *lse = slopes + BLOCK * BLOCK, *along = lse + rep * BLOCK;
    int64_t *tokens = NULL, known = -1;
    for (int64_t piece = t->roots[root]; piece < t->roots[root + 1]; piece++) {
        const queries_t q = block_of(t, piece);
        if (q.segment != known) {
            const segment_t *s = t->segments + q.segment;
            free(tokens);
            const int64_t length = s->depth + s->end - s->start;
            tokens = (int64_t *)scratch(2 * length);
            write_tokens(t, q.segment, length, tokens);
            known = q.segment;
        }
        for (int64_t r = 0; r < rep; r++) {
            const int64_t head = kv * rep + r;
            gather(t->query + head * width, stride, width, tokens + q.first, q.count,
                   queries + r * BLOCK * width);
            gather(t->grad + head * width, stride, width, tokens + q.first, q.count,
                   grads + r * BLOCK * width);
            for (int64_t i = 0; i < q.count; i++) {
                const int64_t token = tokens[q.first + i];
                const float *out = t->out + token * stride + head * width;
                floats sum = all(0);
                for (int64_t d = 0; d < width; d += LANES)
                    sum += loaded(out + d) * loaded(grads + (r * BLOCK + i) * width + d);
                along[r * BLOCK + i] = total(sum);
                lse[r * BLOCK + i] = t->lse[token * heads + head];
            }
        }
        memset(to_queries, 0, rep * BLOCK * width * sizeof *to_queries);
        for (int64_t low = 0; low < q.length; low += BLOCK) {
            const int64_t count = least(BLOCK, q.length - low);
            gather(t->key + kv * width, keys_stride, width, tokens + low, count, keys);
            gather(t->value + kv * width, t->value_stride, width, tokens + low, count, values);
            transpose(keys, width, turned);
            transpose(values, width, turned_values);
            for (int64_t r = 0; r < rep; r++) {
                const float *own = queries + r * BLOCK * width, *back = grads + r * BLOCK * width;
                for (int64_t group = 0; group < q.count; group += GROUP) {
                    const int64_t end = least(group + GROUP, q.count);
                    const int64_t rows = (end - group + 3) / 4 * 4, at = group * width;
                    const int64_t num = seen_by(q, end - 1, low);
                    float *w = weights + group * BLOCK, *s = slopes + group * BLOCK;
                    multiply(rows, num, width, own + at, width, 1, turned, BLOCK, w, BLOCK, 0);
                    multiply(rows, num, width, back + at, width, 1, turned_values, BLOCK, s, BLOCK,
                             0);
                    for (int64_t i = 0; i < end - group; i++)
                        unweigh(w + i * BLOCK, s + i * BLOCK,
                                least(BLOCK, q.first + group + i - low + 1), num, t->scale,
                                lse[r * BLOCK + group + i], along[r * BLOCK + group + i]);
                    memset(s + (end - group) * BLOCK, 0, (rows - end + group) * BLOCK * 4);
                    multiply(rows, width, num, s, BLOCK, 1, keys, width,
                             to_queries + r * BLOCK * width + at, width, 1);
                }
                for (int64_t group = 0; group < count; group += GROUP) {
                    const int64_t end = least(group + GROUP, count), at = group * width;
                    const int64_t rows = (end - group + 3) / 4 * 4;
                    int64_t from = low + group - q.first; /* the first query that sees a key */
                    from = from > 0 ? from : 0;
                    const float *w = weights + from * BLOCK + group;
                    const float *s = slopes + from * BLOCK + group;
                    multiply(rows, width, q.count - from, w, 1, BLOCK, back + from * width, width,
                             to_values + at, width, r > 0);
                    multiply(rows, width, q.count - from, s, 1, BLOCK, own + from * width, width,
                             to_keys + at, width, r > 0);
                }
            }
            for (int64_t i = 0; i < count; i++) {
                float *k = t->to_key + tokens[low + i] * keys_stride + kv * width;
                float *v = t->to_value + tokens[low + i] * t->value_stride + kv * width;
                for (int64_t d = 0; d < width; d += LANES) {
                    stored(k + d, loaded(k + d) + loaded(to_keys + i * width + d));
                    stored(v + d, loaded(v + d) + loaded(to_values + i * width + d));
                }
            }
        }
        for (int64_t r = 0; r < rep; r++)
            for (int64_t i = 0; i < q.count; i++)
                memcpy(t->to_query + tokens[q.first + i] * stride + (kv * rep + r) * width,
                       to_queries + (r * BLOCK + i) * width, width * sizeof *to_queries);
    }
    free(tokens);
    free(memory);
}

/* `to_key` and `to_value` must be zero before the call. `to_value` has the stride of `value`. */
void attend_backward(parallel_t parallel, int64_t num, const float *query, const float *key,
                     const float *value, int64_t value_stride, const float *out, const float *lse,
                     const float *grad, const segment_t *segments, const int64_t *pieces,
                     const int64_t *roots, int64_t count, float scale, float *to_query,
                     float *to_key, float *to_value, int64_t heads, int64_t kv_heads,
                     int64_t width) {
    const threads_t threads = {parallel, num};
    const attention_t task = {.query = query, .key = key, .value = value, .out = out, .lse = lse,
                              .grad = grad, .to_query = to_query, .to_key = to_key,
                              .to_value = to_value, .segments = segments, .pieces = pieces,
                              .roots = roots, .heads = heads, .kv_heads = kv_heads,
                              .width = width, .value_stride = value_stride, .scale = scale};
    divide(&threads, count * kv_heads, attend_backward_piece, &task);
}

/* Attention over a cache of pages, which hold BLOCK successive tokens of a sequence: keys are [page,
   kv_heads, width, BLOCK], values are [page, kv_heads, BLOCK, width]. Its blocks and sums are those
   of the attention over a tree, so the results have the same bits. */

typedef struct {
    const float *query, *key, *value;
    float *out, *keys, *values;
    const int64_t *cells, *of, *runs;
    int64_t pages, num_runs, heads, kv_heads, width, value_stride;
    float scale;
} pages_t;

static void place_piece(const void *task, int64_t row) {
    const pages_t *t = task;
    const int64_t width = t->width, page = t->cells[row] / BLOCK, place = t->cells[row] % BLOCK;
    for (int64_t kv = 0; kv < t->kv_heads; kv++) {
        const int64_t at = (page * t->kv_heads + kv) * width * BLOCK;
        const float *key = t->key + (row * t->kv_heads + kv) * width;
        for (int64_t d = 0; d < width; d++) t->keys[at + d * BLOCK + place] = key[d];
        memcpy(t->values + at + place * width, t->value + row * t->value_stride + kv * width,
               width * sizeof *key);
    }
}

/* Write keys and values of tokens to their `cells`: page * BLOCK + offset. */
void place(parallel_t parallel, int64_t num, const float *key, const float *value,
           int64_t value_stride, const int64_t *cells, float *keys, float *values, int64_t count,
           int64_t kv_heads, int64_t width) {
    const threads_t threads = {parallel, num};
    const pages_t task = {.key = key, .value = value, .value_stride = value_stride,
                          .cells = cells, .keys = keys, .values = values, .kv_heads = kv_heads,
                          .width = width};
    divide(&threads, count, place_piece, &task);
}

static void attend_pages_piece(const void *task, int64_t number) {
    const pages_t *t = task;
    const int64_t width = t->width, rep = t->heads / t->kv_heads, kv = number % t->kv_heads;
    const int64_t *run = t->runs + number / t->kv_heads;
    const int64_t begin = run[0], count = run[t->num_runs], slot = run[2 * t->num_runs];
    const int64_t held = run[3 * t->num_runs], rows = count * rep, tall = (rows + 3) / 4 * 4;
    const int64_t span = rep * width;
    float *queries = scratch(tall * (2 * width + BLOCK + 2)), *sums = queries + tall * width;
    float *scores = sums + tall * width, *tops = scores + tall * BLOCK, *totals = tops + tall;
    memset(queries, 0, tall * (2 * width + BLOCK + 2) * sizeof *queries);
    for (int64_t i = 0; i < count; i++)
        memcpy(queries + i * span, t->query + ((begin + i) * t->heads + kv * rep) * width,
               span * sizeof *queries);
    for (int64_t i = 0; i < rows; i++) tops[i] = LEAST;
    for (int64_t low = 0; low < held + count; low += BLOCK) {
        const int64_t page = t->of[slot * t->pages + low / BLOCK];
        const int64_t at = (page * t->kv_heads + kv) * width * BLOCK;
        const int64_t most = held + count - low, num = least(BLOCK, (most + WIDE - 1) / WIDE * WIDE);
        multiply(tall, num, width, queries, width, 1, t->keys + at, BLOCK, scores, BLOCK, 0);
        for (int64_t i = 0; i < rows; i++) {
            const int64_t seen = held + i / rep - low + 1;
            if (seen > 0)
                weigh(scores + i * BLOCK, sums + i * width, tops + i, totals + i, seen, num, width,
                      t->scale);
            else
                memset(scores + i * BLOCK, 0, BLOCK * sizeof *scores);
        }
        memset(scores + rows * BLOCK, 0, (tall - rows) * BLOCK * sizeof *scores);
        multiply(tall, width, num, scores, BLOCK, 1, t->values + at, width, sums, width, 1);
    }
    for (int64_t i = 0; i < rows; i++) {
        float *to = t->out + ((begin + i / rep) * t->heads + kv * rep + i % rep) * width;
        const float share = 1.0f / totals[i];
        for (int64_t d = 0; d < width; d += LANES)
            stored(to + d, loaded(sums + i * width + d) * share);
    }
    free(queries);
}

/* `of` [slots, pages] are the pages of each sequence. `runs` [4, num_runs] are successive queries:
   the first row, how many, their slot, and the position of the first. */
void attend_pages(parallel_t parallel, int64_t num, const float *query, const float *keys,
                  const float *values, const int64_t *of, int64_t pages, const int64_t *runs,
                  int64_t num_runs, float scale, float *out, int64_t heads, int64_t kv_heads,
                  int64_t width) {
    const threads_t threads = {parallel, num};
    const pages_t task = {.query = query, .keys = (float *)keys, .values = (float *)values,
                          .of = of, .pages = pages, .runs = runs, .num_runs = num_runs,
                          .scale = scale, .out = out, .heads = heads, .kv_heads = kv_heads,
                          .width = width};
    divide(&threads, num_runs * kv_heads, attend_pages_piece, &task);
}
