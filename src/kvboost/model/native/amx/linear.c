// Products of bf16 rows with weights that are rearranged once, on a CPU with AMX.
//
// out[m, n] = rows[m, k] weights[n, k]'. A thread takes a panel of weights that fits its cache and
// multiplies all rows with it, 32 at a time: four tiles of sums, two of rows, two of weights. Few
// rows are multiplied with the codes of quantised weights; for many, a panel is expanded to bf16.

#include "tiles.h"

#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ROWS (2 * TILE)
#define COLUMNS (2 * TILE)
#define TILE_SIZE (2 * TILE * TILE) // of bf16
#define PANEL_BYTES (768 << 10)
#define FEW_ROWS 48 // at most so many rows are multiplied with codes

const char *kvboost_instructions(void) { return "AMX"; }

// Asks the system for the tiles.
int kvboost_is_permitted(void) {
    return syscall(SYS_arch_prctl, 0x1023 /* ask for tile data */, 18) == 0;
}

// Rearranges weights [n, k] for the tiles: [n / 32][k / 32][2][16 pairs of k][16 of n, 2].
void kvboost_pack(const bf16 *weights, int32_t n, int32_t k, bf16 *out) {
    for (int column = 0; column < n; column += COLUMNS)
        for (int d = 0; d < k; d += 2 * TILE)
            for (int half = 0; half < COLUMNS; half += TILE, out += TILE_SIZE)
                transpose(weights + (int64_t)(column + half) * k + d, TILE, k, out);
}

// Up to 32 rows, tile by tile: [k / 32][2][16][32].
static void pack_rows(const bf16 *rows, int count, int k, bf16 *out) {
    for (int d = 0; d < k; d += 2 * TILE)
        for (int row = 0; row < ROWS; row++, out += 2 * TILE) {
            const __m512i none = _mm512_setzero_si512();
            _mm512_store_si512(out, row < count ? _mm512_loadu_si512(rows + (int64_t)row * k + d) : none);
        }
}

static void multiply(const bf16 *rows, const bf16 *weights, int k, int both, float *sums) {
    compiler_barrier();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < k / (2 * TILE); d++, rows += 2 * TILE_SIZE, weights += 2 * TILE_SIZE) {
        _tile_loadd(4, rows, 64);
        _tile_loadd(6, weights, 64);
        _tile_loadd(7, weights + TILE_SIZE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_loadd(5, rows + TILE_SIZE, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, COLUMNS * 4);
    _tile_stored(1, sums + TILE, COLUMNS * 4);
    if (both) {
        _tile_stored(2, sums + TILE * COLUMNS, COLUMNS * 4);
        _tile_stored(3, sums + TILE * COLUMNS + TILE, COLUMNS * 4);
    }
}

static inline __m512 gate(__m512 x) {
    const __m512 most = _mm512_set1_ps(120); // a gate that is far shut gives zero, not NaN
    const __m512 less = power_of_2(_mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(-LOG2_E)), most));
    const __m512 whole = _mm512_add_ps(_mm512_set1_ps(1), less);
    __m512 share = _mm512_rcp14_ps(whole); // one Newton step: dividing takes three times as long
    share = _mm512_mul_ps(share, _mm512_fnmadd_ps(share, whole, _mm512_set1_ps(2)));
    return _mm512_mul_ps(x, share);
}

void kvboost_gate(const bf16 *wide, int m, int width, bf16 *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int row = 0; row < m; row++)
        for (int column = 0; column < width; column += TILE) {
            const bf16 *from = wide + 2 * ((int64_t)row * width + column);
            const __m512 share = gate(widen(from));
            store(out + (int64_t)row * width + column, _mm512_mul_ps(share, widen(from + TILE)));
        }
}

