// Tiles on any processor.
#pragma once

#include "panels.h"

#define INSTRUCTIONS_FOR_CODES "portable"
#define TILES(CASE) CASE(8) CASE(4) CASE(2) CASE(1)

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

// Codes of a block: [32 inputs][16 columns].
INLINE void unpack(const uint8_t *from, const int bits, int16_t *out) {
    for (int part = 0; part < 8; part++)
        for (int j = 0; j < 4; j++)
            for (int column = 0; column < PANEL; column++, out++) {
                const int place = column * 4 + j;
                const int high = from[64 * (part % 4) + place] >> (part / 4 * 4) & 15;
                const int low = bits == 6 ? from[64 * (4 + part / 4) + place] >> (part % 4 * 2) & 3 : 0;
                *out = (int16_t)(bits == 8   ? from[64 * part + place] - 128
                                 : bits == 6 ? (high << 2) + low - 32
                                             : high);
            }
}

INLINE void multiply_rows(
    const int count, const int bits, const int num_sets, const int has_offsets, const Coding *coding,
    const uint8_t *panel, const uint8_t *rows, int blocks, int adds, float *out
) {
    const int unit = unit_depth(coding) / BLOCK, numbers = num_sets * PANEL;
    const int depth = BLOCK / num_sets;
    float scales[2 * PANEL], offsets[2 * PANEL];
    int16_t codes[BLOCK * PANEL];
    if (!adds) memset(out, 0, count * PANEL * sizeof(float));
    for (int block = 0; block < blocks; block++, rows += count * ROW_BLOCK_BYTES) {
        if (block % unit == 0) {
            panel = read_numbers(panel, coding->is_wide, numbers, scales);
            for (int i = 0; i < numbers; i++) offsets[i] = bits == 4 ? -8 * scales[i] : 0;
            if (has_offsets) panel = read_numbers(panel, coding->is_wide, numbers, offsets);
        }
        unpack(panel, bits, codes);
        panel += block_bytes(bits);
        const float *times = (const float *)(rows + count * BLOCK), *totals = times + 2 * count;
        for (int row = 0; row < count; row++)
            for (int set = 0; set < num_sets; set++) {
                int32_t dots[PANEL] = {0};
                for (int i = set * depth; i < (set + 1) * depth; i++) {
                    const int16_t code = ((const int8_t *)rows)[row * BLOCK + i];
                    for (int c = 0; c < PANEL; c++) dots[c] += code * codes[i * PANEL + c];
                }
                const float total = totals[(num_sets == 1 ? 0 : 1 + set) * count + row];
                for (int c = 0; c < PANEL; c++)
                    out[row * PANEL + c] += offsets[set * PANEL + c] * total +
                                            (float)dots[c] * times[row] * scales[set * PANEL + c];
            }
    }
}
