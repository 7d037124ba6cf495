// Fresh rows, written where later rows find them.

#include "kernels.h"

#include <string.h>

// Writes the fresh rows of one layer, [kv_heads, rows, dim] by the strides, into their places.
void kvboost_write(
    const Plan *plan, int layer, const number *keys, int64_t key_head_stride, int64_t key_row_stride,
    const number *values, int64_t value_head_stride, int64_t value_row_stride, int threads
) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && plan->num_rows > 64)
    for (int row = 0; row < plan->num_rows; row++) {
        const Place *place = plan->places + row;
        for (int head = 0; head < plan->kv_heads; head++) {
            const int64_t to = layer * place->layer_stride + head * place->head_stride;
            memcpy(place->key + to, keys + head * key_head_stride + row * key_row_stride,
                   plan->dim * sizeof(number));
            memcpy(place->value + to, values + head * value_head_stride + row * value_row_stride,
                   plan->dim * sizeof(number));
        }
    }
}
