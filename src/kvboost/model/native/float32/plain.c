// Products of a few float32 rows with weights as the model has them, [n, k].
//
// An output head is often the embedding, too: a rearranged copy of it would take as much memory
// once more. Here sums run along the rows of the weights, one vector of sums for each row and
// column, so that weights are read once, in order. Every sum has the same order, whatever rows are
// beside it.

#include "vectors.h"

#define TILE_COLUMNS 4
#define TILE_ROWS (REGISTERS >= 32 ? 6 : 2) // their sums fill three quarters of the registers
#define GROUP 32                            // columns that stay in the cache while rows pass

// `count` and `columns` are constants wherever this is inlined, so all sums are in registers.
INLINE void multiply_tile(
    const int count, const int columns, const float *rows, const float *weights, int k, float *out,
    int64_t out_stride
) {
    vec sums[6][TILE_COLUMNS];
    UNROLL
    for (int row = 0; row < count; row++) {
        UNROLL
        for (int c = 0; c < columns; c++) sums[row][c] = (vec){0};
    }
    for (int i = 0; i < k; i += LANES) {
        vec some[TILE_COLUMNS];
        UNROLL
        for (int c = 0; c < columns; c++) {
            some[c] = load(weights + (int64_t)c * k + i);
            __builtin_prefetch(weights + (int64_t)(c + TILE_COLUMNS) * k + i, 0, 2);
        }
        UNROLL
        for (int row = 0; row < count; row++) {
            const vec numbers = load(rows + (int64_t)row * k + i);
            UNROLL
            for (int c = 0; c < columns; c++)
                sums[row][c] = add_product(sums[row][c], numbers, some[c]);
        }
    }
    UNROLL
    for (int row = 0; row < count; row++) {
        UNROLL
        for (int c = columns; c < TILE_COLUMNS; c++) sums[row][c] = (vec){0};
        const quad found = sums_of(sums[row]);
        memcpy(out + row * out_stride, &found, columns * sizeof(float));
    }
}

#define CASE(n)                                                                                 \
    if (n <= TILE_ROWS && count - row >= n) {                                                   \
        multiply_tile(n <= TILE_ROWS ? n : 1, columns, rows + (int64_t)row * k, weights, k,     \
                      out + row * out_stride, out_stride);                                      \
        row += n;                                                                               \
        continue;                                                                               \
    }

INLINE void multiply_columns(
    const int columns, const float *rows, int count, const float *weights, int k, float *out,
    int64_t out_stride
) {
    for (int row = 0; row < count;) {
        CASE(6)
        CASE(5)
        CASE(4)
        CASE(3)
        CASE(2)
        CASE(1)
    }
}

// out[m, n] = rows[m, k] weights[n, k]'; k is a multiple of 16.
void kvboost_plain_linear(
    const float *rows, int32_t m, const float *weights, int32_t n, int32_t k, float *out,
    int threads
) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int first = 0; first < n; first += GROUP) {
        const int end = first + GROUP < n ? first + GROUP : n;
        for (int row = 0; row < m; row += TILE_ROWS) {
            const int count = m - row < TILE_ROWS ? m - row : TILE_ROWS;
            const float *some = rows + (int64_t)row * k;
            float *to = out + (int64_t)row * n;
            int column = first;
            for (; column + TILE_COLUMNS <= end; column += TILE_COLUMNS)
                multiply_columns(TILE_COLUMNS, some, count, weights + (int64_t)column * k, k,
                                 to + column, n);
            for (; column < end; column++)
                multiply_columns(1, some, count, weights + (int64_t)column * k, k, to + column, n);
        }
    }
}
