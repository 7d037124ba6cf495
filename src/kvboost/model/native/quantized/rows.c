// Rows, rounded to 8 bits in blocks of 32 numbers, each with a scale.

#include <math.h>

#include "../numbers.h"
#include "panels.h"

// The largest number of a block becomes 127.
static void quantize_block(const number *row, int8_t *codes, float *scale, float *sums, int stride) {
    float largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        const float size = fabsf(as_float(row[i]));
        largest = size > largest ? size : largest;
    }
    *scale = largest / 127;
    const float times = *scale > 0 ? 1 / *scale : 0;
    int halves[2] = {0};
    for (int i = 0; i < BLOCK; i++) {
        const int code = (int)rintf(as_float(row[i]) * times);
        codes[i] = (int8_t)code;
        halves[i / 16] += code;
    }
    sums[0] = *scale * (halves[0] + halves[1]);
    sums[stride] = *scale * halves[0];
    sums[2 * stride] = *scale * halves[1];
}

void quantize_tile(const number *rows, int count, int k, int first, int blocks, uint8_t *out) {
    for (int block = 0; block < blocks; block++, out += count * ROW_BLOCK_BYTES) {
        float *scales = (float *)(out + count * BLOCK), *sums = scales + count;
        for (int row = 0; row < count; row++)
            quantize_block(rows + (int64_t)row * k + first + block * BLOCK,
                           (int8_t *)out + row * BLOCK, scales + row, sums + row, count);
    }
}
