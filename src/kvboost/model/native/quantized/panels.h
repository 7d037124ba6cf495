// How quantised weights and rows are arranged, and the small product of both.
//
// A panel is 16 columns of weights. It is a sequence of units; a unit has `group` inputs, or 32 if
// the group is 16. A unit begins with its scales, [sets][16], and its offsets, likewise; there are
// two sets if the group is 16. Its codes follow, in blocks of 32 inputs. Codes of 6 bits are kept
// as code + 32 and those of 8 bits as code + 128, so none is negative:
//
//   8 bits: [8][16 columns][4]; byte j of part i is input 4 i + j.
//   4 bits: [4][16 columns][4]; byte j of part i has input 4 i + j in its low half and
//           16 + 4 i + j in its high half.
//   6 bits: the high 4 bits of each code as with 4 bits; then the low 2 bits, [2][16 columns][4]:
//           byte j of part i has inputs 16 i + j, 16 i + 4 + j, 16 i + 8 + j, 16 i + 12 + j, of
//           which the first is in its lowest bits.
//
// Rows are kept in tiles of `count` rows; a row of two codes is two of them. In a tile, each block
// of 32 inputs is
//
//   int8 codes[count][32]; float scales[count], shifts[count], sums[3][count];
//   int32 starts[3][count];
//
// where sums are those of what the codes stand for: of all 32 inputs, of the first 16, of the last.
// Starts and shifts are for sums of products of codes that are floats without conversion: the bits
// of SHIFT + x as an integer are those of SHIFT as an integer, plus x. A sum of (code + 128) *
// row code that begins with a start is SHIFT + the sum of code * row code; times the scale, plus
// the shift, it is exact, because scales have 22 bits.
#pragma once

#include <stdint.h>

#include "../kernels.h"

#define PANEL 16 // columns of a panel
#define BLOCK 32 // inputs of a block
#define ROW_BLOCK_BYTES (BLOCK + 8 * 4)
#define SHIFT 12582912.0f // 1.5 * 2^23
#define SHIFT_BITS 0x4b400000

static inline int unit_depth(const Coding *coding) {
    return coding->group < BLOCK ? BLOCK : coding->group;
}

static inline int sets_of(const Coding *coding) { return coding->group < BLOCK ? 2 : 1; }

static inline int block_bytes(const int bits) { return BLOCK * PANEL * bits / 8; }

// Of the scales of a unit; the offsets take the same.
static inline int scale_bytes(const Coding *coding) {
    return sets_of(coding) * PANEL * (coding->is_wide ? 4 : 2);
}

static inline int unit_bytes(const Coding *coding) {
    return scale_bytes(coding) * (coding->has_offsets ? 2 : 1) +
           unit_depth(coding) / BLOCK * block_bytes(coding->bits);
}

#pragma GCC visibility push(hidden)
// How many of the next `rows` rows form a tile.
int tile_rows(int rows);
// Rows of a tile, [count, k], from input `first` on, to codes of its blocks. If `fine`, every other
// row of the tile has the second codes of the row before it, and rows are [count / 2, k].
void quantize_tile(
    const number *rows, int count, int k, int first, int blocks, int fine, uint8_t *out
);
// sums[count, 16] of a tile of rows and a panel, from the beginning of a unit on. Adds them to what
// is in sums if `adds`.
void multiply_tile(
    const Coding *coding, const uint8_t *panel, const uint8_t *rows, int count, int blocks, int adds,
    float *sums
);
#pragma GCC visibility pop