// Sums [count, 32] of the columns from `column` on, finished and rounded, to the same rows of out.
static void finish(
    const Linear *linear, const float *sums, int column, int count, const bf16 *residual, bf16 *out
) {
    const int width = linear->gated ? linear->n / 2 : linear->n;
    const int64_t first = linear->gated ? column / 2 : column;
    for (int row = 0; row < count; row++, sums += COLUMNS) {
        const int64_t at = first + (int64_t)row * width;
        __m512 one = _mm512_load_ps(sums), other = _mm512_load_ps(sums + TILE);
        if (linear->bias != NULL) {
            one = _mm512_add_ps(one, widen(linear->bias + column));
            other = _mm512_add_ps(other, widen(linear->bias + column + TILE));
        }
        if (linear->gated) {
            store(out + at, _mm512_mul_ps(gate(one), other));
            continue;
        }
        if (residual != NULL) {
            one = _mm512_add_ps(rounded(one), widen(residual + at));
            other = _mm512_add_ps(rounded(other), widen(residual + at + TILE));
        }
        store(out + at, one);
        store(out + at + TILE, other);
    }
}

// Columns `first` to `end`, in blocks of 32, of quantised weights: the same as kvboost_pack makes.
static void expand_blocks(const Linear *linear, int first, int end, bf16 *out) {
    for (int block = first; block < end; block++, out += (int64_t)COLUMNS * linear->k)
        for (int half = 0; half < 2; half++)
            expand_panel(linear->panels + 2 * block + half, linear->k, out + half * TILE_SIZE);
}

// rows [m, k] and out [m, n], or [m, n / 2] if gated, contiguous. Adds the residual, which may be
// out itself. packed has space for the rows, m rounded up to 32, aligned to 64 bytes.
void kvboost_linear(
    const Linear *linear, const bf16 *rows, int32_t m, const bf16 *residual, bf16 *out, bf16 *packed,
    int threads
) {
    const int n = linear->n, k = linear->k, width = linear->gated ? n / 2 : n;
    const int blocks = n / COLUMNS, fitting = PANEL_BYTES / (COLUMNS * k * (int)sizeof(bf16));
    const int least = fitting > 0 ? (blocks + fitting - 1) / fitting : blocks;
    const int each = (least + threads - 1) / threads, panels = (each > 2 ? each : 2) * threads;
    const int64_t block_size = (int64_t)COLUMNS * k, panel_size = (blocks / panels + 1) * block_size;
    bf16 *expanded = NULL; // a panel of each thread
    if (linear->panels != NULL) {
        if (m > FEW_ROWS && n % COLUMNS == 0)
            expanded = aligned_alloc(64, threads * panel_size * sizeof(bf16));
        if (expanded == NULL) {
            kvboost_quantized_linear(linear, rows, m, residual, out, packed, threads);
            return;
        }
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float sums[ROWS * COLUMNS] __attribute__((aligned(64)));
        bf16 *mine = expanded == NULL ? NULL : expanded + omp_get_thread_num() * panel_size;
        TileConfig before;
        configure_tiles(&before);
#pragma omp for schedule(static)
        for (int row = 0; row < m; row += ROWS)
            pack_rows(rows + (int64_t)row * k, m - row, k, packed + (int64_t)row * k);
#pragma omp for schedule(dynamic, 1)
        for (int panel = 0; panel < panels; panel++) { // the same number and size for every thread
            const int first = blocks * panel / panels, end = blocks * (panel + 1) / panels;
            const bf16 *weights = mine;
            if (mine == NULL)
                weights = (const bf16 *)linear->weights + first * block_size;
            else
                expand_blocks(linear, first, end, mine);
            for (int row = 0; row < m; row += ROWS) {
                const int count = m - row < ROWS ? m - row : ROWS;
                const int64_t at = (int64_t)row * width;
                for (int block = first; block < end; block++) {
                    multiply(packed + (int64_t)row * k, weights + (block - first) * block_size, k,
                             count > TILE, sums);
                    finish(linear, sums, block * COLUMNS, count, residual ? residual + at : NULL,
                           out + at);
                }
            }
        }
        restore_tiles(&before);
    }
    free(expanded);
}
