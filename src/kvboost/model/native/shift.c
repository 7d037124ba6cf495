// Offsets added to known rows of one layer: what reuse/shift.py has found out about moved text.

#include "tiles.h"

// keys and values are [heads, ...] by their stride, from the first of `count` rows on; row r gets
// offset which[r] of [heads, offsets, dim]: keys along * cos[r] + across * sin[r], values theirs.
// The last offset is that of rows that stay as they are.
void kvboost_shift(
    bf16 *keys, bf16 *values, int64_t head_stride, int32_t heads, int32_t dim, int32_t count,
    const int64_t *which, int32_t offsets, const float *along, const float *across,
    const float *of_values, const bf16 *cos, const bf16 *sin, int threads
) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int row = 0; row < count; row++) {
        if (which[row] == offsets - 1) continue;
        const bf16 *c = cos + (int64_t)row * dim, *s = sin + (int64_t)row * dim;
        for (int head = 0; head < heads; head++) {
            const int64_t at = head * head_stride + (int64_t)row * dim;
            const int64_t from = (head * offsets + which[row]) * dim;
            for (int d = 0; d < dim; d += 16) {
                __m512 key = widen(keys + at + d);
                key = _mm512_fmadd_ps(_mm512_loadu_ps(along + from + d), widen(c + d), key);
                key = _mm512_fmadd_ps(_mm512_loadu_ps(across + from + d), widen(s + d), key);
                store(keys + at + d, key);
                const __m512 value = _mm512_loadu_ps(of_values + from + d);
                store(values + at + d, _mm512_add_ps(widen(values + at + d), value));
            }
        }
    }
}
