// Products of float32 rows with weights that are rearranged once, on any CPU.
//
// out[m, n] = rows[m, k] weights[n, k]'. A panel is 32 columns of weights; a thread multiplies all
// rows with it, a few at a time. With one row, reading the weights takes all the time. Most models
// are published in bf16, so their float32 weights have 16 low bits of zeros: those panels are kept
// halved, without loss, and take half the time.

#include "vectors.h"

// Rearranges weights [n, k] to [n / 32][k][32].
void kvboost_pack(const float *weights, int32_t n, int32_t k, float *out) {
    for (int column = 0; column < n; column += COLUMNS)
        for (int i = 0; i < k; i++, out += COLUMNS)
            for (int c = 0; c < COLUMNS; c++) out[c] = weights[(int64_t)(column + c) * k + i];
}

// The same, to pairs of bf16: [n / 32][k][16, 2], of which pair i holds columns i and 16 + i.
void kvboost_pack_halved(const float *weights, int32_t n, int32_t k, uint32_t *out) {
    for (int column = 0; column < n; column += COLUMNS)
        for (int i = 0; i < k; i++, out += HALF)
            for (int c = 0; c < HALF; c++) {
                uint32_t low, high;
                memcpy(&low, weights + (int64_t)(column + c) * k + i, sizeof low);
                memcpy(&high, weights + (int64_t)(column + HALF + c) * k + i, sizeof high);
                out[c] = (low >> 16) | (high & 0xffff0000u);
            }
}

INLINE float gate(float x) {
    const float exponent = x * -LOG2_E; // a gate that is far shut gives zero, not NaN
    return x / (1 + power_of_2(exponent > 120 ? 120 : exponent));
}

// Writes sums [count, 32] of the columns from `column` on to the same rows of out.
static void finish(
    const Linear *linear, const float *sums, int column, int count, const float *residual, float *out
) {
    const int width = linear->gated ? linear->n / 2 : linear->n;
    const int64_t first = linear->gated ? column / 2 : column;
    for (int row = 0; row < count; row++, sums += COLUMNS) {
        const int64_t at = first + (int64_t)row * width;
        float biased[COLUMNS];
        for (int c = 0; c < COLUMNS; c++)
            biased[c] = linear->bias == NULL ? sums[c] : sums[c] + linear->bias[column + c];
        if (linear->gated) {
            for (int c = 0; c < HALF; c++) out[at + c] = gate(biased[c]) * biased[HALF + c];
        } else {
            for (int c = 0; c < COLUMNS; c++)
                out[at + c] = residual == NULL ? biased[c] : biased[c] + residual[at + c];
        }
    }
}

// rows [m, k] and out [m, n], or [m, n / 2] if gated, contiguous. Adds the residual, which may be
// out itself. Rows are read as they are: packed is not used.
void kvboost_linear(
    const Linear *linear, const float *rows, int32_t m, const float *residual, float *out,
    float *packed, int threads
) {
    const int k = linear->k, panels = linear->n / COLUMNS;
    const int width = linear->gated ? linear->n / 2 : linear->n;
    (void)packed;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int panel = 0; panel < panels; panel++) {
        const int64_t from = (int64_t)panel * COLUMNS * k;
        for (int row = 0; row < m; row += ROWS) {
            float sums[ROWS * COLUMNS] __attribute__((aligned(64)));
            const int count = m - row < ROWS ? m - row : ROWS;
            const float *some = rows + (int64_t)row * k;
            if (linear->halved)
                multiply_halved(count, k, some, k, (const uint32_t *)linear->weights + from / 2, sums,
                                COLUMNS);
            else
                multiply(count, k, some, k, (const float *)linear->weights + from, COLUMNS, sums,
                         COLUMNS);
            const int64_t at = (int64_t)row * width;
            finish(linear, sums, panel * COLUMNS, count, residual ? residual + at : NULL, out + at);
        }
    }
}
