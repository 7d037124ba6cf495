// What ../moved_rows.h does with one row, in bf16.

#include "tiles.h"

static float square_of(const bf16 *fresh, const bf16 *stale, int dim) {
    __m512 sum = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 16) {
        const __m512 error = _mm512_sub_ps(widen(fresh + d), widen(stale + d));
        sum = _mm512_fmadd_ps(error, error, sum);
    }
    return _mm512_reduce_add_ps(sum);
}

// Adds weight * (fresh - stale) to by_cos; if there is by_sin, times cos, and times sin to that.
static void add_error(
    const bf16 *fresh, const bf16 *stale, float weight, int dim, const float *cos, const float *sin,
    float *by_cos, float *by_sin
) {
    for (int d = 0; d < dim; d += 16) {
        __m512 error = _mm512_sub_ps(widen(fresh + d), widen(stale + d));
        error = _mm512_mul_ps(error, _mm512_set1_ps(weight));
        const __m512 sum = _mm512_loadu_ps(by_cos + d);
        if (by_sin == NULL) {
            _mm512_storeu_ps(by_cos + d, _mm512_add_ps(error, sum));
            continue;
        }
        const __m512 other = _mm512_loadu_ps(by_sin + d);
        _mm512_storeu_ps(by_cos + d, _mm512_fmadd_ps(error, _mm512_loadu_ps(cos + d), sum));
        _mm512_storeu_ps(by_sin + d, _mm512_fmadd_ps(error, _mm512_loadu_ps(sin + d), other));
    }
}

// key += along * cos + across * sin; value += of_value.
static void shift_row(
    bf16 *key, bf16 *value, int dim, const float *along, const float *across,
    const float *of_value, const bf16 *cos, const bf16 *sin
) {
    for (int d = 0; d < dim; d += 16) {
        __m512 sum = widen(key + d);
        sum = _mm512_fmadd_ps(_mm512_loadu_ps(along + d), widen(cos + d), sum);
        sum = _mm512_fmadd_ps(_mm512_loadu_ps(across + d), widen(sin + d), sum);
        store(key + d, sum);
        store(value + d, _mm512_add_ps(widen(value + d), _mm512_loadu_ps(of_value + d)));
    }
}

// Rotates every pair of channels (i, i + pairs) by cos and sin.
static void rotate_row(const bf16 *from, bf16 *to, int pairs, const float *cos, const float *sin) {
    for (int d = 0; d < pairs; d += 16) {
        const __m512 x = widen(from + d), y = widen(from + pairs + d);
        const __m512 along = _mm512_loadu_ps(cos + d), across = _mm512_loadu_ps(sin + d);
        const __m512 low = _mm512_mul_ps(x, along), high = _mm512_mul_ps(y, along);
        store(to + d, _mm512_fnmadd_ps(y, across, low));
        store(to + pairs + d, _mm512_fmadd_ps(x, across, high));
    }
}

#include "../moved_rows.h"
