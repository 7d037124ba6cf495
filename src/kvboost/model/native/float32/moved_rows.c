// Moved text in float32: keys rotated to their new positions (reuse/rope.py), and the shift: in
// every layer, the average change of the recomputed rows, applied to the others (reuse/shift.py).

#include "vectors.h"

typedef struct {
    const float *fresh, *stale; // [heads, rows, dim] by the strides
    int64_t fresh_head, fresh_row, stale_head;
} Rows;

// Adds the differences between fresh and known rows to those of their blocks, [blocks, dim].
// Those of keys are added twice: times cos and times sin of their rows, [rows, dim].
static void add_errors(
    Rows rows, int head, int dim, int count, const int64_t *index, const int64_t *positions,
    const int64_t *which, const float *cos, const float *sin, float *by_cos, float *by_sin
) {
    for (int row = 0; row < count; row++) {
        const float *fresh = rows.fresh + head * rows.fresh_head + index[row] * rows.fresh_row;
        const float *stale = rows.stale + head * rows.stale_head + positions[row] * dim;
        const int64_t to = which[row] * dim, from = (int64_t)row * dim;
        if (cos == NULL) {
#pragma omp simd
            for (int d = 0; d < dim; d++) by_cos[to + d] += fresh[d] - stale[d];
        } else {
#pragma omp simd
            for (int d = 0; d < dim; d++) {
                const float error = fresh[d] - stale[d];
                by_cos[to + d] += error * cos[from + d];
                by_sin[to + d] += error * sin[from + d];
            }
        }
    }
}

// sums is [3, heads, blocks, dim], zeros: keys by cos, keys by sin, values.
void kvboost_errors(
    const float *fresh_keys, int64_t key_head, int64_t key_row, const float *fresh_values,
    int64_t value_head, int64_t value_row, const float *keys, const float *values,
    int64_t head_stride, int32_t heads, int32_t dim, int32_t blocks, int32_t count,
    const int64_t *index, const int64_t *positions, const int64_t *which, const float *cos,
    const float *sin, float *sums, int threads
) {
    const Rows of_keys = {fresh_keys, keys, key_head, key_row, head_stride};
    const Rows of_values = {fresh_values, values, value_head, value_row, head_stride};
    const int64_t size = (int64_t)blocks * dim, all = heads * size;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int task = 0; task < 2 * heads; task++) {
        const int head = task / 2;
        float *to = sums + head * size;
        if (task % 2)
            add_errors(of_values, head, dim, count, index, positions, which, NULL, NULL, to + 2 * all,
                       NULL);
        else
            add_errors(of_keys, head, dim, count, index, positions, which, cos, sin, to, to + all);
    }
}

// keys and values are [heads, ...] by the stride, from the first of `count` rows on. Adds offset
// which[r] of [heads, offsets, dim] to row r: to keys along * cos[r] + across * sin[r], to values
// of_values. Rows with the last offset stay as they are.
void kvboost_shift(
    float *keys, float *values, int64_t head_stride, int32_t heads, int32_t dim, int32_t count,
    const int64_t *which, int32_t offsets, const float *along, const float *across,
    const float *of_values, const float *cos, const float *sin, int threads
) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int row = 0; row < count; row++) {
        if (which[row] == offsets - 1) continue;
        const float *c = cos + (int64_t)row * dim, *s = sin + (int64_t)row * dim;
        for (int head = 0; head < heads; head++) {
            const int64_t at = head * head_stride + (int64_t)row * dim;
            const int64_t from = (head * offsets + which[row]) * dim;
            float *key = keys + at, *value = values + at;
#pragma omp simd
            for (int d = 0; d < dim; d++) {
                key[d] += along[from + d] * c[d] + across[from + d] * s[d];
                value[d] += of_values[from + d];
            }
        }
    }
}

// keys and out are [layers, heads, tokens, dim] by the strides of layers and heads. Rotates every
// pair of channels (i, i + pairs) by cos and sin, [layers, pairs]; copies the other channels.
void kvboost_move(
    const float *keys, int64_t layer_stride, int64_t head_stride, float *out, int64_t out_layer,
    int64_t out_head, int32_t layers, int32_t heads, int32_t tokens, int32_t dim, int32_t pairs,
    const float *cos, const float *sin, int threads
) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int task = 0; task < layers * heads; task++) {
        const int layer = task / heads, head = task % heads;
        const float *c = cos + layer * pairs, *s = sin + layer * pairs;
        const float *from = keys + layer * layer_stride + head * head_stride;
        float *to = out + layer * out_layer + head * out_head;
        for (int token = 0; token < tokens; token++, from += dim, to += dim) {
#pragma omp simd
            for (int d = 0; d < pairs; d++) {
                const float x = from[d], y = from[pairs + d];
                to[d] = x * c[d] - y * s[d];
                to[pairs + d] = y * c[d] + x * s[d];
            }
            memcpy(to + 2 * pairs, from + 2 * pairs, (dim - 2 * pairs) * sizeof(float));
        }
    }
}
