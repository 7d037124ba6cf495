// What adapters add to the outputs of a product: for some rows each, rows down' up.

#include "numbers.h"

#define LANES 16   // columns of outputs come in multiples of this
#define TILE 1024 // columns that are added up at a time: long runs of `up`

static float dot(const number *x, const number *weights, int count) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < count; i++) sum += as_float(x[i]) * as_float(weights[i]);
    return sum;
}

static float dot_halved(const number *x, const bf16 *weights, int count) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < count; i++) sum += as_float(x[i]) * half_as_float(weights[i]);
    return sum;
}

static void add(float *to, float times, const number *weights, int count) {
#pragma omp simd
    for (int i = 0; i < count; i++) to[i] += times * as_float(weights[i]);
}

static void add_halved(float *to, float times, const bf16 *weights, int count) {
#pragma omp simd
    for (int i = 0; i < count; i++) to[i] += times * half_as_float(weights[i]);
}

// sums[num_rows, rank] from rank `first` to `end`: each row times a row of `down`.
static void shrink(
    const Change *change, const number *rows, int width, int first, int end, float *sums
) {
    for (int j = first; j < end; j++) {
        const int64_t at = (int64_t)j * width;
        for (int row = 0; row < change->num_rows; row++) {
            const number *from = rows + (int64_t)row * width;
            sums[(int64_t)row * change->rank + j] =
                change->halved ? dot_halved(from, (const bf16 *)change->down + at, width)
                               : dot(from, (const number *)change->down + at, width);
        }
    }
}

// Adds sums times `up` to columns `first` to `end` of the change, at their places in out.
static void expand(
    const Change *change, const float *sums, int first, int end, number *out, int out_width
) {
    for (int column = first; column < end; column += TILE) {
        const int count = end - column < TILE ? end - column : TILE;
        for (int row = 0; row < change->num_rows; row++) {
            float added[TILE] __attribute__((aligned(64)));
            memset(added, 0, count * sizeof *added);
            for (int j = 0; j < change->rank; j++) {
                const float times = sums[(int64_t)row * change->rank + j];
                const int64_t at = (int64_t)j * change->width + column;
                if (change->halved)
                    add_halved(added, times, (const bf16 *)change->up + at, count);
                else
                    add(added, times, (const number *)change->up + at, count);
            }
            for (int c = 0; c < count; c += LANES) {
                const int at = change->interleaved ? 2 * (column + c) : column + c;
                number *to = out + (int64_t)row * out_width + change->column + at;
#pragma omp simd
                for (int lane = 0; lane < LANES; lane++)
                    to[lane] = as_number(as_float(to[lane]) + added[c + lane]);
            }
        }
    }
}

int kvboost_has_changes(const Change *changes, int count) {
    for (int i = 0; i < count; i++)
        if (changes[i].rank) return 1;
    return 0;
}

void kvboost_adapt(
    const Changes *all, const Change *changes, int parts, const number *rows, int m, int width,
    number *out, int out_width, int threads
) {
    const int count = parts * all->num_runs;
    if (!kvboost_has_changes(changes, count)) return;
    // With many short runs, each is one task, and no thread waits between the two products.
    const int shares = count < 2 * threads || m > 2 * all->num_runs ? threads : 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int expands = shares == 1; expands < 2; expands++) {
#pragma omp for schedule(dynamic, 1)
        for (int task = 0; task < count * shares; task++) {
            const Change *change = changes + task / shares;
            const int64_t place = (int64_t)(task / shares / all->num_runs) * m + change->first;
            float *sums = all->sums + place * all->most_rank;
            const int share = task % shares;
            if (!expands || shares == 1)
                shrink(change, rows + (int64_t)change->first * width, width,
                       change->rank * share / shares, change->rank * (share + 1) / shares, sums);
            if (expands) {
                const int blocks = change->rank ? change->width / LANES : 0;
                expand(change, sums, blocks * share / shares * LANES,
                       blocks * (share + 1) / shares * LANES,
                       out + (int64_t)change->first * out_width, out_width);
            }
        }
    }
}
