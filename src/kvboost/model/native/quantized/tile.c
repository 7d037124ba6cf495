// The small product of a tile of rows and a panel of weights, for all codings.

#include <string.h>

#include "../float32/vectors.h"
#include "panels.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include "tile_vnni.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "tile_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "tile_neon.h"
#else
#include "tile_portable.h"
#endif

const char *kvboost_quantized_instructions(void) { return INSTRUCTIONS_FOR_CODES; }

#define FIRST_THAT_FITS(count)                                                                  \
    if (rows >= count) return count;

int tile_rows(int rows) {
    TILES(FIRST_THAT_FITS)
    return 1;
}

#define CASE_OF(count)                                                                          \
    case count:                                                                                 \
        multiply_rows(count, bits, sets, offsets, coding, panel, rows, blocks, adds, sums);     \
        break;

// A function for each coding, so that a compiler has several small ones.
#define FOR_CODING(name, bits_of_codes, sets_of_unit, has_offsets)                              \
    static __attribute__((noinline)) void name(                                                 \
        const Coding *coding, const uint8_t *panel, const uint8_t *rows, int count, int blocks, \
        int adds, float *sums                                                                   \
    ) {                                                                                         \
        const int bits = bits_of_codes, sets = sets_of_unit, offsets = has_offsets;             \
        switch (count) { TILES(CASE_OF) }                                                       \
    }
FOR_CODING(multiply_4, 4, 1, 0)
FOR_CODING(multiply_4_with_offsets, 4, 1, 1)
FOR_CODING(multiply_6, 6, 1, 0)
FOR_CODING(multiply_6_with_offsets, 6, 1, 1)
FOR_CODING(multiply_6_in_16, 6, 2, 0)
FOR_CODING(multiply_8, 8, 1, 0)
FOR_CODING(multiply_8_with_offsets, 8, 1, 1)
FOR_CODING(multiply_8_in_16, 8, 2, 0)
FOR_CODING(multiply_8_in_16_with_offsets, 8, 2, 1)

typedef void (*Multiply)(
    const Coding *, const uint8_t *, const uint8_t *, int count, int blocks, int adds, float *
);

// By bits, whether groups have 16 inputs, and whether there are offsets. Python widens the others.
static const Multiply KINDS[3][2][2] = {
    {{multiply_4, multiply_4_with_offsets}, {NULL, NULL}},
    {{multiply_6, multiply_6_with_offsets}, {multiply_6_in_16, NULL}},
    {{multiply_8, multiply_8_with_offsets}, {multiply_8_in_16, multiply_8_in_16_with_offsets}},
};

void multiply_tile(
    const Coding *coding, const uint8_t *panel, const uint8_t *rows, int count, int blocks, int adds,
    float *sums
) {
    const int bits = coding->bits / 2 - 2, halves = sets_of(coding) - 1;
    KINDS[bits][halves][coding->has_offsets](coding, panel, rows, count, blocks, adds, sums);
}
