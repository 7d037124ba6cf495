// What adapters add to the outputs of a product: for some rows each, rows down' up.
//
// In a decode step every row may have weights of its own, and reading these takes most of the time.
// Both products read four rows of weights at a time, which several rows of one adapter share. Every
// sum has the same order, whatever rows are beside it.

#include "float32/vectors.h"
#include "numbers.h"

#define RANKS 4                             // rows of weights that are read at a time
#define TILE_ROWS (REGISTERS >= 32 ? 4 : 2) // rows that are multiplied with them at once
#define TILE 1024                           // columns that are added up before they are written
#define AHEAD 768                           // bytes of each row of weights that are fetched early

INLINE vec load_numbers(const number *from) {
#ifdef KVBOOST_FLOAT32
    return load(from);
#else
    return load_halved(from);
#endif
}

INLINE vec load_weights(const void *weights, int64_t at, const int halved) {
    const char *from = (const char *)weights + at * (halved ? sizeof(bf16) : sizeof(number));
    __builtin_prefetch(from + AHEAD);
    return halved ? load_halved((const bf16 *)from) : load_numbers((const number *)from);
}

// sums[count, rank] of `ranks` rows of `down`, which begin `at` its start. `count`, `ranks` and
// `halved` are constants wherever this is inlined, so all sums are in registers.
INLINE void shrink_tile(
    const int count, const int ranks, const int halved, const Change *change, const number *rows,
    int width, int64_t at, float *sums
) {
    vec parts[TILE_ROWS][RANKS];
    UNROLL
    for (int row = 0; row < count; row++) {
        UNROLL
        for (int j = 0; j < RANKS; j++) parts[row][j] = (vec){0};
    }
    for (int i = 0; i < width; i += LANES) {
        vec weights[RANKS];
        UNROLL
        for (int j = 0; j < ranks; j++)
            weights[j] = load_weights(change->down, at + (int64_t)j * width + i, halved);
        UNROLL
        for (int row = 0; row < count; row++) {
            const vec numbers = load_numbers(rows + (int64_t)row * width + i);
            UNROLL
            for (int j = 0; j < ranks; j++)
                parts[row][j] = add_product(parts[row][j], numbers, weights[j]);
        }
    }
    UNROLL
    for (int row = 0; row < count; row++) {
        const quad found = sums_of(parts[row]);
        memcpy(sums + (int64_t)row * change->rank, &found, ranks * sizeof(float));
    }
}

// Adds sums[count, rank] times `ranks` rows of `up` to added[count, TILE]. The columns begin `at`
// the start of `up`. Constants as above.
INLINE void expand_tile(
    const int count, const int ranks, const int halved, const Change *change, const float *sums,
    int64_t at, int columns, float (*added)[TILE]
) {
    for (int c = 0; c < columns; c += LANES) {
        vec weights[RANKS];
        UNROLL
        for (int j = 0; j < ranks; j++)
            weights[j] = load_weights(change->up, at + (int64_t)j * change->width + c, halved);
        UNROLL
        for (int row = 0; row < count; row++) {
            vec sum = load(added[row] + c);
            UNROLL
            for (int j = 0; j < ranks; j++)
                sum = add_product(
                    sum, everywhere(sums[(int64_t)row * change->rank + j]), weights[j]
                );
            store(added[row] + c, sum);
        }
    }
}

INLINE void shrink_ranks(
    const int ranks, const int halved, const Change *change, const number *rows, int width, int first,
    float *sums
) {
    const int64_t at = (int64_t)first * width;
    int row = 0;
    for (; row + TILE_ROWS <= change->num_rows; row += TILE_ROWS)
        shrink_tile(TILE_ROWS, ranks, halved, change, rows + (int64_t)row * width, width, at,
                    sums + (int64_t)row * change->rank + first);
    for (; row < change->num_rows; row++)
        shrink_tile(1, ranks, halved, change, rows + (int64_t)row * width, width, at,
                    sums + (int64_t)row * change->rank + first);
}

// sums[num_rows, rank] from rank `first` to `end`: each row times a row of `down`.
INLINE void shrink(
    const int halved, const Change *change, const number *rows, int width, int first, int end,
    float *sums
) {
    for (; first + RANKS <= end; first += RANKS)
        shrink_ranks(RANKS, halved, change, rows, width, first, sums);
    for (; first < end; first++) shrink_ranks(1, halved, change, rows, width, first, sums);
}

// Adds what `count` rows get in columns `column` to `column + columns` of the change to out.
INLINE void expand_rows(
    const int count, const int halved, const Change *change, const float *sums, int column,
    int columns, number *out, int out_width
) {
    float added[TILE_ROWS][TILE] __attribute__((aligned(64)));
    for (int row = 0; row < count; row++) memset(added[row], 0, columns * sizeof(float));
    int j = 0;
    for (; j + RANKS <= change->rank; j += RANKS)
        expand_tile(count, RANKS, halved, change, sums + j, (int64_t)j * change->width + column,
                    columns, added);
    for (; j < change->rank; j++)
        expand_tile(count, 1, halved, change, sums + j, (int64_t)j * change->width + column, columns,
                    added);
    for (int row = 0; row < count; row++)
        for (int c = 0; c < columns; c += HALF) {
            const int at = change->interleaved ? 2 * (column + c) : column + c;
            number *to = out + (int64_t)row * out_width + change->column + at;
#pragma omp simd
            for (int lane = 0; lane < HALF; lane++)
                to[lane] = as_number(as_float(to[lane]) + added[row][c + lane]);
        }
}

// Adds sums times `up` to columns `first` to `end` of the change, at their places in out.
INLINE void expand(
    const int halved, const Change *change, const float *sums, int first, int end, number *out,
    int out_width
) {
    for (int column = first; column < end; column += TILE) {
        const int columns = end - column < TILE ? end - column : TILE;
        int row = 0;
        for (; row + TILE_ROWS <= change->num_rows; row += TILE_ROWS)
            expand_rows(TILE_ROWS, halved, change, sums + (int64_t)row * change->rank, column,
                        columns, out + (int64_t)row * out_width, out_width);
        for (; row < change->num_rows; row++)
            expand_rows(1, halved, change, sums + (int64_t)row * change->rank, column, columns,
                        out + (int64_t)row * out_width, out_width);
    }
}

// The ranks from `first` to `end` of one change: the first product.
static void shrink_change(
    const Change *change, const number *rows, int width, int first, int end, float *sums
) {
    if (change->halved)
        shrink(1, change, rows, width, first, end, sums);
    else
        shrink(0, change, rows, width, first, end, sums);
}

// The columns from `first` to `end` of one change: the second product.
static void expand_change(
    const Change *change, const float *sums, int first, int end, number *out, int out_width
) {
    if (change->halved)
        expand(1, change, sums, first, end, out, out_width);
    else
        expand(0, change, sums, first, end, out, out_width);
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
                shrink_change(change, rows + (int64_t)change->first * width, width,
                              change->rank * share / shares, change->rank * (share + 1) / shares,
                              sums);
            if (expands) {
                const int blocks = change->rank ? change->width / HALF : 0;
                expand_change(change, sums, blocks * share / shares * HALF,
                              blocks * (share + 1) / shares * HALF,
                              out + (int64_t)change->first * out_width, out_width);
            }
        }
    }
}
