// The small product of a tile of rows and a panel of weights.

#include <string.h>

#include "panels.h"

#define MOST_ROWS 16

const int most_tile_rows = MOST_ROWS;

int tile_rows(int rows) { return rows < MOST_ROWS ? rows : MOST_ROWS; }

static float float_of_half(uint16_t half) {
    const uint32_t bits = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    uint32_t all;
    memcpy(&all, &value, sizeof all);
    all |= sign;
    memcpy(&value, &all, sizeof value);
    return value;
}

static void read_numbers(const uint8_t *from, int is_wide, int count, float *out) {
    for (int i = 0; i < count; i++) {
        if (is_wide) {
            memcpy(out + i, from + 4 * i, 4);
        } else {
            uint16_t half;
            memcpy(&half, from + 2 * i, 2);
            out[i] = float_of_half(half);
        }
    }
}

// Codes of a block: [32 inputs][16 columns].
static void unpack(const uint8_t *codes, int bits, int16_t *out) {
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 4; j++)
            for (int column = 0; column < PANEL; column++, out++) {
                const uint8_t byte = codes[(bits == 4 ? i % 4 : i) * 64 + column * 4 + j];
                *out = bits == 4 ? byte >> (i / 4 * 4) & 15 : (int16_t)((int8_t)(byte ^ CODE_BIAS));
            }
}

void multiply_tile(
    const Coding *coding, const uint8_t *panel, const uint8_t *rows, int count, int blocks, int adds,
    float *sums
) {
    const int sets = sets_of(coding), units = unit_depth(coding) / BLOCK;
    float scales[2 * PANEL], offsets[2 * PANEL];
    int16_t codes[BLOCK * PANEL];
    if (!adds) memset(sums, 0, count * PANEL * sizeof(float));
    for (int block = 0; block < blocks; block++, rows += count * ROW_BLOCK_BYTES) {
        if (block % units == 0) {
            read_numbers(panel, coding->is_wide, sets * PANEL, scales);
            panel += scale_bytes(coding);
            for (int i = 0; i < sets * PANEL; i++) offsets[i] = -(float)coding->zero * scales[i];
            if (coding->has_offsets) {
                read_numbers(panel, coding->is_wide, sets * PANEL, offsets);
                panel += scale_bytes(coding);
            }
        }
        unpack(panel, coding->bits, codes);
        panel += block_bytes(coding);
        const float *row_scales = (const float *)(rows + count * BLOCK), *row_sums = row_scales + count;
        for (int row = 0; row < count; row++)
            for (int set = 0; set < sets; set++) {
                int32_t dots[PANEL] = {0};
                for (int i = set * 16; i < (set + 1) * 16 * (3 - sets); i++) {
                    const int16_t code = ((const int8_t *)rows)[row * BLOCK + i];
                    for (int c = 0; c < PANEL; c++) dots[c] += code * codes[i * PANEL + c];
                }
                const float sum = row_sums[(sets == 1 ? 0 : 1 + set) * count + row];
                for (int c = 0; c < PANEL; c++)
                    sums[row * PANEL + c] += scales[set * PANEL + c] * row_scales[row] * (float)dots[c] +
                                             offsets[set * PANEL + c] * sum;
            }
    }
}
