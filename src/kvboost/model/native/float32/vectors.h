// What the float32 kernels have in common: the size of a vector, one small matrix product, powers
// of two. Compilers turn vector types and simple loops into AVX-512, AVX2, SSE2 or NEON.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define INSTRUCTIONS "AVX-512"
#define VECTOR_BYTES 64
#define REGISTERS 32
#elif defined(__AVX2__)
#define INSTRUCTIONS "AVX2"
#define VECTOR_BYTES 32
#define REGISTERS 16
#elif defined(__aarch64__)
#define INSTRUCTIONS "NEON"
#define VECTOR_BYTES 16
#define REGISTERS 32
#else
#define INSTRUCTIONS "128-bit vectors"
#define VECTOR_BYTES 16
#define REGISTERS 16
#endif

#define LANES (VECTOR_BYTES / 4)
#define COLUMNS 32 // of one small product
#define HALF (COLUMNS / 2)
#define VECTORS (COLUMNS / LANES)
// Rows that are multiplied at once: their sums fill three quarters of the registers.
#define ROWS (3 * REGISTERS / 4 / VECTORS)

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

typedef float vec __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t bits __attribute__((vector_size(VECTOR_BYTES)));
typedef float unaligned_vec __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint32_t unaligned_bits __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint16_t unaligned_halves
    __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
typedef float quad __attribute__((vector_size(16)));
typedef float unaligned_quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t quad_ints __attribute__((vector_size(16)));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (quad_ints){__VA_ARGS__})
#endif

INLINE vec load(const float *from) { return *(const unaligned_vec *)from; }
INLINE void store(float *to, vec values) { *(unaligned_vec *)to = values; }
INLINE vec everywhere(float x) { return x - (vec){0}; }

// As many numbers of bf16. Compilers would widen the two halves of a vector one by one.
INLINE vec load_halved(const bf16 *from) {
#if defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)), 16);
#elif defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from)), 16);
#elif defined(__aarch64__)
    return (vec)vshlq_n_u32(vmovl_u16(vld1_u16(from)), 16);
#else
    return (vec)(__builtin_convertvector(*(const unaligned_halves *)from, bits) << 16);
#endif
}

// sum + a * b, rounded once where the processor can. Compilers would choose anew at each place: then
// a sum could depend on the rows beside it.
INLINE vec add_product(vec sum, vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return sum + a * b;
#endif
}

// The sum of each of four vectors.
INLINE quad sums_of(const vec *four) {
    float all[4][LANES] __attribute__((aligned(64)));
    quad q[4];
    UNROLL
    for (int i = 0; i < 4; i++) store(all[i], four[i]);
    UNROLL
    for (int i = 0; i < 4; i++) {
        q[i] = *(const unaligned_quad *)all[i];
        UNROLL
        for (int lane = 4; lane < LANES; lane += 4) q[i] += *(const unaligned_quad *)(all[i] + lane);
    }
    const quad ab = SHUFFLE(q[0], q[1], 0, 4, 1, 5) + SHUFFLE(q[0], q[1], 2, 6, 3, 7);
    const quad cd = SHUFFLE(q[2], q[3], 0, 4, 1, 5) + SHUFFLE(q[2], q[3], 2, 6, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

// out[count, 32] = rows[count, k] matrix[k, 32]. multiply_add adds the product to out instead. In
// multiply_halved, each row of the matrix is 16 pairs of bf16: columns i and 16 + i.
#pragma GCC visibility push(hidden)
void multiply(
    int count, int k, const float *rows, int64_t row_stride, const float *matrix,
    int64_t matrix_stride, float *out, int64_t out_stride
);
void multiply_add(
    int count, int k, const float *rows, int64_t row_stride, const float *matrix,
    int64_t matrix_stride, float *out, int64_t out_stride
);
void multiply_halved(
    int count, int k, const float *rows, int64_t row_stride, const uint32_t *matrix, float *out,
    int64_t out_stride
);
// out[k, 32]: the matrix of multiply_halved in float32.
void widen(const uint32_t *halved, int k, float *out);
#pragma GCC visibility pop

// The larger number of each pair; b where they cannot be compared.
INLINE vec larger(vec a, vec b) {
    const ints is_a = a > b;
    return (vec)((is_a & (ints)a) | (~is_a & (ints)b));
}

// 2^x for x of at most 127; zero below 2^-126.
INLINE vec powers_of_2(vec x) {
    const float rounder = 12582912.0f; // 1.5 * 2^23: adding it rounds to a whole number
    const vec held = larger(x, (vec){0} - 127.0f);
    const vec n = (held + rounder) - rounder, f = held - n;
    vec p = f * 1.53533615e-04f + 1.33988750e-03f; // 2^f for |f| <= 1/2, right to 1e-7
    p = p * f + 9.61843500e-03f;
    p = p * f + 5.55033200e-02f;
    p = p * f + 2.40226480e-01f;
    p = p * f + 6.93147200e-01f;
    p = p * f + 1.0f;
    const ints exponents = (__builtin_convertvector(n, ints) + 127) << 23; // zero for n = -127
    return p * (vec)exponents;
}

INLINE float power_of_2(float x) { return powers_of_2((vec){0} + x)[0]; }

// gates times their logistic function, times values.
INLINE vec gate(vec gates, vec values) {
    const vec exponents = larger(gates * LOG2_E, (vec){0} - 120.0f); // far shut: zero, not NaN
    return gates / (powers_of_2((vec){0} - exponents) + 1.0f) * values;
}
