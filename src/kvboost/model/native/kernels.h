// What the kernels are called with.
#pragma once

#include <stdint.h>

typedef uint16_t bf16;

typedef struct {
    const bf16 *keys, *values; // of layer 0; [kv_heads, capacity, dim] in each layer
    int64_t layer_stride, head_stride;
    int32_t first, num_rows; // its slice of rows[], limits[] and slots[]
} Run;

typedef struct {
    bf16 *key, *value; // where a packed row goes in layer 0, head 0
    int64_t layer_stride, head_stride;
} Place;

typedef struct {
    int32_t kv_heads, dim, num_runs, num_rows, num_merged;
    const Run *runs;
    const Place *places;   // [num_rows]
    const int32_t *rows;   // the packed row
    const int32_t *limits; // how many of the run's keys it sees; not decreasing within a run
    const int32_t *slots;  // where its part is kept until all are there; -1: there is no other
    const int32_t *merged; // [num_merged, 3]: a packed row, its first slot, their number
} Plan;

typedef struct {
    const Plan *plan;
    int32_t layer, heads;
    float scale;
    const bf16 *queries; // [heads, rows, dim] by their strides
    int64_t head_stride, row_stride;
    bf16 *out;           // [rows, heads, dim]
    float *parts;        // [slots, heads, dim + 1]: the output and the log-sum-exp
    void *rooms;         // kvboost_room_bytes() for each thread, at a multiple of 64
} Call;

typedef struct {
    const bf16 *queries; // [heads, rows, dim] by their strides
    int64_t head_stride, row_stride;
    const bf16 *keys; // [kv_heads, start + rows, dim]
    int64_t key_stride;
    const uint8_t *absent; // [start + rows and 16 more]: what nobody sees
    int32_t heads, kv_heads, dim, start, rows;
    float scale;
} Look;

typedef struct {
    const bf16 *weights; // [n / 32][k / 32][2][16 pairs of k][16 of n, 2]
    const bf16 *bias;    // [n], or none
    int32_t n, k;
    int32_t gated; // of every 32 columns, 16 are gates and 16 are what they let through
} Linear;

typedef struct {
    const Linear *qkv, *o, *gate_up, *down;
    const bf16 *input_norm, *post_norm;
    float input_eps, post_eps, scale;
    int32_t index, heads;
} Layer;

void kvboost_attend(const Call *call, int threads);

void kvboost_write(
    const Plan *plan, int layer, const bf16 *keys, int64_t key_head_stride, int64_t key_row_stride,
    const bf16 *values, int64_t value_head_stride, int64_t value_row_stride, int threads
);

void kvboost_linear(
    const Linear *linear, const bf16 *rows, int32_t m, const bf16 *residual, bf16 *out, bf16 *packed,
    int threads
);

void kvboost_norm(
    const bf16 *rows, int32_t m, int32_t dim, const bf16 *weight, float eps, bf16 *out, int threads
);
