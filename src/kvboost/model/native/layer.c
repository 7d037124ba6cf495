// One decoder layer of the Llama kind: everything between two residual streams.

#include "tiles.h"

// q and k of every row, turned by their positions; rounded where stock transformers rounds.
static void turn(
    bf16 *rows, int m, int width, int heads, int dim, const bf16 *cos, const bf16 *sin, int threads
) {
    const int half = dim / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && m > 64)
    for (int row = 0; row < m; row++)
        for (int head = 0; head < heads; head++) {
            bf16 *low = rows + (int64_t)row * width + head * dim, *high = low + half;
            const bf16 *c = cos + (int64_t)row * dim, *s = sin + (int64_t)row * dim;
            for (int d = 0; d < half; d += 16) {
                const __m512 x = widen(low + d), y = widen(high + d);
                const __m512 to_low = _mm512_mul_ps(y, widen(s + d));
                const __m512 to_high = _mm512_mul_ps(x, widen(s + half + d));
                const __m512 new_low = rounded(_mm512_mul_ps(x, widen(c + d)));
                const __m512 new_high = rounded(_mm512_mul_ps(y, widen(c + half + d)));
                store(low + d, _mm512_sub_ps(new_low, rounded(to_low)));
                store(high + d, _mm512_add_ps(new_high, rounded(to_high)));
            }
        }
}

// hidden and out are [rows, width]; cos and sin [rows, dim]. room has space for what lies between:
// [rows, width + the larger of qkv + heads * dim and the gated width]; packed for rows of the widest
// product, as for kvboost_linear; parts and rooms as for kvboost_attend.

// Up to fresh queries, keys and values: room[rows * width:] holds them, [rows, qkv].
void kvboost_layer_begin(
    const Layer *layer, const Plan *plan, const bf16 *hidden, const bf16 *cos, const bf16 *sin,
    bf16 *room, bf16 *packed, int threads
) {
    const int m = plan->num_rows, width = layer->qkv->k;
    bf16 *fresh = room + (int64_t)m * width;
    kvboost_norm(hidden, m, width, layer->input_norm, layer->input_eps, room, threads);
    kvboost_linear(layer->qkv, room, m, NULL, fresh, packed, threads);
    turn(fresh, m, layer->qkv->n, layer->heads + plan->kv_heads, plan->dim, cos, sin, threads);
}

// From there on, once keys and values are in their places.
void kvboost_layer_end(
    const Layer *layer, const Plan *plan, const bf16 *hidden, bf16 *out, bf16 *room, bf16 *packed,
    float *parts, void *rooms, int threads
) {
    const int m = plan->num_rows, dim = plan->dim, width = layer->qkv->k, qkv = layer->qkv->n;
    bf16 *between = room + (int64_t)m * width;
    const Call call = {
        .plan = plan, .layer = layer->index, .heads = layer->heads, .scale = layer->scale,
        .queries = between, .head_stride = dim, .row_stride = qkv,
        .out = between + (int64_t)m * qkv, .parts = parts, .rooms = rooms,
    };
    kvboost_attend(&call, threads);
    kvboost_linear(layer->o, call.out, m, hidden, out, packed, threads);
    kvboost_norm(out, m, width, layer->post_norm, layer->post_eps, room, threads);
    kvboost_linear(layer->gate_up, room, m, NULL, between, packed, threads);
    kvboost_linear(layer->down, between, m, out, out, packed, threads);
}

void kvboost_layer(
    const Layer *layer, const Plan *plan, const bf16 *hidden, const bf16 *cos, const bf16 *sin,
    bf16 *out, bf16 *room, bf16 *packed, float *parts, void *rooms, int threads
) {
    const int dim = plan->dim, qkv = layer->qkv->n;
    const bf16 *keys = room + (int64_t)plan->num_rows * layer->qkv->k + layer->heads * dim;
    const bf16 *values = keys + plan->kv_heads * dim;
    kvboost_layer_begin(layer, plan, hidden, cos, sin, room, packed, threads);
    kvboost_write(plan, layer->index, keys, dim, qkv, values, dim, qkv, threads);
    kvboost_layer_end(layer, plan, hidden, out, room, packed, parts, rooms, threads);
}
