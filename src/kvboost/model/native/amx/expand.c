// Quantised weights as bf16 tiles, for products of many rows.

#include "../float32/vectors.h"
#include "../quantized/tile_vnni.h"

#define TILE_SIZE (PANEL * BLOCK) // of bf16: [16 pairs of inputs][16 columns, 2]

// What the codes of a unit are multiplied by, and what is added: a weight is code * scale + offset,
// with codes as read_codes gives them.
INLINE const uint8_t *read_unit(const Coding *coding, const int bits, const uint8_t *unit, Set *sets) {
    const int num_sets = sets_of(coding);
    const uint8_t *codes = coding->has_offsets
                               ? read_sets(coding, bits, num_sets, 1, unit, sets)
                               : read_sets(coding, bits, num_sets, 0, unit, sets);
    for (int set = 0; set < num_sets && !coding->has_offsets; set++)
        sets[set].offsets = _mm512_mul_ps(sets[set].scales, _mm512_set1_ps(-128));
    return codes;
}

// Input `at` of the four that each column has.
INLINE __m512 weights_of(__m512i codes, const int at, const Set *set) {
    const __m512i byte = _mm512_and_si512(_mm512_srli_epi32(codes, 8 * at), _mm512_set1_epi32(255));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(byte), set->scales, set->offsets);
}

// The two inputs of each column side by side.
INLINE void store_pairs(__m512 even, __m512 odd, __m512i order, bf16 *out) {
    const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    _mm512_store_si512(out, _mm512_permutexvar_epi16(order, apart));
}

INLINE void expand(const Panel *panel, const int bits, int k, bf16 *out) {
    const Coding *coding = panel->coding;
    const int unit = unit_depth(coding) / BLOCK, last = sets_of(coding) - 1;
    const __m512i columns = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i order =
        _mm512_or_si512(columns, _mm512_slli_epi32(_mm512_add_epi32(columns, _mm512_set1_epi32(PANEL)), 16));
    const uint8_t *from = panel->data;
    Set sets[2];
    for (int block = 0; block < k / BLOCK; block++, out += 2 * TILE_SIZE) {
        if (block % unit == 0) from = read_unit(coding, bits, from, sets);
        __m512i codes[PARTS];
        read_codes(from, bits, codes);
        from += block_bytes(bits);
        UNROLL
        for (int part = 0; part < PARTS; part++) {
            const Set *set = sets + (part < PARTS / 2 ? 0 : last);
            bf16 *pairs = out + 4 * part * PANEL;
            store_pairs(weights_of(codes[part], 0, set), weights_of(codes[part], 1, set), order, pairs);
            store_pairs(weights_of(codes[part], 2, set), weights_of(codes[part], 3, set), order,
                        pairs + 2 * PANEL);
        }
    }
}

void expand_panel(const Panel *panel, int k, bf16 *out) {
    switch (panel->coding->bits) {
    case 4: expand(panel, 4, k, out); break;
    case 6: expand(panel, 6, k, out); break;
    default: expand(panel, 8, k, out);
    }
}
