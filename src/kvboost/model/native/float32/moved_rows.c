// What ../moved_rows.h does with one row, in float32.

#include "vectors.h"

INLINE float square_of(const float *fresh, const float *stale, int dim) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int d = 0; d < dim; d++) sum += (fresh[d] - stale[d]) * (fresh[d] - stale[d]);
    return sum;
}

// Adds weight * (fresh - stale) to by_cos; if there is by_sin, times cos, and times sin to that.
INLINE void add_error(
    const float *fresh, const float *stale, float weight, int dim, const float *cos,
    const float *sin, float *by_cos, float *by_sin
) {
    if (by_sin == NULL) {
#pragma omp simd
        for (int d = 0; d < dim; d++) by_cos[d] += weight * (fresh[d] - stale[d]);
        return;
    }
#pragma omp simd
    for (int d = 0; d < dim; d++) {
        const float error = weight * (fresh[d] - stale[d]);
        by_cos[d] += error * cos[d];
        by_sin[d] += error * sin[d];
    }
}

// key += along * cos + across * sin; value += of_value.
INLINE void shift_row(
    float *key, float *value, int dim, const float *along, const float *across,
    const float *of_value, const float *cos, const float *sin
) {
#pragma omp simd
    for (int d = 0; d < dim; d++) {
        key[d] += along[d] * cos[d] + across[d] * sin[d];
        value[d] += of_value[d];
    }
}

// Rotates every pair of channels (i, i + pairs) by cos and sin.
INLINE void rotate_row(
    const float *from, float *to, int pairs, const float *cos, const float *sin
) {
#pragma omp simd
    for (int d = 0; d < pairs; d++) {
        const float x = from[d], y = from[pairs + d];
        to[d] = x * cos[d] - y * sin[d];
        to[pairs + d] = y * cos[d] + x * sin[d];
    }
}

#include "../moved_rows.h"
