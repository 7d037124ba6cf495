// RMS norm and rotary positions of float32 rows.

#include "vectors.h"

void kvboost_norm(
    const float *rows, int32_t m, int32_t dim, const float *weight, float eps, float *out, int threads
) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && m > 16)
    for (int row = 0; row < m; row++) {
        const float *from = rows + (int64_t)row * dim;
        float *to = out + (int64_t)row * dim, squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int d = 0; d < dim; d++) squares += from[d] * from[d];
        const float scale = 1 / sqrtf(squares / dim + eps);
#pragma omp simd
        for (int d = 0; d < dim; d++) to[d] = weight[d] * (from[d] * scale);
    }
}

void kvboost_rotate(
    float *rows, int m, int width, int heads, int dim, const float *cos, const float *sin, int threads
) {
    const int half = dim / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && m > 64)
    for (int row = 0; row < m; row++)
        for (int head = 0; head < heads; head++) {
            float *low = rows + (int64_t)row * width + head * dim, *high = low + half;
            const float *c = cos + (int64_t)row * dim, *s = sin + (int64_t)row * dim;
#pragma omp simd
            for (int d = 0; d < half; d++) {
                const float x = low[d], y = high[d];
                low[d] = x * c[d] - y * s[d];
                high[d] = y * c[half + d] + x * s[half + d];
            }
        }
}
