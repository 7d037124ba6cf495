// The interface of the kernels. Each form (amx/, float32/) implements it for one type of number.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define LOG2_E 1.44269504f

typedef uint16_t bf16;
#ifdef KVBOOST_FLOAT32
typedef float number;
#else
typedef bf16 number;
#endif

// Consecutive keys that some rows attend to. They belong to one request or are shared by several.
typedef struct {
    const number *keys, *values; // of layer 0; [kv_heads, capacity, dim] in each layer
    int64_t layer_stride, head_stride;
    int32_t first, num_rows; // this run's slice of rows[], limits[] and slots[]
} Run;

typedef struct {
    number *key, *value; // where a packed row is written in layer 0, head 0
    int64_t layer_stride, head_stride;
} Place;

typedef struct {
    int32_t kv_heads, dim, num_runs, num_rows, num_merged;
    const Run *runs;
    const Place *places;   // [num_rows]
    const int32_t *rows;   // the packed row
    const int32_t *limits; // how many of the run's keys it sees; not decreasing within a run
    const int32_t *slots;  // which slot of Call.parts holds its partial result; -1: it has one run
    const int32_t *merged; // [num_merged, 3]: a packed row, its first slot, how many slots
} Plan;

typedef struct {
    const Plan *plan;
    int32_t layer, heads;
    float scale;
    const number *queries; // [heads, rows, dim] by the strides
    int64_t head_stride, row_stride;
    number *out;      // [rows, heads, dim]
    float *parts;     // [slots, heads, dim + 1]: the output and the log2-sum-exp2
    const float *sinks; // [heads]: one more score of each head, whose value is zero; NULL: none
    void *workspaces; // kvboost_workspace_bytes() for each thread, aligned to 64 bytes
} Call;

typedef struct {
    const number *queries; // [heads, rows, dim] by the strides
    int64_t head_stride, row_stride;
    const number *keys; // [kv_heads, start + rows, dim]
    int64_t key_stride;
    const uint8_t *absent; // [start + rows and 16 more]: keys that no row sees
    const float *weights;  // [kinds, rows]: how much each row counts for each kind of sum
    const float *sinks;    // [heads], as those of Call
    int32_t heads, kv_heads, dim, start, rows, kinds;
    float scale;
} MassCall;

// What the sink of a head adds to the sum of weights that are relative to 2 ** most.
static inline float sink_weight(const float *sinks, int head, float most) {
    return sinks == NULL ? 0 : exp2f(sinks[head] * LOG2_E - most);
}

// How the codes of a quantised weight are kept. The `group` inputs that share a scale are
// neighbours; a weight is code * scale + offset.
typedef struct {
    int32_t bits;        // 4: codes 0 to 15. 6: -32 to 31. 8: -128 to 127.
    int32_t group;       // 16, with 6 or 8 bits, or a multiple of 32
    int32_t has_offsets; // if not, they are -8 * scale with 4 bits, and otherwise 0
    int32_t is_wide;     // scales and offsets are float32, not float16
} Coding;

// 16 columns of a quantised weight, rearranged by kvboost_pack_quantized.
typedef struct {
    const uint8_t *data;
    const Coding *coding;
} Panel;

typedef struct {
    const void *weights; // rearranged by kvboost_pack
    const number *bias;  // [n], or none
    int32_t n, k;
    int32_t gated;  // of every 32 columns, 16 are gates and 16 are the values they multiply
    int32_t halved; // float32 only: the weights are packed by kvboost_pack_halved
    const Panel *panels; // [n / 16]: the weights are quantised; otherwise none
    int32_t fine;        // quantised weights only: rows have a second code, of what is left
} Linear;

typedef struct {
    const Linear *qkv, *o, *gate_up, *down;
    const number *input_norm, *post_norm;
    float input_eps, post_eps, scale;
    int32_t index, heads;
} Layer;

// What an adapter changes in the output of one linear layer, for some consecutive rows.
typedef struct {
    const void *down; // [rank, k]
    const void *up;   // [rank, width]
    int32_t rank;       // 0: nothing
    int32_t width;      // columns of the linear layer, a multiple of 16
    int32_t column;     // where they begin in the output of the product
    int32_t interleaved; // whether every 16 of them are followed by 16 of another layer
    int32_t first, num_rows;
    int32_t halved; // whether down and up are bfloat16 numbers and the rows are not
    int32_t unused;
} Change;

#define CHANGED_LINEARS 7 // of a layer: q, k, v; o; gate, up; down

// The changes of all layers.
typedef struct {
    const Change *changes; // [layers, CHANGED_LINEARS, num_runs]
    int32_t num_runs;      // slices of rows that have an adapter
    int32_t most_rank;
    float *sums;  // [3, rows, most_rank]
    number *wide; // [rows, n of gate_up]
} Changes;

// Adds the changes of `parts` linear layers to their product, [m, out_width], of rows [m, width].
void kvboost_adapt(
    const Changes *all, const Change *changes, int parts, const number *rows, int m, int width,
    number *out, int out_width, int threads
);

int kvboost_has_changes(const Change *changes, int count);

// wide [m, 2 * width], of every 32 columns 16 gates and 16 values, to [m, width].
void kvboost_gate(const number *wide, int m, int width, number *out, int threads);

void kvboost_attend(const Call *call, int threads);

void kvboost_write(
    const Plan *plan, int layer, const number *keys, int64_t key_head_stride, int64_t key_row_stride,
    const number *values, int64_t value_head_stride, int64_t value_row_stride, int threads
);

void kvboost_linear(
    const Linear *linear, const number *rows, int32_t m, const number *residual, number *out,
    number *packed, int threads
);

// kvboost_linear of quantised weights. Rows are rounded to 8 bits in groups of 32, or to 15 bits in
// two codes.
void kvboost_quantized_linear(
    const Linear *linear, const number *rows, int32_t m, const number *residual, number *out,
    number *packed, int threads
);

void kvboost_norm(
    const number *rows, int32_t m, int32_t dim, const number *weight, float eps, number *out,
    int threads
);

// Rotates the first `heads` heads of rows [m, width] by cos and sin, [m, dim], in place.
void kvboost_rotate(
    number *rows, int m, int width, int heads, int dim, const number *cos, const number *sin,
    int threads
);
