// Moved text: keys rotated to their new positions (reuse/rope.py), and the shift: in every layer, the
// average change of the recomputed rows, applied to the others (reuse/shift.py). Each form's
// moved_rows.c includes this after what it does with one row.
#pragma once

typedef struct {
    const number *fresh, *stale; // [heads, rows, dim] by their strides
    int64_t fresh_head, fresh_row, stale_head;
} Rows;

// Recomputed rows: where they are in the segment and in the prompt, their blocks, and cos and sin
// of their positions, [rows, dim]. Those of a span follow one another.
typedef struct {
    int count, span_blocks;
    const int64_t *index, *positions, *which;
    const float *cos, *sin;
} Recomputed;

// Adds the differences between fresh and known rows to those of their blocks, [blocks, dim], by
// the weight of each row, which is 1 / (1 + error_weight * its square / the mean of its span).
// Those of keys (of which by_sin is not NULL) are added twice: times cos and times sin.
static void add_errors(
    Rows rows, const Recomputed *at, int head, int dim, float error_weight, float *weights,
    float *by_cos, float *by_sin
) {
    const number *fresh_rows = rows.fresh + head * rows.fresh_head;
    const number *stale_rows = rows.stale + head * rows.stale_head;
    for (int begin = 0, end; begin < at->count; begin = end) {
        const int64_t span = at->which[begin] / at->span_blocks;
        float total = 0;
        for (end = begin; end < at->count && at->which[end] / at->span_blocks == span; end++) {
            const number *fresh = fresh_rows + at->index[end] * rows.fresh_row;
            weights[end] = square_of(fresh, stale_rows + at->positions[end] * dim, dim);
            total += weights[end];
        }
        const float scale = error_weight * (end - begin) / fmaxf(total, 1e-30f);
        for (int row = begin; row < end; row++) {
            const number *fresh = fresh_rows + at->index[row] * rows.fresh_row;
            const number *stale = stale_rows + at->positions[row] * dim;
            const float weight = weights[row] = 1 / (1 + scale * weights[row]);
            const int64_t to = at->which[row] * dim, from = (int64_t)row * dim;
            add_error(fresh, stale, weight, dim, at->cos + from, at->sin + from, by_cos + to,
                      by_sin == NULL ? NULL : by_sin + to);
        }
    }
}

// sums is [3, heads, blocks, dim], zeros: keys by cos, keys by sin, values. Writes the weights of
// all rows, [2, heads, rows]: as keys, as values.
void kvboost_errors(
    const number *fresh_keys, int64_t key_head, int64_t key_row, const number *fresh_values,
    int64_t value_head, int64_t value_row, const number *keys, const number *values,
    int64_t head_stride, int32_t heads, int32_t dim, int32_t blocks, int32_t span_blocks,
    int32_t count, const int64_t *index, const int64_t *positions, const int64_t *which,
    const float *cos, const float *sin, float error_weight, float *weights, float *sums, int threads
) {
    const Rows of_keys = {fresh_keys, keys, key_head, key_row, head_stride};
    const Rows of_values = {fresh_values, values, value_head, value_row, head_stride};
    const Recomputed at = {count, span_blocks, index, positions, which, cos, sin};
    const int64_t size = (int64_t)blocks * dim, all = heads * size;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int task = 0; task < 2 * heads; task++) {
        const int head = task / 2;
        float *to = sums + head * size, *weight = weights + (int64_t)head * count;
        if (task % 2)
            add_errors(of_values, &at, head, dim, error_weight, weight + (int64_t)heads * count,
                       to + 2 * all, NULL);
        else
            add_errors(of_keys, &at, head, dim, error_weight, weight, to, to + all);
    }
}

// keys and values are [heads, ...] by the stride, from the first of `count` rows on. Adds offset
// which[r] of [heads, offsets, dim] to row r: to keys along * cos[r] + across * sin[r], to values
// of_values. Rows with the last offset stay as they are.
void kvboost_shift(
    number *keys, number *values, int64_t head_stride, int32_t heads, int32_t dim, int32_t count,
    const int64_t *which, int32_t offsets, const float *along, const float *across,
    const float *of_values, const number *cos, const number *sin, int threads
) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int row = 0; row < count; row++) {
        if (which[row] == offsets - 1) continue;
        const number *c = cos + (int64_t)row * dim, *s = sin + (int64_t)row * dim;
        for (int head = 0; head < heads; head++) {
            const int64_t at = head * head_stride + (int64_t)row * dim;
            const int64_t from = (head * offsets + which[row]) * dim;
            shift_row(keys + at, values + at, dim, along + from, across + from, of_values + from, c, s);
        }
    }
}

// keys and out are [layers, heads, tokens, dim] by the strides of layers and heads. Rotates every
// pair of channels (i, i + pairs) by cos and sin, [layers, pairs]; copies the other channels.
void kvboost_move(
    const number *keys, int64_t layer_stride, int64_t head_stride, number *out, int64_t out_layer,
    int64_t out_head, int32_t layers, int32_t heads, int32_t tokens, int32_t dim, int32_t pairs,
    const float *cos, const float *sin, int threads
) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int task = 0; task < layers * heads; task++) {
        const int layer = task / heads, head = task % heads;
        const float *c = cos + layer * pairs, *s = sin + layer * pairs;
        const number *from = keys + layer * layer_stride + head * head_stride;
        number *to = out + layer * out_layer + head * out_head;
        for (int token = 0; token < tokens; token++, from += dim, to += dim) {
            rotate_row(from, to, pairs, c, s);
            memcpy(to + 2 * pairs, from + 2 * pairs, (dim - 2 * pairs) * sizeof(number));
        }
    }
}
