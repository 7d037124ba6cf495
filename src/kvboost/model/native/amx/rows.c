// RMS norm and rotary positions of bf16 rows, rounded where stock transformers rounds.

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

void kvboost_rotate(
    bf16 *rows, int m, int width, int heads, int dim, const bf16 *cos, const bf16 *sin, int threads
) {
    const int half = dim / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && m > 64)
    for (int row = 0; row < m; row++)
        for (int head = 0; head < heads; head++) {
            bf16 *low = rows + (int64_t)row * width + head * dim, *high = low + half;
            const bf16 *c = cos + (int64_t)row * dim, *s = sin + (int64_t)row * dim;
            for (int d = 0; d < half; d += 16) {
                const __m512 x = widen(low + d), y = widen(high + d);
                const __m512 to_low = _mm512_mul_ps(y, widen(s + d));
                const __m512 to_high = _mm512_mul_ps(x, widen(s + half + d));
                const __m512 new_low = rounded(_mm512_mul_ps(x, widen(c + d)));
                const __m512 new_high = rounded(_mm512_mul_ps(y, widen(c + half + d)));
                store(low + d, _mm512_sub_ps(new_low, rounded(to_low)));
                store(high + d, _mm512_add_ps(new_high, rounded(to_high)));
            }
        }
}
