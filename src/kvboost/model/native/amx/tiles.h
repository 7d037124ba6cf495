// What the AMX kernels have in common: tiles, powers of two, rounding.
#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels.h"

#define TILE 16 // rows and columns of a tile; a row is 64 bytes

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileConfig;

// Configures eight full tiles. Other libraries keep their configuration between calls, so it is
// restored later.
static inline void configure_tiles(TileConfig *before) {
    static const TileConfig config = {
        .palette = 1,
        .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
        .rows = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE},
    };
    _tile_storeconfig(before);
    _tile_loadconfig(&config);
}

// Compilers do not know that tiles are loaded from memory: all stores before this are done after
// it.
static inline void compiler_barrier(void) { __asm__ volatile("" ::: "memory"); }

static inline void restore_tiles(const TileConfig *before) {
    if (before->palette)
        _tile_loadconfig(before);
    else
        _tile_release();
}

static inline __m512 power_of_2(__m512 x) {
    // 2^n * 2^f with |f| <= 1/2; the relative error of the polynomial is at most 4e-6.
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(9.67603710e-03f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.59220356e-02f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40221074e-01f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93121034e-01f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.00000008e+00f));
    return _mm512_scalef_ps(p, n);
}

static inline void transpose(const bf16 *rows, int count, int64_t stride, bf16 *out) {
    // 16 rows of 16 pairs become 16 rows of pairs, one for each of the rows.
    __m512i r[TILE], t[TILE];
    for (int i = 0; i < TILE; i++)
        r[i] = i < count ? _mm512_loadu_si512(rows + i * stride) : _mm512_setzero_si512();
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_store_si512(out + 32 * i, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        _mm512_store_si512(out + 32 * (i + 8), _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
        _mm512_store_si512(out + 32 * (i + 4), _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
        _mm512_store_si512(out + 32 * (i + 12), _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
    }
}

static inline __m512 widen(const bf16 *from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline void store(bf16 *to, __m512 values) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(values));
}

// Rounded to bf16, as between separate operations.
static inline __m512 rounded(__m512 values) {
    const __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(values));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline void round_row(const float *row, int dim, bf16 *out) {
    for (int d = 0; d < dim; d += 16) store(out + d, _mm512_loadu_ps(row + d));
}

#pragma GCC visibility push(hidden)
// Writes a panel of quantised weights, [16, k], as bf16: [k / 32] tiles, each followed by space for
// one of another panel.
void expand_panel(const Panel *panel, int k, bf16 *out);
#pragma GCC visibility pop
