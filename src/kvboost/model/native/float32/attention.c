// Attention of packed rows over the KV of many requests, in one call: float32 on any CPU.

#include "vectors.h"

#define KEYS 64 // keys of a block
#define STEP ROWS // queries that are scored at once
#define MOST_DIM 256
#define MOST_QUERIES 252 // of a part: keys that are transposed once serve all of them
#define NOTHING -1e30f   // the score of a key that is not seen
#define MASS_QUERIES 60  // of a part whose scores are all kept

#define BEGIN_THREAD
#define END_THREAD
#define pack_values(...) // they are multiplied as they are

typedef struct {
    float queries[MOST_QUERIES * MOST_DIM]; // times the scale and log2(e): weights are powers of 2
    float out[MOST_QUERIES * MOST_DIM];
    float sums[MOST_QUERIES], most[MOST_QUERIES];
    int32_t limits[MOST_QUERIES];
    float keys[KEYS * MOST_DIM]; // [32 keys of a panel][dim][key]
    float scores[ROWS * KEYS];
    float factor;
} __attribute__((aligned(64))) Workspace;

// 4 keys of 4 channels, key by key, to 4 channels of 4 keys.
INLINE void transpose_quad(const float *from, int64_t stride, float *to) {
    const quad a = *(const unaligned_quad *)from, b = *(const unaligned_quad *)(from + stride);
    const quad c = *(const unaligned_quad *)(from + 2 * stride);
    const quad d = *(const unaligned_quad *)(from + 3 * stride);
    const quad ab = SHUFFLE(a, b, 0, 4, 1, 5), cd = SHUFFLE(c, d, 0, 4, 1, 5);
    const quad ba = SHUFFLE(a, b, 2, 6, 3, 7), dc = SHUFFLE(c, d, 2, 6, 3, 7);
    *(unaligned_quad *)to = SHUFFLE(ab, cd, 0, 1, 4, 5);
    *(unaligned_quad *)(to + COLUMNS) = SHUFFLE(ab, cd, 2, 3, 6, 7);
    *(unaligned_quad *)(to + 2 * COLUMNS) = SHUFFLE(ba, dc, 0, 1, 4, 5);
    *(unaligned_quad *)(to + 3 * COLUMNS) = SHUFFLE(ba, dc, 2, 3, 6, 7);
}

// A block of keys, [count, dim], to [64 / 32][dim][32]; the keys that are missing become zeros.
static void pack_keys(const float *keys, int count, int dim, float *out) {
    for (int key = 0; key < KEYS; key += 4) {
        float *to = out + key / COLUMNS * COLUMNS * dim + key % COLUMNS;
        if (key + 4 <= count) {
            for (int d = 0; d < dim; d += 4)
                transpose_quad(keys + (int64_t)key * dim + d, dim, to + d * COLUMNS);
        } else {
            for (int i = 0; i < 4; i++)
                for (int d = 0; d < dim; d++)
                    to[d * COLUMNS + i] = key + i < count ? keys[(int64_t)(key + i) * dim + d] : 0;
        }
    }
}

INLINE quad larger_quad(quad a, quad b) {
    const quad_ints is_a = a > b;
    return (quad)((is_a & (quad_ints)a) | (~is_a & (quad_ints)b));
}

// The largest number of a vector.
INLINE float largest(vec numbers) {
    float all[LANES] __attribute__((aligned(64)));
    store(all, numbers);
    quad best = *(const unaligned_quad *)all;
    for (int i = 4; i < LANES; i += 4) best = larger_quad(best, *(const unaligned_quad *)(all + i));
    best = larger_quad(best, SHUFFLE(best, best, 2, 3, 0, 1));
    return best[0] > best[1] ? best[0] : best[1];
}

INLINE float total(vec numbers) {
    float all[LANES] __attribute__((aligned(64)));
    store(all, numbers);
    quad sums = *(const unaligned_quad *)all;
    for (int i = 4; i < LANES; i += 4) sums += *(const unaligned_quad *)(all + i);
    sums += SHUFFLE(sums, sums, 2, 3, 0, 1);
    return sums[0] + sums[1];
}

// Turns one query's scores into weights, relative to its highest score so far; rescales what the
// query has added up when that score rises.
INLINE void weigh(Workspace *work, int query, int row, int seen, int dim) {
    float *scores = work->scores + row * KEYS;
    if (seen <= 0) {
        memset(scores, 0, KEYS * sizeof(float));
        return;
    }
    for (int key = seen; key < KEYS; key++) scores[key] = NOTHING;
    vec best = load(scores);
    for (int key = LANES; key < KEYS; key += LANES) best = larger(best, load(scores + key));
    float top = largest(best);
    if (top > work->most[query]) {
        const float less = power_of_2(work->most[query] - top);
        work->most[query] = top;
        work->sums[query] *= less;
        float *out = work->out + query * dim;
        for (int d = 0; d < dim; d += LANES) store(out + d, load(out + d) * less);
    }
    top = work->most[query];
    vec sum = {0};
    for (int key = 0; key < KEYS; key += LANES) {
        const vec weights = powers_of_2(load(scores + key) - top);
        store(scores + key, weights);
        sum += weights;
    }
    work->sums[query] += total(sum);
}

INLINE void clear(Workspace *work, int count, int dim) {
    memset(work->out, 0, (size_t)count * dim * sizeof(float));
    memset(work->sums, 0, (size_t)count * sizeof(float));
}

INLINE void take_query(Workspace *work, int i, const float *query, int dim) {
    for (int d = 0; d < dim; d++) work->queries[i * dim + d] = query[d] * work->factor;
}

// Scores of `rows` queries from `tile` on with the block's keys: to out, by its stride.
INLINE void score(
    const Workspace *work, int tile, int rows, int dim, float *out, int64_t stride
) {
    const float *queries = work->queries + tile * dim;
    for (int key = 0; key < KEYS; key += COLUMNS)
        multiply(rows, dim, queries, dim, work->keys + key * dim, COLUMNS, out + key, stride);
}

INLINE void add_values(
    Workspace *work, int tile, int rows, int weighed, const float *values, int dim
) {
    for (int d = 0; d < dim; d += COLUMNS)
        multiply_add(rows, weighed, work->scores, KEYS, values + d, dim,
                     work->out + tile * dim + d, dim);
}

INLINE float sum_of(const Workspace *work, int query) { return work->sums[query]; }

INLINE void divide(const float *from, float by, int dim, float *to) {
    const float share = 1 / by;
    for (int d = 0; d < dim; d++) to[d] = from[d] * share;
}

INLINE void round_row(const float *row, int dim, float *out) {
    memcpy(out, row, dim * sizeof(float));
}

// Turns the scores of all keys into weights, relative to the highest score, which is written to
// `top`; returns their sum.
INLINE float weigh_all(
    const Workspace *work, float *scores, const uint8_t *absent, int seen, int64_t width, float *top
) {
    (void)work; // queries have its factor
    for (int key = 0; key < seen; key++) scores[key] = absent[key] ? NOTHING : scores[key];
    for (int key = seen; key < width; key++) scores[key] = NOTHING;
    vec best = {0}, sums = {0};
    best += NOTHING;
    for (int key = 0; key < width; key += LANES) best = larger(best, load(scores + key));
    *top = largest(best);
    for (int key = 0; key < width; key += LANES) {
        const vec weights = powers_of_2(load(scores + key) - *top);
        store(scores + key, weights);
        sums += weights;
    }
    return total(sums);
}

#include "../attention.h"
