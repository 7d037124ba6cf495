// Rearranges quantised weights to panels.

#include <string.h>

#include "panels.h"

int64_t kvboost_quantized_bytes(const Coding *coding, int32_t n, int32_t k) {
    return (int64_t)(n / PANEL) * (k / unit_depth(coding)) * unit_bytes(coding);
}

static int code_at(const uint8_t *row, int bits, int at) {
    if (bits == 8) return (row[at] ^ (CODE_BIAS ? 0x80 : 0)) & 0xff;
    return row[at / 2] >> (at % 2 * 4) & 15;
}

// Codes of 32 inputs from `at` on of 16 rows of the weight.
static void pack_block(const uint8_t *codes, int bits, int k, int at, uint8_t *out) {
    const int64_t stride = (int64_t)k * bits / 8;
    for (int i = 0; i < (bits == 4 ? 4 : 8); i++)
        for (int column = 0; column < PANEL; column++)
            for (int j = 0; j < 4; j++, out++) {
                const uint8_t *row = codes + column * stride;
                *out = (uint8_t)code_at(row, bits, at + 4 * i + j);
                if (bits == 4) *out |= (uint8_t)(code_at(row, bits, at + 16 + 4 * i + j) << 4);
            }
}

// Numbers [16, groups], of `size` bytes each, from group `first` on: to [sets][16].
static uint8_t *pack_numbers(
    const uint8_t *numbers, int size, int groups, int first, int sets, uint8_t *out
) {
    for (int set = 0; set < sets; set++)
        for (int column = 0; column < PANEL; column++, out += size)
            memcpy(out, numbers + ((int64_t)column * groups + first + set) * size, size);
    return out;
}

// codes [n, k * bits / 8], two codes of 4 bits in a byte, the first in its low half; scales and
// offsets [n, k / group].
void kvboost_pack_quantized(
    const Coding *coding, const uint8_t *codes, const uint8_t *scales, const uint8_t *offsets,
    int32_t n, int32_t k, uint8_t *out, int threads
) {
    const int size = coding->is_wide ? 4 : 2, sets = sets_of(coding), depth = unit_depth(coding);
    const int groups = k / coding->group;
    const int64_t panel_bytes = kvboost_quantized_bytes(coding, PANEL, k);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int panel = 0; panel < n / PANEL; panel++) {
        const int64_t row = (int64_t)panel * PANEL, from = row * groups * size;
        uint8_t *to = out + panel * panel_bytes;
        for (int unit = 0; unit < k / depth; unit++) {
            to = pack_numbers(scales + from, size, groups, unit * sets, sets, to);
            if (coding->has_offsets)
                to = pack_numbers(offsets + from, size, groups, unit * sets, sets, to);
            for (int at = unit * depth; at < (unit + 1) * depth; at += BLOCK) {
                pack_block(codes + row * k * coding->bits / 8, coding->bits, k, at, to);
                to += block_bytes(coding);
            }
        }
    }
}
