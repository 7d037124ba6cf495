// Rows, rounded to 8 bits in blocks of 32 numbers, each with a scale.

#include <math.h>

#include "../numbers.h"
#include "panels.h"

// The scale makes the largest number 127. Its last two bits are zeros.
static float scale_for(float largest) {
    float scale = largest / 127;
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    bits &= ~3u;
    memcpy(&scale, &bits, sizeof bits);
    return scale;
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>

static __m512 sixteen(const number *from) {
#ifdef KVBOOST_FLOAT32
    return _mm512_loadu_ps(from);
#else
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#endif
}

static float quantize_block(const number *row, int8_t *codes, int *halves) {
    const __m512 a = sixteen(row), b = sixteen(row + 16);
    const float scale =
        scale_for(_mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b))));
    const __m512 times = _mm512_set1_ps(scale > 0 ? 1 / scale : 0);
    const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(a, times));
    const __m512i last = _mm512_cvtps_epi32(_mm512_mul_ps(b, times));
    _mm_storeu_si128((__m128i *)codes, _mm512_cvtepi32_epi8(first));
    _mm_storeu_si128((__m128i *)(codes + 16), _mm512_cvtepi32_epi8(last));
    halves[0] = _mm512_reduce_add_epi32(first);
    halves[1] = _mm512_reduce_add_epi32(last);
    return scale;
}
#else
static float quantize_block(const number *row, int8_t *codes, int *halves) {
    float largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        const float size = fabsf(as_float(row[i]));
        largest = size > largest ? size : largest;
    }
    const float scale = scale_for(largest), times = scale > 0 ? 1 / scale : 0;
    halves[0] = halves[1] = 0;
    for (int i = 0; i < BLOCK; i++) {
        codes[i] = (int8_t)rintf(as_float(row[i]) * times);
        halves[i / 16] += codes[i];
    }
    return scale;
}
#endif

void quantize_tile(const number *rows, int count, int k, int first, int blocks, uint8_t *out) {
    for (int block = 0; block < blocks; block++, out += count * ROW_BLOCK_BYTES) {
        float *scales = (float *)(out + count * BLOCK), *sums = scales + 2 * count;
        int32_t *starts = (int32_t *)(sums + 3 * count);
        for (int row = 0; row < count; row++) {
            int of[3];
            const number *from = rows + (int64_t)row * k + first + block * BLOCK;
            const float scale = quantize_block(from, (int8_t *)out + row * BLOCK, of + 1);
            of[0] = of[1] + of[2];
            scales[row] = scale;
            scales[count + row] = -SHIFT * scale;
            for (int set = 0; set < 3; set++) {
                sums[set * count + row] = scale * of[set];
                starts[set * count + row] = SHIFT_BITS - 128 * of[set];
            }
        }
    }
}
