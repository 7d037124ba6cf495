// Products of float32 rows with weights that are rearranged once, on any CPU.
//
// out[m, n] = rows[m, k] weights[n, k]'. A panel is 32 columns of weights; a thread multiplies all
// rows with it, a few at a time. With one row, reading the weights takes all the time. Most models
// are published in bf16, so their float32 weights have 16 low bits of zeros: those panels are kept
// halved, without loss, and take half the time. Many rows are multiplied in blocks that fit the
// caches, and halved weights are widened once for each block.

#include "vectors.h"

#define FEW_ROWS 48     // at most so many rows are multiplied with one panel after the other
#define BLOCK_ROWS 96   // more rows are multiplied in blocks: of rows,
#define BLOCK_PANELS 8  // of columns,
#define BLOCK_DEPTH 256 // and of what is added up
#define ROW_STRIDE (BLOCK_DEPTH + 16) // rows of a block do not compete for the same cache lines

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

void kvboost_gate(const float *wide, int m, int width, float *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int row = 0; row < m; row++)
        for (int column = 0; column < width; column += HALF) {
            const float *from = wide + 2 * ((int64_t)row * width + column);
            float *to = out + (int64_t)row * width + column;
            for (int c = 0; c < HALF; c += LANES)
                store(to + c, gate(load(from + c), load(from + HALF + c)));
        }
}

// Writes sums [count, 32] of the columns from `column` on to the same rows of out.
static void finish(
    const Linear *linear, float *sums, int column, int count, const float *residual, float *out
) {
    const int width = linear->gated ? linear->n / 2 : linear->n;
    const int64_t first = linear->gated ? column / 2 : column;
    for (int row = 0; row < count; row++, sums += COLUMNS) {
        const int64_t at = first + (int64_t)row * width;
        if (linear->bias != NULL)
            for (int c = 0; c < COLUMNS; c += LANES)
                store(sums + c, load(sums + c) + load(linear->bias + column + c));
        if (linear->gated) {
            for (int c = 0; c < HALF; c += LANES)
                store(out + at + c, gate(load(sums + c), load(sums + HALF + c)));
        } else if (residual != NULL) {
            for (int c = 0; c < COLUMNS; c += LANES)
                store(out + at + c, load(sums + c) + load(residual + at + c));
        } else {
            memcpy(out + at, sums, COLUMNS * sizeof(float));
        }
    }
}

typedef struct {
    float sums[BLOCK_PANELS][BLOCK_ROWS * COLUMNS];
    float rows[BLOCK_ROWS * ROW_STRIDE];
    float panel[BLOCK_DEPTH * COLUMNS];
} __attribute__((aligned(64))) Block;

// Sums of rows [count, k] with some panels. A part of the rows is copied to where it stays in the
// cache while all panels are multiplied with it; a part of a panel, while all rows are. Every sum
// has the same order as with few rows.
static void multiply_block(
    const Linear *linear, const float *rows, int count, int first, int panels, Block *block
) {
    const int k = linear->k;
    for (int i = 0; i < k; i += BLOCK_DEPTH) {
        const int depth = k - i < BLOCK_DEPTH ? k - i : BLOCK_DEPTH;
        for (int row = 0; row < count; row++)
            memcpy(block->rows + row * ROW_STRIDE, rows + (int64_t)row * k + i,
                   depth * sizeof(float));
        for (int p = 0; p < panels; p++) {
            const int64_t at = ((int64_t)(first + p) * k + i) * COLUMNS;
            const float *panel = (const float *)linear->weights + at;
            if (linear->halved) {
                widen((const uint32_t *)linear->weights + at / 2, depth, block->panel);
                panel = block->panel;
            }
            (i ? multiply_add : multiply)(count, depth, block->rows, ROW_STRIDE, panel, COLUMNS,
                                          block->sums[p], COLUMNS);
        }
    }
}

// kvboost_linear for at most FEW_ROWS rows: reading the weights takes most of the time.
static void multiply_few(
    const Linear *linear, const float *rows, int m, const float *residual, float *out, int threads
) {
    const int k = linear->k;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int panel = 0; panel < linear->n / COLUMNS; panel++) {
        float sums[FEW_ROWS * COLUMNS] __attribute__((aligned(64)));
        const int64_t from = (int64_t)panel * COLUMNS * k;
        if (linear->halved)
            multiply_halved(m, k, rows, k, (const uint32_t *)linear->weights + from / 2, sums,
                            COLUMNS);
        else
            multiply(m, k, rows, k, (const float *)linear->weights + from, COLUMNS, sums, COLUMNS);
        finish(linear, sums, panel * COLUMNS, m, residual, out);
    }
}

// rows [m, k] and out [m, n], or [m, n / 2] if gated, contiguous. Adds the residual, which may be
// out itself. packed is used by quantised weights only.
void kvboost_linear(
    const Linear *linear, const float *rows, int32_t m, const float *residual, float *out,
    float *packed, int threads
) {
    if (linear->panels != NULL) {
        kvboost_quantized_linear(linear, rows, m, residual, out, packed, threads);
        return;
    }
    if (m <= FEW_ROWS) {
        multiply_few(linear, rows, m, residual, out, threads);
        return;
    }
    const int width = linear->gated ? linear->n / 2 : linear->n, panels = linear->n / COLUMNS;
    const int blocks = (m + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int share = panels * blocks / (2 * threads); // every thread has work
    const int most = share < 1 ? 1 : share < BLOCK_PANELS ? share : BLOCK_PANELS;
    const int groups = (panels + most - 1) / most;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int task = 0; task < groups * blocks; task++) {
        Block block;
        const int first = task % groups * most, row = task / groups * BLOCK_ROWS;
        const int some = panels - first < most ? panels - first : most;
        const int count = m - row < BLOCK_ROWS ? m - row : BLOCK_ROWS;
        const int64_t at = (int64_t)row * width;
        multiply_block(linear, rows + (int64_t)row * linear->k, count, first, some, &block);
        for (int p = 0; p < some; p++)
            finish(linear, block.sums[p], (first + p) * COLUMNS, count,
                   residual ? residual + at : NULL, out + at);
    }
}
