// Products of rows with quantised weights.
//
// out[m, n] = rows[m, k] weights[n, k]'. Rows are rounded to 8 bits, so that codes are multiplied
// with codes. Rows of two codes are multiplied as two rows, and the sums of both are added up at the
// end. With few rows, reading the weights takes all the time. Many rows are multiplied in blocks that
// fit the second cache. Every sum has the same order, whatever rows are beside it.

#include "../float32/vectors.h"
#include "../numbers.h"
#include "panels.h"

#define FEW_ROWS 16     // at most so many rows are multiplied with one panel after the other
#define BLOCK_ROWS 128  // more rows are multiplied in blocks: of rows,
#define BLOCK_PANELS 16 // of columns, 16 each,
#define BLOCK_DEPTH 1024 // and of what is added up

static const uint8_t *tile_at(const uint8_t *packed, int row, int count, int k, int depth) {
    return packed + ((int64_t)row * k + (int64_t)count * depth) / BLOCK * ROW_BLOCK_BYTES;
}

// Writes sums [count, 16] of the columns from `column` on to the same rows of out.
static void finish(
    const Linear *linear, const float *sums, int column, int count, const number *residual,
    number *out
) {
    for (int row = 0; row < count; row++, sums += PANEL) {
        const int64_t at = (int64_t)row * linear->n + column;
        for (int c = 0; c < PANEL; c++) {
            float sum = sums[c];
            if (linear->bias != NULL) sum += as_float(linear->bias[column + c]);
            if (residual != NULL) sum += as_float(residual[at + c]);
            out[at + c] = as_number(sum);
        }
    }
}

// The same for the panel of gates from `column` on and the panel of values after it.
static void finish_gated(
    const Linear *linear, const float *gates, const float *values, int column, int count,
    number *out
) {
    for (int row = 0; row < count; row++, gates += PANEL, values += PANEL) {
        float both[2][PANEL] __attribute__((aligned(64)));
        for (int c = 0; c < PANEL; c++) {
            both[0][c] = gates[c], both[1][c] = values[c];
            if (linear->bias != NULL) {
                both[0][c] += as_float(linear->bias[column + c]);
                both[1][c] += as_float(linear->bias[column + PANEL + c]);
            }
        }
        for (int c = 0; c < PANEL; c += LANES)
            store(both[0] + c, gate(load(both[0] + c), load(both[1] + c)));
        number *to = out + (int64_t)row * (linear->n / 2) + column / 2;
        for (int c = 0; c < PANEL; c++) to[c] = as_number(both[0][c]);
    }
}

// Adds the sums [count, 16] of the second codes of rows to those of the first, which are before them.
static void add_fine(float *sums, int count) {
    for (int i = 0; i < count / 2 * PANEL; i++) {
        const float *first = sums + i / PANEL * 2 * PANEL + i % PANEL;
        sums[i] = first[0] + first[PANEL];
    }
}

typedef struct {
    float sums[BLOCK_PANELS][BLOCK_ROWS * PANEL];
} __attribute__((aligned(64))) Block;

// Sums of rows from `row` to `row + count` with some panels, one panel after the other.
static void multiply_few(
    const Linear *linear, const uint8_t *packed, int row, int count, int first, int panels,
    Block *block
) {
    const int k = linear->k;
    for (int p = 0; p < panels; p++) {
        const Panel *panel = linear->panels + first + p;
        for (int at = 0, rows; at < count; at += rows) {
            rows = tile_rows(count - at);
            multiply_tile(panel->coding, panel->data, tile_at(packed, row + at, rows, k, 0), rows,
                          k / BLOCK, 0, block->sums[p] + at * PANEL);
        }
    }
}

// How many inputs of a panel are added up before the next panel has its turn: whole units.
static int depth_of(const Coding *coding, int k) {
    const int unit = unit_depth(coding), depth = BLOCK_DEPTH / unit * unit;
    return depth > k ? k : depth > unit ? depth : unit;
}

// The same for many rows: a part of some panels stays in the cache while all rows are multiplied.
static void multiply_many(
    const Linear *linear, const uint8_t *packed, int row, int count, int first, int panels,
    Block *block
) {
    const int k = linear->k;
    int done[BLOCK_PANELS] = {0}; // inputs of each panel
    for (int more = 1; more;) {
        for (int at = 0, rows; at < count; at += rows) {
            rows = tile_rows(count - at);
            for (int p = 0; p < panels; p++) {
                const Panel *panel = linear->panels + first + p;
                const Coding *coding = panel->coding;
                const int depth = depth_of(coding, k), left = k - done[p];
                const int64_t units = done[p] / unit_depth(coding);
                if (left > 0)
                    multiply_tile(coding, panel->data + units * unit_bytes(coding),
                                  tile_at(packed, row + at, rows, k, done[p]), rows,
                                  (left < depth ? left : depth) / BLOCK, done[p] > 0,
                                  block->sums[p] + at * PANEL);
            }
        }
        more = 0;
        for (int p = 0; p < panels; p++) {
            done[p] += depth_of(linear->panels[first + p].coding, k);
            more |= done[p] < k;
        }
    }
}

// rows [m, k] and out [m, n], or [m, n / 2] if gated, contiguous. Adds the residual, which may be
// out itself. packed has space for 2 k bytes for each row, or 4 k bytes if rows have two codes.
void kvboost_quantized_linear(
    const Linear *linear, const number *rows, int32_t m, const number *residual, number *out,
    number *packed, int threads
) {
    const int k = linear->k, panels = linear->n / PANEL, step = linear->gated ? 2 : 1;
    const int fine = linear->fine, each = fine ? 2 : 1, lines = m * each; // each row is so many lines
    const int width = linear->n / step, blocks = (lines + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int share = panels * blocks / (4 * threads) / step * step; // every thread has work
    const int most = share < step ? step : share < BLOCK_PANELS ? share : BLOCK_PANELS;
    const int groups = (panels + most - 1) / most, parts = k / BLOCK;
    uint8_t *codes = (uint8_t *)packed;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int part = 0; part < blocks * threads; part++) { // a share of the inputs of a block
            const int first = part / threads * BLOCK_ROWS, share = part % threads;
            const int end = lines < first + BLOCK_ROWS ? lines : first + BLOCK_ROWS;
            const int from = parts * share / threads, to = parts * (share + 1) / threads;
            for (int row = first, count; row < end; row += count) {
                count = tile_rows(end - row);
                uint8_t *place = codes + (tile_at(codes, row, count, k, from * BLOCK) - codes);
                quantize_tile(rows + (int64_t)(row / each) * k, count, k, from * BLOCK, to - from,
                              fine, place);
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (int task = 0; task < groups * blocks; task++) {
            Block block;
            const int first = task % groups * most, line = task / groups * BLOCK_ROWS;
            const int some = panels - first < most ? panels - first : most;
            const int together = lines - line < BLOCK_ROWS ? lines - line : BLOCK_ROWS;
            (together <= FEW_ROWS ? multiply_few : multiply_many)(
                linear, codes, line, together, first, some, &block
            );
            const int row = line / each, count = together / each;
            for (int p = 0; fine && p < some; p++) add_fine(block.sums[p], together);
            number *to = out + (int64_t)row * width;
            for (int p = 0; p < some; p += step) {
                const int column = (first + p) * PANEL;
                if (linear->gated)
                    finish_gated(linear, block.sums[p], block.sums[p + 1], column, count, to);
                else
                    finish(linear, block.sums[p], column, count,
                           residual ? residual + (int64_t)row * width : NULL, to);
            }
        }
    }
}
