// The one small matrix product that attention and linear layers consist of, in registers.

#include "vectors.h"

#define AHEAD 4096 // bytes of weights that are fetched before they are needed

const char *kvboost_instructions(void) { return INSTRUCTIONS; }

int kvboost_is_permitted(void) { return 1; }

// One row of a matrix, 32 columns. Halved, it is 16 pairs of bf16: column i and column 16 + i.
INLINE void load_columns(vec *columns, const void *from, const int halved) {
    if (halved) {
        UNROLL
        for (int v = 0; v < VECTORS / 2; v++) {
            const bits pairs = *(const unaligned_bits *)((const uint32_t *)from + v * LANES);
            columns[v] = (vec)(pairs << 16);
            columns[VECTORS / 2 + v] = (vec)(pairs & 0xffff0000u);
        }
    } else {
        UNROLL
        for (int v = 0; v < VECTORS; v++) columns[v] = load((const float *)from + v * LANES);
    }
}

// `count`, `halved` and `adds` are constants wherever this is inlined, so all sums are in
// registers.
INLINE void multiply_rows(
    const int count, const int halved, const int adds, const float *rows, int64_t row_stride,
    const void *matrix, int64_t matrix_stride, int k, float *out, int64_t out_stride
) {
    vec sums[ROWS][VECTORS];
    UNROLL
    for (int row = 0; row < count; row++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++)
            sums[row][v] = adds ? load(out + row * out_stride + v * LANES) : (vec){0};
    }
    for (int i = 0; i < k; i++) {
        vec columns[VECTORS];
        const uint32_t *from = (const uint32_t *)matrix + i * matrix_stride;
        load_columns(columns, from, halved);
        if (halved) __builtin_prefetch((const char *)from + AHEAD, 0, 2);
        UNROLL
        for (int row = 0; row < count; row++) {
            UNROLL
            for (int v = 0; v < VECTORS; v++)
                sums[row][v] =
                    add_product(sums[row][v], everywhere(rows[row * row_stride + i]), columns[v]);
        }
    }
    UNROLL
    for (int row = 0; row < count; row++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++)
            store(out + row * out_stride + v * LANES, sums[row][v]);
    }
}

// Multiplies `count` rows, as many at once as there are registers for. Each number of rows at once is
// a constant.
#define CASE(n, halved, adds)                                                                   \
    case n:                                                                                     \
        multiply_rows(n <= ROWS ? n : 1, halved, adds, rows + row * row_stride, row_stride,     \
                      matrix, matrix_stride, k, out + row * out_stride, out_stride);            \
        break;
#define FOR_ALL_ROWS(halved, adds)                                                              \
    for (int row = 0; row < count; row += ROWS) {                                               \
        switch (count - row < ROWS ? count - row : ROWS) {                                      \
            CASE(1, halved, adds)                                                               \
            CASE(2, halved, adds)                                                               \
            CASE(3, halved, adds)                                                               \
            CASE(4, halved, adds)                                                               \
            CASE(5, halved, adds)                                                               \
            CASE(6, halved, adds)                                                               \
            CASE(7, halved, adds)                                                               \
            CASE(8, halved, adds)                                                               \
            CASE(9, halved, adds)                                                               \
            CASE(10, halved, adds)                                                              \
            CASE(11, halved, adds)                                                              \
            CASE(12, halved, adds)                                                              \
        }                                                                                       \
    }
_Static_assert(ROWS <= 12, "there is a case for every number of rows");

void multiply(
    int count, int k, const float *rows, int64_t row_stride, const float *matrix,
    int64_t matrix_stride, float *out, int64_t out_stride
) {
    FOR_ALL_ROWS(0, 0)
}

void multiply_add(
    int count, int k, const float *rows, int64_t row_stride, const float *matrix,
    int64_t matrix_stride, float *out, int64_t out_stride
) {
    FOR_ALL_ROWS(0, 1)
}

void multiply_halved(
    int count, int k, const float *rows, int64_t row_stride, const uint32_t *matrix, float *out,
    int64_t out_stride
) {
    const int64_t matrix_stride = HALF;
    FOR_ALL_ROWS(1, 0)
}

void widen(const uint32_t *halved, int k, float *out) {
    for (int i = 0; i < k; i++) {
        vec columns[VECTORS];
        load_columns(columns, halved + i * HALF, 1);
        UNROLL
        for (int v = 0; v < VECTORS; v++) store(out + i * COLUMNS + v * LANES, columns[v]);
    }
}
