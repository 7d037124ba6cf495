// One decoder layer of the Llama kind: everything between two residual streams.

#include "kernels.h"

#include <stddef.h>

// hidden and out are [rows, width]; cos and sin [rows, dim]. scratch holds what is computed in
// between: [rows, width + the larger of qkv + heads * dim and the gated width]; packed has space
// for the rows of the widest product, as for kvboost_linear; parts and workspaces as for
// kvboost_attend.

// Computes the fresh queries, keys and values: [rows, qkv] from scratch[rows * width] on.
void kvboost_layer_begin(
    const Layer *layer, const Plan *plan, const number *hidden, const number *cos, const number *sin,
    number *scratch, number *packed, int threads
) {
    const int m = plan->num_rows, width = layer->qkv->k;
    number *fresh = scratch + (int64_t)m * width;
    kvboost_norm(hidden, m, width, layer->input_norm, layer->input_eps, scratch, threads);
    kvboost_linear(layer->qkv, scratch, m, NULL, fresh, packed, threads);
    const int heads = layer->heads + plan->kv_heads;
    kvboost_rotate(fresh, m, layer->qkv->n, heads, plan->dim, cos, sin, threads);
}

// The rest of the layer. The fresh keys and values must be in their places.
void kvboost_layer_end(
    const Layer *layer, const Plan *plan, const number *hidden, number *out, number *scratch,
    number *packed, float *parts, void *workspaces, int threads
) {
    const int m = plan->num_rows, dim = plan->dim, width = layer->qkv->k, qkv = layer->qkv->n;
    number *between = scratch + (int64_t)m * width;
    const Call call = {
        .plan = plan, .layer = layer->index, .heads = layer->heads, .scale = layer->scale,
        .queries = between, .head_stride = dim, .row_stride = qkv,
        .out = between + (int64_t)m * qkv, .parts = parts, .workspaces = workspaces,
    };
    kvboost_attend(&call, threads);
    kvboost_linear(layer->o, call.out, m, hidden, out, packed, threads);
    kvboost_norm(out, m, width, layer->post_norm, layer->post_eps, scratch, threads);
    kvboost_linear(layer->gate_up, scratch, m, NULL, between, packed, threads);
    kvboost_linear(layer->down, between, m, out, out, packed, threads);
}

void kvboost_layer(
    const Layer *layer, const Plan *plan, const number *hidden, const number *cos, const number *sin,
    number *out, number *scratch, number *packed, float *parts, void *workspaces, int threads
) {
    const int dim = plan->dim, qkv = layer->qkv->n;
    const number *keys = scratch + (int64_t)plan->num_rows * layer->qkv->k + layer->heads * dim;
    const number *values = keys + plan->kv_heads * dim;
    kvboost_layer_begin(layer, plan, hidden, cos, sin, scratch, packed, threads);
    kvboost_write(plan, layer->index, keys, dim, qkv, values, dim, qkv, threads);
    kvboost_layer_end(layer, plan, hidden, out, scratch, packed, parts, workspaces, threads);
}
