// Tiles on processors with AVX2. A part of a block is two vectors, of 8 columns of 4 inputs each.
// The instruction multiplies bytes and adds neighbours to 16 bits, where sums of products of codes
// of 4 bits fit for a whole block.
#pragma once

#include <immintrin.h>

#include "panels.h"

#define INSTRUCTIONS_FOR_CODES "AVX2"
#define TILES(CASE) CASE(4) CASE(2) CASE(1)
#define MOST_TILE_ROWS 4
#define PARTS (BLOCK / 4)
#define AHEAD 2048 // bytes of a panel that are fetched before they are needed

typedef struct {
    __m256 scales[2], offsets[2];
} Set;

INLINE __m256 numbers(const uint8_t *from, int is_wide, int half) {
    if (is_wide) return _mm256_loadu_ps((const float *)from + 8 * half);
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from + half));
}

// Reads what a unit begins with, and returns where its codes are.
INLINE const uint8_t *read_sets(
    const Coding *coding, const int bits, const int num_sets, const int has_offsets,
    const uint8_t *unit, Set *sets
) {
    const int size = scale_bytes(coding), each = size / num_sets;
    const __m256 centre = _mm256_set1_ps(bits == 4 ? -8 : 0);
    for (int set = 0; set < num_sets; set++)
        for (int half = 0; half < 2; half++) {
            const uint8_t *from = unit + set * each;
            sets[set].scales[half] = numbers(from, coding->is_wide, half);
            sets[set].offsets[half] = has_offsets ? numbers(from + size, coding->is_wide, half)
                                                  : _mm256_mul_ps(centre, sets[set].scales[half]);
        }
    return unit + (has_offsets ? 2 * size : size);
}

// The codes of 8 columns and 4 inputs; those of 6 and 8 bits have a sign.
INLINE __m256i codes_of(const uint8_t *block, const int bits, const int part, const int half) {
    const __m256i *from = (const __m256i *)block;
    if (bits == 8)
        return _mm256_xor_si256(_mm256_loadu_si256(from + 2 * part + half), _mm256_set1_epi8(-128));
    __m256i four = _mm256_loadu_si256(from + 2 * (part % 4) + half);
    if (part >= 4) four = _mm256_srli_epi16(four, 4);
    four = _mm256_and_si256(four, _mm256_set1_epi8(15));
    if (bits == 4) return four;
    __m256i two = _mm256_loadu_si256(from + 2 * (4 + part / 4) + half);
    two = _mm256_and_si256(_mm256_srli_epi16(two, part % 4 * 2), _mm256_set1_epi8(3));
    const __m256i six = _mm256_or_si256(_mm256_slli_epi16(four, 2), two);
    return _mm256_sub_epi8(six, _mm256_set1_epi8(32));
}

// Sums of products of neighbours, in 16 bits.
INLINE __m256i pairs(const int bits, __m256i codes, const int8_t *row) {
    int32_t four;
    memcpy(&four, row, 4);
    const __m256i inputs = _mm256_set1_epi32(four);
    if (bits == 4) return _mm256_maddubs_epi16(codes, inputs);
    return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(inputs, codes));
}

// The sums of a set of parts, for 8 columns and all rows.
INLINE void dot(
    const int count, const int bits, const int num_sets, const uint8_t *block, const int8_t *rows,
    const int set, const int half, __m256i *dots
) {
    const __m256i ones = _mm256_set1_epi16(1);
    UNROLL
    for (int row = 0; row < count; row++) dots[row] = _mm256_setzero_si256();
    UNROLL
    for (int i = 0; i < PARTS / num_sets; i++) {
        const int part = set * PARTS / 2 + i;
        const __m256i codes = codes_of(block, bits, part, half);
        UNROLL
        for (int row = 0; row < count; row++) {
            const __m256i two = pairs(bits, codes, rows + row * BLOCK + 4 * part);
            dots[row] = bits == 4 ? _mm256_add_epi16(dots[row], two)
                                  : _mm256_add_epi32(dots[row], _mm256_madd_epi16(two, ones));
        }
    }
    if (bits > 4) return;
    UNROLL
    for (int row = 0; row < count; row++) dots[row] = _mm256_madd_epi16(dots[row], ones);
}

// All but the addresses are constants wherever this is inlined.
INLINE void multiply_rows(
    const int count, const int bits, const int num_sets, const int has_offsets, const Coding *coding,
    const uint8_t *panel, const uint8_t *rows, int blocks, int adds, float *out
) {
    const int unit = unit_depth(coding) / BLOCK, bytes = block_bytes(bits);
    __m256 sums[MOST_TILE_ROWS][2];
    Set sets[2];
    UNROLL
    for (int i = 0; i < 2 * count; i++)
        sums[i / 2][i % 2] = adds ? _mm256_loadu_ps(out + i * 8) : _mm256_setzero_ps();
    for (int block = 0, left = 0; block < blocks; block++, left--) {
        if (left == 0) {
            panel = read_sets(coding, bits, num_sets, has_offsets, panel, sets);
            left = unit;
        }
        for (int i = 0; i < bytes; i += 64) _mm_prefetch((const char *)panel + AHEAD + i, _MM_HINT_T0);
        const float *scales = (const float *)(rows + count * BLOCK), *totals = scales + 2 * count;
        for (int set = 0; set < num_sets; set++)
            for (int half = 0; half < 2; half++) {
                __m256i dots[MOST_TILE_ROWS];
                dot(count, bits, num_sets, panel, (const int8_t *)rows, set, half, dots);
                UNROLL
                for (int row = 0; row < count; row++) {
                    const float total = totals[(num_sets == 1 ? 0 : 1 + set) * count + row];
                    const __m256 scaled =
                        _mm256_mul_ps(_mm256_cvtepi32_ps(dots[row]), _mm256_set1_ps(scales[row]));
                    __m256 sum = sums[row][half];
                    if (has_offsets || bits == 4)
                        sum = _mm256_fmadd_ps(sets[set].offsets[half], _mm256_set1_ps(total), sum);
                    sums[row][half] = _mm256_fmadd_ps(scaled, sets[set].scales[half], sum);
                }
            }
        panel += bytes;
        rows += count * ROW_BLOCK_BYTES;
    }
    UNROLL
    for (int i = 0; i < 2 * count; i++) _mm256_storeu_ps(out + i * 8, sums[i / 2][i % 2]);
}
