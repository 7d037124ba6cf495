// Rearranges quantised weights to panels.

#include <string.h>
#include <sys/mman.h>

#include "panels.h"

// Asks the system for large pages: memory is read a fifth faster with them.
void kvboost_use_large_pages(void *memory, int64_t num_bytes) {
#ifdef MADV_HUGEPAGE
    madvise(memory, (size_t)num_bytes, MADV_HUGEPAGE);
#else
    (void)memory, (void)num_bytes;
#endif
}

int64_t kvboost_quantized_bytes(const Coding *coding, int32_t n, int32_t k) {
    return (int64_t)(n / PANEL) * (k / unit_depth(coding)) * unit_bytes(coding);
}

// The code of an input as it is kept, not negative.
static int code_at(const uint8_t *row, int bits, int at) {
    if (bits == 4) return row[at / 2] >> (at % 2 * 4) & 15;
    return (int8_t)row[at] + (1 << (bits - 1));
}

// Codes of 32 inputs from `at` on of 16 rows of the weight.
static void pack_block(const uint8_t *codes, int64_t stride, int bits, int at, uint8_t *out) {
    const int low = bits == 6 ? 2 : 0; // bits that are kept apart
    memset(out, 0, block_bytes(bits));
    for (int column = 0; column < PANEL; column++)
        for (int input = 0; input < BLOCK; input++) {
            const int code = code_at(codes + column * stride, bits, at + input);
            const int part = input / 4, place = column * 4 + input % 4;
            if (bits == 8)
                out[64 * part + place] = (uint8_t)code;
            else
                out[64 * (part % 4) + place] |= (uint8_t)(code >> low << (part / 4 * 4));
            if (bits == 6)
                out[64 * (4 + part / 4) + place] |= (uint8_t)((code & 3) << (part % 4 * 2));
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

// codes: of 4 bits [n, k / 2], two in a byte, the first in its low half; others int8 [n, k]. Scales
// and offsets [n, k / group].
void kvboost_pack_quantized(
    const Coding *coding, const uint8_t *codes, const uint8_t *scales, const uint8_t *offsets,
    int32_t n, int32_t k, uint8_t *out, int threads
) {
    const int size = coding->is_wide ? 4 : 2, sets = sets_of(coding), depth = unit_depth(coding);
    const int groups = k / coding->group, bits = coding->bits;
    const int64_t stride = bits == 4 ? k / 2 : k;
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
                pack_block(codes + row * stride, stride, bits, at, to);
                to += block_bytes(bits);
            }
        }
    }
}
