// Reads the blocks of GGUF files. What the bytes of each format mean is said in
// quantized/blocks.py, which reads them too, where there is no compiler.

#include <string.h>

#include "../kernels.h"

// As the files number them.
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

static float half_at(const uint8_t *from) {
    const uint32_t half = (uint32_t)from[0] | (uint32_t)from[1] << 8;
    const int is_finite = (half & 0x7c00) != 0x7c00;
    uint32_t bits = (half & 0x7fff) << 13 | (is_finite ? 0 : 0x7f800000);
    float size;
    memcpy(&size, &bits, sizeof size);
    if (is_finite) size *= 0x1p112f; // exponents of float16 are counted from another number
    return half >> 15 ? -size : size;
}

// `count` bytes whose low halves are the first codes and whose high halves the next ones: to bytes
// of neighbours.
static void pair_up(const uint8_t *from, int count, uint8_t *out) {
    uint8_t *high = out + count / 2;
    for (int i = 0; i < count / 2; i++) {
        const uint8_t first = from[2 * i], second = from[2 * i + 1];
        out[i] = (uint8_t)((first & 15) | second << 4);
        high[i] = (uint8_t)(first >> 4 | (second & 0xf0));
    }
}

// 32 codes of 5 bits, less `centre`.
static void read_fives(const uint8_t *high, const uint8_t *low, int centre, uint8_t *out) {
    uint32_t bits = 0;
    for (int i = 0; i < 4; i++) bits |= (uint32_t)high[i] << 8 * i;
    for (int i = 0; i < 16; i++) {
        out[i] = (uint8_t)(((low[i] & 15) | (bits >> i & 1) << 4) - centre);
        out[16 + i] = (uint8_t)((low[i] >> 4 | (bits >> (16 + i) & 1) << 4) - centre);
    }
}

// The eight scales and offsets of Q4_K and Q5_K, of 6 bits each.
static void read_k_scales(const uint8_t *block, float *scales, float *offsets) {
    const float scale = half_at(block), minimum = -half_at(block + 2);
    const uint8_t *first = block + 4, *second = first + 4, *last = first + 8;
    for (int i = 0; i < 4; i++) {
        scales[i] = scale * (float)(first[i] & 63);
        offsets[i] = minimum * (float)(second[i] & 63);
        scales[4 + i] = scale * (float)((last[i] & 15) | first[i] >> 6 << 4);
        offsets[4 + i] = minimum * (float)(last[i] >> 4 | second[i] >> 6 << 4);
    }
}

static void read_q5_k(const uint8_t *block, uint8_t *codes) {
    const uint8_t *high = block + 16, *runs = block + 48;
    for (int run = 0; run < 4; run++)
        for (int i = 0; i < 32; i++) {
            const int low = runs[32 * run + i], bits = high[i] >> 2 * run;
            codes[64 * run + i] = (uint8_t)((low & 15) | (bits & 1) << 4);
            codes[64 * run + 32 + i] = (uint8_t)(low >> 4 | (bits >> 1 & 1) << 4);
        }
}

static void read_q6_k(const uint8_t *block, uint8_t *codes, float *scales) {
    for (int part = 0; part < 2; part++, codes += 128) {
        const uint8_t *low = block + 64 * part, *high = block + 128 + 32 * part;
        for (int i = 0; i < 32; i++) {
            const int bits = high[i];
            codes[i] = (uint8_t)(((low[i] & 15) | (bits & 3) << 4) - 32);
            codes[32 + i] = (uint8_t)(((low[32 + i] & 15) | (bits >> 2 & 3) << 4) - 32);
            codes[64 + i] = (uint8_t)((low[i] >> 4 | (bits >> 4 & 3) << 4) - 32);
            codes[96 + i] = (uint8_t)((low[32 + i] >> 4 | (bits >> 6 & 3) << 4) - 32);
        }
    }
    const float scale = half_at(block + 208);
    for (int i = 0; i < 16; i++) scales[i] = scale * (float)(int8_t)block[192 + i];
}

static void read_block(
    int kind, const uint8_t *block, uint8_t *codes, float *scales, float *offsets
) {
    switch (kind) {
    case Q4_0:
        pair_up(block + 2, 16, codes);
        scales[0] = half_at(block);
        offsets[0] = -8 * scales[0];
        break;
    case Q4_1:
        pair_up(block + 4, 16, codes);
        scales[0] = half_at(block);
        offsets[0] = half_at(block + 2);
        break;
    case Q5_0:
        read_fives(block + 2, block + 6, 16, codes);
        scales[0] = half_at(block);
        break;
    case Q5_1:
        read_fives(block + 4, block + 8, 0, codes);
        scales[0] = half_at(block);
        offsets[0] = half_at(block + 2);
        break;
    case Q8_0:
        memcpy(codes, block + 2, 32);
        scales[0] = half_at(block);
        break;
    case Q4_K:
        for (int run = 0; run < 4; run++) pair_up(block + 16 + 32 * run, 32, codes + 32 * run);
        read_k_scales(block, scales, offsets);
        break;
    case Q5_K:
        read_q5_k(block, codes);
        read_k_scales(block, scales, offsets);
        break;
    case Q6_K: read_q6_k(block, codes, scales); break;
    }
}

// blocks: rows of `per_row` blocks. Row i of the output is row order[i] of them, or row i if there
// is no order. Codes, scales and, for the formats that have them, offsets are those of a
// QuantizedWeight; `num_codes` and `num_scales` are the bytes and numbers of one block.
void kvboost_read_blocks(
    int32_t kind, int32_t block_bytes, int32_t num_codes, int32_t num_scales,
    const uint8_t *blocks, const int64_t *order, int32_t n, int32_t per_row, uint8_t *codes,
    float *scales, float *offsets
) {
    for (int64_t row = 0; row < n; row++) {
        const uint8_t *from = blocks + (order ? order[row] : row) * per_row * block_bytes;
        for (int64_t at = row * per_row; at < (row + 1) * per_row; at++, from += block_bytes)
            read_block(
                kind, from, codes + at * num_codes, scales + at * num_scales,
                offsets ? offsets + at * num_scales : NULL
            );
    }
}
