// Tiles on any processor, with the compiler's vectors of 16 bytes. A part of a block is four
// vectors, of 4 columns of 4 inputs each. Products of codes fit in 16 bits, and so do some sums.
#pragma once

#include "panels.h"

#define INSTRUCTIONS_FOR_CODES "128-bit vectors"
#define TILES(CASE) CASE(4) CASE(2) CASE(1)
#define MOST_TILE_ROWS 4
#define PARTS (BLOCK / 4)
#define QUARTERS 4

typedef int16_t shorts __attribute__((vector_size(16)));
typedef uint16_t words __attribute__((vector_size(16)));
typedef uint32_t quad_bits __attribute__((vector_size(16)));

static float float_of_half(uint16_t half) {
    const uint32_t bits = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t all;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    memcpy(&all, &value, sizeof all);
    all |= sign;
    memcpy(&value, &all, sizeof value);
    return value;
}

static const uint8_t *read_numbers(const uint8_t *from, int is_wide, int count, float *out) {
    for (int i = 0; i < count; i++) {
        uint16_t half;
        if (is_wide) {
            memcpy(out + i, from + 4 * i, sizeof(float));
        } else {
            memcpy(&half, from + 2 * i, sizeof half);
            out[i] = float_of_half(half);
        }
    }
    return from + count * (is_wide ? 4 : 2);
}

INLINE words read_words(const uint8_t *from) {
    words found;
    memcpy(&found, from, sizeof found);
    return found;
}

// The codes of 4 columns: of inputs 0 and 2 of the part, and of inputs 1 and 3.
INLINE void read_codes(
    const uint8_t *block, const int bits, const int part, const int quarter, shorts *even, shorts *odd
) {
    const uint8_t *from = block + 16 * quarter;
    words bytes = read_words(from + 64 * (bits == 8 ? part : part % 4));
    if (bits < 8) bytes = (part < 4 ? bytes : bytes >> 4) & 0x0f0f;
    if (bits == 6) {
        const words low = read_words(from + 64 * (4 + part / 4));
        bytes = bytes << 2 | (low >> (2 * (part % 4)) & 0x0303);
    }
    const int16_t zero = bits == 4 ? 0 : 1 << (bits - 1);
    *even = (shorts)(bytes & 0xff) - zero;
    *odd = (shorts)(bytes >> 8) - zero;
}

INLINE shorts repeat(int8_t first, int8_t second) {
    return (shorts){first, second, first, second, first, second, first, second};
}

// Sums of neighbours.
INLINE quad_ints widen_sums(shorts sums) {
    const quad_ints both = (quad_ints)sums;
    return (both >> 16) + ((quad_ints)((quad_bits)sums << 16) >> 16);
}

// dots[row][quarter] of the parts of a set. Sums of products of codes of 4 bits fit in 16 bits for
// a block, of 6 bits for four parts, and of 8 bits for one part.
INLINE void dot(
    const int count, const int bits, const int num_sets, const uint8_t *block, const int8_t *rows,
    const int set, quad_ints dots[MOST_TILE_ROWS][QUARTERS]
) {
    const int fitting = bits == 4 ? 8 : bits == 6 ? 4 : 1, end = PARTS / num_sets;
    for (int quarter = 0; quarter < QUARTERS; quarter++) {
        shorts sums[MOST_TILE_ROWS];
        UNROLL
        for (int row = 0; row < count; row++) {
            sums[row] = (shorts){0};
            dots[row][quarter] = (quad_ints){0};
        }
        UNROLL
        for (int i = 0; i < end; i++) {
            shorts even, odd;
            const int part = set * PARTS / 2 + i, is_full = (i + 1) % fitting == 0 || i + 1 == end;
            read_codes(block, bits, part, quarter, &even, &odd);
            UNROLL
            for (int row = 0; row < count; row++) {
                const int8_t *four = rows + row * BLOCK + 4 * part;
                sums[row] += even * repeat(four[0], four[2]) + odd * repeat(four[1], four[3]);
                if (is_full) {
                    dots[row][quarter] += widen_sums(sums[row]);
                    sums[row] = (shorts){0};
                }
            }
        }
    }
}

INLINE void multiply_rows(
    const int count, const int bits, const int num_sets, const int has_offsets, const Coding *coding,
    const uint8_t *panel, const uint8_t *rows, int blocks, int adds, float *out
) {
    const int unit = unit_depth(coding) / BLOCK, numbers = num_sets * PANEL;
    float scales[2 * PANEL], offsets[2 * PANEL];
    if (!adds) memset(out, 0, count * PANEL * sizeof(float));
    for (int block = 0; block < blocks; block++, rows += count * ROW_BLOCK_BYTES) {
        if (block % unit == 0) {
            panel = read_numbers(panel, coding->is_wide, numbers, scales);
            for (int i = 0; i < numbers; i++) offsets[i] = bits == 4 ? -8 * scales[i] : 0;
            if (has_offsets) panel = read_numbers(panel, coding->is_wide, numbers, offsets);
        }
        const float *times = (const float *)(rows + count * BLOCK), *totals = times + 2 * count;
        for (int set = 0; set < num_sets; set++) {
            quad_ints dots[MOST_TILE_ROWS][QUARTERS];
            dot(count, bits, num_sets, panel, (const int8_t *)rows, set, dots);
            for (int i = 0; i < count * PANEL; i++) {
                const int row = i / PANEL, c = i % PANEL;
                const float total = totals[(num_sets == 1 ? 0 : 1 + set) * count + row];
                out[i] += offsets[set * PANEL + c] * total +
                          (float)dots[row][c / 4][c % 4] * times[row] * scales[set * PANEL + c];
            }
        }
        panel += block_bytes(bits);
    }
}
