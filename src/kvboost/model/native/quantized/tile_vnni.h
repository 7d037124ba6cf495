// Tiles on processors with AVX-512 and its products of bytes (VNNI). A vector is a part of a block:
// 16 columns of 4 inputs. The codes of a block are in 8 registers while all rows are multiplied.
// Codes of 4 and 6 bits are in the high bits of their bytes, so all codes are as those of 8 bits.
#pragma once

#include <immintrin.h>

#include "panels.h"

#define INSTRUCTIONS_FOR_CODES "AVX-512 VNNI"
#define TILES(CASE) CASE(16) CASE(8) CASE(4) CASE(2) CASE(1)
#define MOST_TILE_ROWS 16
#define PARTS (BLOCK / 4)
#define AT_ONCE 8 // rows whose products take turns, because each waits for the one before it
#define AHEAD 2048 // bytes of a panel that are fetched before they are needed

typedef struct {
    __m512 scales, offsets;
} Set;

INLINE __m512 numbers(const uint8_t *from, int is_wide) {
    if (is_wide) return _mm512_loadu_ps((const float *)from);
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

// Reads what a unit begins with, and returns where its codes are.
INLINE const uint8_t *read_sets(
    const Coding *coding, const int bits, const int num_sets, const int has_offsets,
    const uint8_t *unit, Set *sets
) {
    const int size = scale_bytes(coding), each = size / num_sets;
    UNROLL
    for (int set = 0; set < num_sets; set++) {
        sets[set].scales = numbers(unit + set * each, coding->is_wide);
        if (has_offsets) {
            sets[set].offsets = numbers(unit + size + set * each, coding->is_wide);
            if (bits != 4) { // of codes that are not negative
                const __m512 zero = _mm512_set1_ps((float)(1 << (bits - 1)));
                sets[set].offsets = _mm512_fnmadd_ps(zero, sets[set].scales, sets[set].offsets);
            }
        }
        if (bits < 8)
            sets[set].scales = _mm512_mul_ps(sets[set].scales, _mm512_set1_ps(1.0f / (1 << (8 - bits))));
    }
    return unit + (has_offsets ? 2 * size : size);
}

INLINE void read_codes(const uint8_t *from, const int bits, __m512i *codes) {
    if (bits == 8) {
        UNROLL
        for (int i = 0; i < PARTS; i++) codes[i] = _mm512_loadu_si512(from + 64 * i);
        return;
    }
    const __m512i high = _mm512_set1_epi8((char)0xf0), low = _mm512_set1_epi8(0x0c);
    UNROLL
    for (int i = 0; i < PARTS / 2; i++) {
        const __m512i both = _mm512_loadu_si512(from + 64 * i);
        codes[i] = _mm512_and_si512(_mm512_slli_epi16(both, 4), high);
        codes[PARTS / 2 + i] = _mm512_and_si512(both, high);
    }
    if (bits == 4) return;
    UNROLL
    for (int half = 0; half < 2; half++) {
        const __m512i rest = _mm512_loadu_si512(from + 64 * (PARTS / 2 + half));
        __m512i *four = codes + half * PARTS / 2;
        four[0] = _mm512_or_si512(four[0], _mm512_and_si512(_mm512_slli_epi16(rest, 2), low));
        four[1] = _mm512_or_si512(four[1], _mm512_and_si512(rest, low));
        four[2] = _mm512_or_si512(four[2], _mm512_and_si512(_mm512_srli_epi16(rest, 2), low));
        four[3] = _mm512_or_si512(four[3], _mm512_and_si512(_mm512_srli_epi16(rest, 4), low));
    }
}

// sums += the four inputs at `row` times codes. They are read and repeated by the product itself;
// compilers make two instructions.
INLINE __m512i dot(__m512i sums, __m512i codes, const int8_t *row) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0"
            : "+v"(sums)
            : "v"(codes), "m"(*(const int32_t(*)[1])row));
    return sums;
}

// All but the addresses are constants wherever this is inlined, so that sums are in registers.
INLINE void multiply_rows(
    const int count, const int bits, const int num_sets, const int has_offsets, const Coding *coding,
    const uint8_t *panel, const uint8_t *rows, int blocks, int adds, float *out
) {
    const int unit = unit_depth(coding) / BLOCK, bytes = block_bytes(bits);
    const int some = count < AT_ONCE ? count : AT_ONCE;
    const __m512i shift = _mm512_set1_epi32(SHIFT_BITS);
    __m512 sums[MOST_TILE_ROWS];
    Set sets[2];
    UNROLL
    for (int row = 0; row < count; row++)
        sums[row] = adds ? _mm512_loadu_ps(out + row * PANEL) : _mm512_setzero_ps();
    for (int block = 0, left = 0; block < blocks; block++, left--) {
        if (left == 0) {
            panel = read_sets(coding, bits, num_sets, has_offsets, panel, sets);
            left = unit;
        }
        __m512i codes[PARTS];
        read_codes(panel, bits, codes);
        UNROLL
        for (int i = 0; i < bytes; i += 64) _mm_prefetch((const char *)panel + AHEAD + i, _MM_HINT_T0);
        panel += bytes;
        const float *scales = (const float *)(rows + count * BLOCK);
        const int32_t *starts = (const int32_t *)(scales + 5 * count);
        UNROLL
        for (int turn = 0; turn < count / some * num_sets; turn++) {
            const int first = turn / num_sets * some, set = turn % num_sets;
            const int which = (num_sets == 1 ? 0 : 1 + set) * count + first;
            const int8_t *from = (const int8_t *)rows + first * BLOCK + set * BLOCK / 2;
            __m512i dots[AT_ONCE];
            UNROLL
            for (int row = 0; row < some; row++)
                dots[row] = has_offsets ? shift : _mm512_set1_epi32(starts[which + row]);
            UNROLL
            for (int i = 0; i < PARTS / num_sets; i++) {
                UNROLL
                for (int row = 0; row < some; row++)
                    dots[row] = dot(dots[row], codes[set * PARTS / 2 + i], from + row * BLOCK + 4 * i);
            }
            UNROLL
            for (int row = 0; row < some; row++) {
                const float *mine = scales + first + row;
                const __m512 scaled =
                    _mm512_fmadd_ps(_mm512_castsi512_ps(dots[row]), _mm512_set1_ps(mine[0]),
                                    _mm512_set1_ps(mine[count]));
                __m512 *sum = sums + first + row;
                if (has_offsets)
                    *sum = _mm512_fmadd_ps(sets[set].offsets,
                                           _mm512_set1_ps(scales[2 * count + which + row]), *sum);
                *sum = _mm512_fmadd_ps(scaled, sets[set].scales, *sum);
            }
        }
        rows += count * ROW_BLOCK_BYTES;
    }
    UNROLL
    for (int row = 0; row < count; row++) _mm512_storeu_ps(out + row * PANEL, sums[row]);
}
