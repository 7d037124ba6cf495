// RMS norm of bf16 rows, rounded where stock transformers rounds.

#include "tiles.h"

void kvboost_norm(
    const bf16 *rows, int32_t m, int32_t dim, const bf16 *weight, float eps, bf16 *out, int threads
) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && m > 16)
    for (int row = 0; row < m; row++) {
        const bf16 *from = rows + (int64_t)row * dim;
        bf16 *to = out + (int64_t)row * dim;
        __m512 squares = _mm512_setzero_ps();
        for (int d = 0; d < dim; d += 16) {
            const __m512 x = widen(from + d);
            squares = _mm512_fmadd_ps(x, x, squares);
        }
        const float scale = 1 / sqrtf(_mm512_reduce_add_ps(squares) / dim + eps);
        for (int d = 0; d < dim; d += 16) {
            const __m512 x = rounded(_mm512_mul_ps(widen(from + d), _mm512_set1_ps(scale)));
            store(to + d, _mm512_mul_ps(x, widen(weight + d)));
        }
    }
}
