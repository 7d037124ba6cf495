// One decoder layer of the Llama kind: everything between two residual streams.

#include "kernels.h"

#include <stddef.h>

// hidden and out are [rows, width]; cos and sin [rows, dim]. scratch holds what is computed in
// between: [rows, width + the larger of qkv + heads * dim and the gated width]; packed has space
// for the rows of the widest product, as for kvboost_linear; parts and workspaces as for
// kvboost_attend. changes: what adapters change, or none.

static const Change *changes_of(const Changes *all, const Layer *layer, int linear) {
    return all->changes + ((int64_t)layer->index * CHANGED_LINEARS + linear) * all->num_runs;
}

// kvboost_linear of linear layers `first` to `first + parts` and what adapters change in them.
static void multiply(
    const Layer *layer, const Linear *linear, int first, int parts, const number *rows, int m,
    const number *residual, number *out, number *packed, const Changes *changes, int threads
) {
    kvboost_linear(linear, rows, m, residual, out, packed, threads);
    if (changes != NULL)
        kvboost_adapt(changes, changes_of(changes, layer, first), parts, rows, m, linear->k, out,
                      linear->n, threads);
}

// The gated product. Adapters change what is computed before the gates.
static void multiply_gated(
    const Layer *layer, const number *rows, int m, number *out, number *packed,
    const Changes *changes, int threads
) {
    Linear plain = *layer->gate_up;
    if (changes == NULL ||
        !kvboost_has_changes(changes_of(changes, layer, 4), 2 * changes->num_runs)) {
        kvboost_linear(layer->gate_up, rows, m, NULL, out, packed, threads);
        return;
    }
    plain.gated = 0;
    multiply(layer, &plain, 4, 2, rows, m, NULL, changes->wide, packed, changes, threads);
    kvboost_gate(changes->wide, m, plain.n / 2, out, threads);
}

// Computes the fresh queries, keys and values: [rows, qkv] from scratch[rows * width] on.
void kvboost_layer_begin(
    const Layer *layer, const Plan *plan, const number *hidden, const number *cos, const number *sin,
    number *scratch, number *packed, const Changes *changes, int threads
) {
    const int m = plan->num_rows, width = layer->qkv->k;
    number *fresh = scratch + (int64_t)m * width;
    kvboost_norm(hidden, m, width, layer->input_norm, layer->input_eps, scratch, threads);
    multiply(layer, layer->qkv, 0, 3, scratch, m, NULL, fresh, packed, changes, threads);
    const int heads = layer->heads + plan->kv_heads;
    kvboost_rotate(fresh, m, layer->qkv->n, heads, plan->dim, cos, sin, threads);
}

// The rest of the layer. The fresh keys and values must be in their places.
void kvboost_layer_end(
    const Layer *layer, const Plan *plan, const number *hidden, number *out, number *scratch,
    number *packed, float *parts, void *workspaces, const Changes *changes, int threads
) {
    const int m = plan->num_rows, dim = plan->dim, width = layer->qkv->k, qkv = layer->qkv->n;
    number *between = scratch + (int64_t)m * width;
    const Call call = {
        .plan = plan, .layer = layer->index, .heads = layer->heads, .scale = layer->scale,
        .queries = between, .head_stride = dim, .row_stride = qkv,
        .out = between + (int64_t)m * qkv, .parts = parts, .workspaces = workspaces,
    };
    kvboost_attend(&call, threads);
    multiply(layer, layer->o, 3, 1, call.out, m, hidden, out, packed, changes, threads);
    kvboost_norm(out, m, width, layer->post_norm, layer->post_eps, scratch, threads);
    multiply_gated(layer, scratch, m, between, packed, changes, threads);
    multiply(layer, layer->down, 6, 1, between, m, out, out, packed, changes, threads);
}

void kvboost_layer(
    const Layer *layer, const Plan *plan, const number *hidden, const number *cos, const number *sin,
    number *out, number *scratch, number *packed, float *parts, void *workspaces,
    const Changes *changes, int threads
) {
    const int dim = plan->dim, qkv = layer->qkv->n;
    const number *keys = scratch + (int64_t)plan->num_rows * layer->qkv->k + layer->heads * dim;
    const number *values = keys + plan->kv_heads * dim;
    kvboost_layer_begin(layer, plan, hidden, cos, sin, scratch, packed, changes, threads);
    kvboost_write(plan, layer->index, keys, dim, qkv, values, dim, qkv, threads);
    kvboost_layer_end(
        layer, plan, hidden, out, scratch, packed, parts, workspaces, changes, threads
    );
}
