// Rows, rounded to 8 bits in blocks of 32 numbers, each with a scale. What that leaves of a number,
// at most half a step, can be rounded once more, in steps of a 128th: 15 bits in two codes.

#include <math.h>

#include "../numbers.h"
#include "panels.h"

#define FINE_STEPS 128 // a power of two: the second scale has the digits of the first

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

static void store_codes(__m512i first, __m512i last, int8_t *codes, int *halves) {
    _mm_storeu_si128((__m128i *)codes, _mm512_cvtepi32_epi8(first));
    _mm_storeu_si128((__m128i *)(codes + 16), _mm512_cvtepi32_epi8(last));
    halves[0] = _mm512_reduce_add_epi32(first);
    halves[1] = _mm512_reduce_add_epi32(last);
}

static __m512i codes_of_rest(__m512 scaled, __m512i codes) {
    const __m512 rest = _mm512_sub_ps(scaled, _mm512_cvtepi32_ps(codes));
    return _mm512_cvtps_epi32(_mm512_mul_ps(rest, _mm512_set1_ps(FINE_STEPS)));
}

static float quantize_block(const number *row, int fine, int8_t *codes, int *halves) {
    const __m512 a = sixteen(row), b = sixteen(row + 16);
    const float scale =
        scale_for(_mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b))));
    const __m512 times = _mm512_set1_ps(scale > 0 ? 1 / scale : 0);
    const __m512 left = _mm512_mul_ps(a, times), right = _mm512_mul_ps(b, times);
    const __m512i first = _mm512_cvtps_epi32(left), last = _mm512_cvtps_epi32(right);
    store_codes(first, last, codes, halves);
    if (fine)
        store_codes(codes_of_rest(left, first), codes_of_rest(right, last), codes + BLOCK, halves + 2);
    return scale;
}
#else
static float quantize_block(const number *row, int fine, int8_t *codes, int *halves) {
    float largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        const float size = fabsf(as_float(row[i]));
        largest = size > largest ? size : largest;
    }
    const float scale = scale_for(largest), times = scale > 0 ? 1 / scale : 0;
    memset(halves, 0, (fine ? 4 : 2) * sizeof *halves);
    for (int i = 0; i < BLOCK; i++) {
        const float scaled = as_float(row[i]) * times;
        codes[i] = (int8_t)rintf(scaled);
        halves[i / 16] += codes[i];
        if (!fine) continue;
        codes[BLOCK + i] = (int8_t)rintf((scaled - (float)codes[i]) * FINE_STEPS);
        halves[2 + i / 16] += codes[BLOCK + i];
    }
    return scale;
}
#endif

// Writes what a block of a tile has besides the codes of a row, of which the halves are sums.
static void store_numbers(float scale, const int *halves, int count, int row, uint8_t *block) {
    float *scales = (float *)(block + count * BLOCK), *sums = scales + 2 * count;
    int32_t *starts = (int32_t *)(sums + 3 * count);
    const int of[3] = {halves[0] + halves[1], halves[0], halves[1]};
    scales[row] = scale;
    scales[count + row] = -SHIFT * scale;
    for (int set = 0; set < 3; set++) {
        sums[set * count + row] = scale * of[set];
        starts[set * count + row] = SHIFT_BITS - 128 * of[set];
    }
}

void quantize_tile(
    const number *rows, int count, int k, int first, int blocks, int fine, uint8_t *out
) {
    const int step = fine ? 2 : 1;
    for (int block = 0; block < blocks; block++, out += count * ROW_BLOCK_BYTES) {
        for (int row = 0; row < count; row += step) {
            int halves[4];
            const number *from = rows + (int64_t)(row / step) * k + first + block * BLOCK;
            const float scale = quantize_block(from, fine, (int8_t *)out + row * BLOCK, halves);
            store_numbers(scale, halves, count, row, out);
            if (fine) store_numbers(scale / FINE_STEPS, halves + 2, count, row + 1, out);
        }
    }
}
