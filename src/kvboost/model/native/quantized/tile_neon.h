// Tiles on ARM processors with products of bytes. A part of a block is four vectors, of 4 columns of
// 4 inputs each.
#pragma once

#include <arm_neon.h>

#include "panels.h"

#define INSTRUCTIONS_FOR_CODES "NEON dot products"
#define TILES(CASE) CASE(4) CASE(2) CASE(1)
#define MOST_TILE_ROWS 4
#define PARTS (BLOCK / 4)
#define QUARTERS 4
#define AHEAD 1024 // bytes of a panel that are fetched before they are needed

typedef struct {
    float32x4_t scales[QUARTERS], offsets[QUARTERS];
} Set;

INLINE float32x4_t numbers(const uint8_t *from, int is_wide, int quarter) {
    if (is_wide) return vld1q_f32((const float *)from + 4 * quarter);
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)from + 4 * quarter)));
}

// Reads what a unit begins with, and returns where its codes are.
INLINE const uint8_t *read_sets(
    const Coding *coding, const int bits, const int num_sets, const int has_offsets,
    const uint8_t *unit, Set *sets
) {
    const int size = scale_bytes(coding), each = size / num_sets;
    for (int set = 0; set < num_sets; set++)
        for (int quarter = 0; quarter < QUARTERS; quarter++) {
            const uint8_t *from = unit + set * each;
            const float32x4_t scales = numbers(from, coding->is_wide, quarter);
            sets[set].scales[quarter] = scales;
            sets[set].offsets[quarter] = has_offsets ? numbers(from + size, coding->is_wide, quarter)
                                                     : vmulq_n_f32(scales, bits == 4 ? -8 : 0);
        }
    return unit + (has_offsets ? 2 * size : size);
}

// The codes of 4 columns and 4 inputs; those of 6 and 8 bits have a sign.
INLINE int8x16_t codes_of(const uint8_t *block, const int bits, const int part, const int quarter) {
    const uint8_t *from = block + 16 * quarter;
    if (bits == 8) return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(from + 64 * part), vdupq_n_u8(128)));
    uint8x16_t four = vld1q_u8(from + 64 * (part % 4));
    four = part < 4 ? vandq_u8(four, vdupq_n_u8(15)) : vshrq_n_u8(four, 4);
    if (bits == 4) return vreinterpretq_s8_u8(four);
    uint8x16_t two = vld1q_u8(from + 64 * (4 + part / 4));
    two = vandq_u8(vshlq_u8(two, vdupq_n_s8((int8_t)(-2 * (part % 4)))), vdupq_n_u8(3));
    const uint8x16_t six = vorrq_u8(vshlq_n_u8(four, 2), two);
    return vreinterpretq_s8_u8(vsubq_u8(six, vdupq_n_u8(32)));
}

INLINE int32x4_t inputs_of(const int8_t *row) {
    int32_t four;
    memcpy(&four, row, 4);
    return vdupq_n_s32(four);
}

// All but the addresses are constants wherever this is inlined.
INLINE void multiply_rows(
    const int count, const int bits, const int num_sets, const int has_offsets, const Coding *coding,
    const uint8_t *panel, const uint8_t *rows, int blocks, int adds, float *out
) {
    const int unit = unit_depth(coding) / BLOCK, bytes = block_bytes(bits);
    float32x4_t sums[MOST_TILE_ROWS][QUARTERS];
    Set sets[2];
    UNROLL
    for (int i = 0; i < QUARTERS * count; i++)
        sums[i / QUARTERS][i % QUARTERS] = adds ? vld1q_f32(out + i * 4) : vdupq_n_f32(0);
    for (int block = 0, left = 0; block < blocks; block++, left--) {
        if (left == 0) {
            panel = read_sets(coding, bits, num_sets, has_offsets, panel, sets);
            left = unit;
        }
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(panel + AHEAD + i);
        const float *scales = (const float *)(rows + count * BLOCK), *totals = scales + 2 * count;
        UNROLL
        for (int set = 0; set < num_sets; set++) {
            int32x4_t dots[MOST_TILE_ROWS][QUARTERS] = {{{0}}};
            UNROLL
            for (int i = 0; i < PARTS / num_sets; i++) {
                const int part = set * PARTS / 2 + i;
                int8x16_t inputs[MOST_TILE_ROWS];
                UNROLL
                for (int row = 0; row < count; row++)
                    inputs[row] = vreinterpretq_s8_s32(
                        inputs_of((const int8_t *)rows + row * BLOCK + 4 * part)
                    );
                UNROLL
                for (int quarter = 0; quarter < QUARTERS; quarter++) {
                    const int8x16_t codes = codes_of(panel, bits, part, quarter);
                    UNROLL
                    for (int row = 0; row < count; row++)
                        dots[row][quarter] = vdotq_s32(dots[row][quarter], codes, inputs[row]);
                }
            }
            UNROLL
            for (int i = 0; i < QUARTERS * count; i++) {
                const int row = i / QUARTERS, quarter = i % QUARTERS;
                const float total = totals[(num_sets == 1 ? 0 : 1 + set) * count + row];
                const float32x4_t scaled = vmulq_n_f32(vcvtq_f32_s32(dots[row][quarter]), scales[row]);
                float32x4_t sum = sums[row][quarter];
                if (has_offsets || bits == 4)
                    sum = vfmaq_n_f32(sum, sets[set].offsets[quarter], total);
                sums[row][quarter] = vfmaq_f32(sum, scaled, sets[set].scales[quarter]);
            }
        }
        panel += bytes;
        rows += count * ROW_BLOCK_BYTES;
    }
    UNROLL
    for (int i = 0; i < QUARTERS * count; i++)
        vst1q_f32(out + i * 4, sums[i / QUARTERS][i % QUARTERS]);
}
