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

#ifdef __SSE2__
#include <emmintrin.h>

// Four inputs of four columns in each vector, instead of 16 of one.
static void transpose(__m128i *c) {
    const __m128i low = _mm_unpacklo_epi32(c[0], c[1]), more = _mm_unpacklo_epi32(c[2], c[3]);
    const __m128i high = _mm_unpackhi_epi32(c[0], c[1]), most = _mm_unpackhi_epi32(c[2], c[3]);
    c[0] = _mm_unpacklo_epi64(low, more), c[1] = _mm_unpackhi_epi64(low, more);
    c[2] = _mm_unpacklo_epi64(high, most), c[3] = _mm_unpackhi_epi64(high, most);
}

static void store_parts(uint8_t *out, const __m128i *parts) {
    for (int part = 0; part < 4; part++) _mm_storeu_si128((__m128i *)(out + 64 * part), parts[part]);
}

// The first and the last 16 inputs of a column, a byte each: of 4 bits the codes, of 6 bits code + 32
// and of 8 bits code + 128.
static void read_column(const uint8_t *codes, int bits, __m128i *first, __m128i *last) {
    const __m128i a = _mm_loadu_si128((const __m128i *)codes), nibble = _mm_set1_epi8(15);
    if (bits == 4) {
        const __m128i even = _mm_and_si128(a, nibble), odd = _mm_and_si128(_mm_srli_epi16(a, 4), nibble);
        *first = _mm_unpacklo_epi8(even, odd), *last = _mm_unpackhi_epi8(even, odd);
        return;
    }
    const __m128i b = _mm_loadu_si128((const __m128i *)(codes + 16));
    const __m128i zero = _mm_set1_epi8(bits == 6 ? 0x20 : (char)0x80);
    const __m128i used = _mm_set1_epi8(bits == 6 ? 0x3f : (char)0xff);
    *first = _mm_and_si128(_mm_xor_si128(a, zero), used);
    *last = _mm_and_si128(_mm_xor_si128(b, zero), used);
}

// Codes of 4 bits of the first inputs in the low halves of bytes, of the last in the high ones.
static __m128i halves_of(__m128i first, __m128i last) {
    return _mm_or_si128(first, _mm_slli_epi16(last, 4));
}

// The lowest two bits of four inputs in each byte.
static __m128i quarters_of(const __m128i *parts) {
    const __m128i low = _mm_set1_epi8(3);
    __m128i all = _mm_and_si128(parts[0], low);
    for (int i = 1; i < 4; i++)
        all = _mm_or_si128(all, _mm_slli_epi16(_mm_and_si128(parts[i], low), 2 * i));
    return all;
}

// Codes of 32 inputs of all columns of a panel, which are `stride` bytes apart.
static void pack_block(const uint8_t *codes, int64_t stride, int bits, uint8_t *out) {
    for (int column = 0; column < PANEL; column += 4, codes += 4 * stride, out += 16) {
        __m128i first[4], last[4], both[4];
        for (int i = 0; i < 4; i++) read_column(codes + i * stride, bits, first + i, last + i);
        for (int i = 0; i < 4 && bits == 4; i++) both[i] = halves_of(first[i], last[i]);
        if (bits == 4) {
            transpose(both);
            store_parts(out, both);
            continue;
        }
        transpose(first);
        transpose(last);
        if (bits == 8) {
            store_parts(out, first);
            store_parts(out + 256, last);
            continue;
        }
        const __m128i four = _mm_set1_epi8(15);
        for (int i = 0; i < 4; i++)
            both[i] = halves_of(_mm_and_si128(_mm_srli_epi16(first[i], 2), four),
                                _mm_and_si128(_mm_srli_epi16(last[i], 2), four));
        store_parts(out, both);
        _mm_storeu_si128((__m128i *)(out + 256), quarters_of(first));
        _mm_storeu_si128((__m128i *)(out + 320), quarters_of(last));
    }
}
#else
static void put(uint8_t *parts, int part, uint32_t four) { memcpy(parts + 64 * part, &four, 4); }

// Eight codes of 4 bits, each in a byte of its own.
static uint64_t spread(const uint8_t *from) {
    uint32_t codes;
    memcpy(&codes, from, 4);
    uint64_t bytes = (codes | (uint64_t)codes << 16) & 0x0000ffff0000ffff;
    bytes = (bytes | bytes << 8) & 0x00ff00ff00ff00ff;
    return (bytes | bytes << 4) & 0x0f0f0f0f0f0f0f0f;
}

// Codes of 4 bits, eight inputs in each word, to the parts of a column.
static void put_halves(const uint64_t *codes, uint8_t *out) {
    for (int i = 0; i < 2; i++) {
        const uint64_t both = codes[i] | codes[2 + i] << 4;
        put(out, 2 * i, (uint32_t)both);
        put(out, 2 * i + 1, (uint32_t)(both >> 32));
    }
}

// Codes of 32 inputs of one column. Processors have their lowest byte first.
static void pack_column(const uint8_t *codes, int bits, uint8_t *out) {
    uint64_t words[4], low[4];
    if (bits == 4) {
        for (int i = 0; i < 4; i++) words[i] = spread(codes + 4 * i);
        put_halves(words, out);
        return;
    }
    memcpy(words, codes, sizeof words);
    if (bits == 8) {
        for (int part = 0; part < 8; part++)
            put(out, part, (uint32_t)(words[part / 2] >> (part % 2 * 32)) ^ 0x80808080);
        return;
    }
    for (int i = 0; i < 4; i++) {
        const uint64_t six = (words[i] ^ 0x2020202020202020) & 0x3f3f3f3f3f3f3f3f;
        words[i] = six >> 2 & 0x0f0f0f0f0f0f0f0f;
        low[i] = six & 0x0303030303030303;
    }
    put_halves(words, out);
    for (int half = 0; half < 2; half++) {
        const uint64_t first = low[2 * half], last = low[2 * half + 1];
        put(out, 4 + half,
            (uint32_t)(first | first >> 32 << 2 | last << 4 | last >> 32 << 6));
    }
}

// Codes of 32 inputs of all columns of a panel, which are `stride` bytes apart.
static void pack_block(const uint8_t *codes, int64_t stride, int bits, uint8_t *out) {
    for (int column = 0; column < PANEL; column++)
        pack_column(codes + column * stride, bits, out + 4 * column);
}
#endif

// Numbers [16, groups], of `size` bytes each, from group `first` on: to [sets][16].
static uint8_t *pack_numbers(
    const uint8_t *numbers, int size, int groups, int first, int sets, uint8_t *out
) {
    const int64_t stride = (int64_t)groups * size;
    for (int set = 0; set < sets; set++) {
        const uint8_t *from = numbers + (int64_t)(first + set) * size;
        for (int column = 0; column < PANEL; column++, from += stride, out += size)
            if (size == 2)
                memcpy(out, from, 2);
            else
                memcpy(out, from, 4);
    }
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
                const int64_t first = bits == 4 ? at / 2 : at;
                pack_block(codes + row * stride + first, stride, bits, to);
                to += block_bytes(bits);
            }
        }
    }
}
