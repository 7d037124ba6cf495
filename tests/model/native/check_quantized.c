// Compares products with quantised weights with naive loops over the same rounded rows, without
// Python. For another processor, compile it together with the kernels and run it in an emulator:
//
//   flags="-mcpu=neoverse-n1 -O3 -ffp-contract=fast -fopenmp -static -DKVBOOST_FLOAT32"
//   kernels="src/kvboost/model/native/quantized/*.c"
//   aarch64-linux-gnu-gcc $flags tests/model/native/check_quantized.c $kernels -lm -o check
//   qemu-aarch64 ./check

#include "../../../src/kvboost/model/native/kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 48, K = 256, MOST_ROWS = 40 };

int64_t kvboost_quantized_bytes(const Coding *coding, int32_t n, int32_t k);
const char *kvboost_quantized_instructions(void);
void kvboost_pack_quantized(
    const Coding *coding, const uint8_t *codes, const uint8_t *scales, const uint8_t *offsets,
    int32_t n, int32_t k, uint8_t *out, int threads
);

static int failures = 0;

// A float16 number between 1 / 128 and 1 / 32, and its value.
static float random_half(uint16_t *half, int has_sign) {
    const int exponent = 8 + rand() % 2, mantissa = rand() % 1024, sign = has_sign && rand() % 2;
    *half = (uint16_t)(sign << 15 | exponent << 10 | mantissa);
    return ldexpf(1 + (float)mantissa / 1024, exponent - 15) * (sign ? -1 : 1);
}

// Random codes, or all of them the largest.
static void fill(
    const Coding *coding, int is_extreme, uint8_t *codes, uint16_t *halves, float *floats,
    float *dense
) {
    const int groups = N * K / coding->group, limit = 1 << (coding->bits - 1);
    for (int i = 0; i < groups; i++) {
        floats[i] = random_half(halves + i, 0);
        floats[groups + i] = coding->bits == 4 ? -8 * floats[i] : 0;
        if (coding->has_offsets) floats[groups + i] = random_half(halves + groups + i, 1);
    }
    memset(codes, 0, N * K);
    for (int i = 0; i < N * K; i++) {
        const int largest = coding->bits == 4 ? 15 : 0; // -limit after the subtraction
        int code = is_extreme ? largest : rand() % (2 * limit);
        if (coding->bits == 4)
            codes[i / 2] |= (uint8_t)(code << (i % 2 * 4));
        else
            codes[i] = (uint8_t)(code -= limit);
        const int group = i / coding->group;
        dense[i] = (float)code * floats[group] + floats[groups + group];
    }
}

static void round_rows(const float *rows, int m, float *rounded) {
    for (int at = 0; at < m * K; at += 32) {
        float largest = 0;
        for (int i = at; i < at + 32; i++) largest = fmaxf(largest, fabsf(rows[i]));
        float scale = largest / 127;
        uint32_t bits;
        memcpy(&bits, &scale, 4);
        bits &= ~3u;
        memcpy(&scale, &bits, 4);
        volatile float times = 1 / scale;
        for (int i = at; i < at + 32; i++) {
            volatile float code = rows[i] * times;
            rounded[i] = rintf(code) * scale;
        }
    }
}

static void check(Coding coding, int m, int fine) {
    static uint8_t codes[N * K];
    static uint16_t halves[N * K];
    static float floats[N * K], dense[N * K], rows[MOST_ROWS * K], rounded[MOST_ROWS * K];
    static float bias[N], residual[MOST_ROWS * N], out[MOST_ROWS * N];
    const int is_extreme = m == 1; // sums are as large as they can be
    fill(&coding, is_extreme, codes, halves, floats, dense);
    for (int i = 0; i < m * K; i++)
        rows[i] = is_extreme ? 1 : (float)rand() / (float)RAND_MAX * 2 - 1;
    for (int i = 0; i < N; i++) bias[i] = (float)rand() / (float)RAND_MAX;
    for (int i = 0; i < m * N; i++) residual[i] = (float)rand() / (float)RAND_MAX;
    if (fine)
        memcpy(rounded, rows, sizeof rounded);
    else
        round_rows(rows, m, rounded);
    const int64_t bytes = kvboost_quantized_bytes(&coding, N, K);
    const int64_t groups = (int64_t)N * K / coding.group;
    uint8_t *packed = malloc(bytes);
    const void *numbers = coding.is_wide ? (void *)floats : (void *)halves;
    const int64_t size = coding.is_wide ? 4 : 2;
    kvboost_pack_quantized(&coding, codes, numbers, (const uint8_t *)numbers + groups * size, N, K,
                           packed, 1);
    Panel panels[N / 16];
    for (int i = 0; i < N / 16; i++) panels[i] = (Panel){packed + bytes / (N / 16) * i, &coding};
    const Linear linear = {NULL, bias, N, K, 0, 0, panels, fine};
    float *work = malloc((size_t)m * K * sizeof(float));
    kvboost_quantized_linear(&linear, rows, m, residual, out, work, m > 7 ? 2 : 1);
    double worst = 0;
    for (int i = 0; i < m * N; i++) {
        double sum = bias[i % N] + residual[i], size = 0;
        for (int j = 0; j < K; j++) {
            sum += (double)rounded[i / N * K + j] * dense[i % N * K + j];
            size += fabs(dense[i % N * K + j]);
        }
        // No number of the rows exceeds 1, so a second code is off by half of 1 / 127 / 128 at most.
        const double allowed = 1e-5 * (1 + fabs(sum)) + (fine ? size / 127 / 256 * 1.01 : 0);
        const double off = fabs(out[i] - sum) / allowed;
        if (!(off <= worst)) worst = off; // NaN too
    }
    if (!(worst < 1)) {
        printf("%d rows%s, %d bits in groups of %d%s%s: off by %.2g times what is allowed\n", m,
               fine ? " of two codes" : "", coding.bits, coding.group,
               coding.has_offsets ? " with offsets" : "", coding.is_wide ? ", wide" : "", worst);
        failures++;
    }
    free(packed);
    free(work);
}

int main(void) {
    printf("codes on %s\n", kvboost_quantized_instructions());
    const int rows[] = {1, 2, 7, MOST_ROWS}, groups[] = {16, 32, 128};
    for (int bits = 4; bits <= 8; bits += 2)
        for (int g = 0; g < 3; g++)
            for (int offsets = 0; offsets < 2; offsets++)
                for (int wide = 0; wide < 2; wide++)
                    for (int i = 0; i < 8; i++) {
                        const int has_kernel = groups[g] > 16 || bits == 8 || (bits == 6 && !offsets);
                        const Coding coding = {bits, groups[g], offsets, wide};
                        if (has_kernel) check(coding, rows[i / 2], i % 2);
                    }
    printf(failures ? "%d differ\n" : "all equal\n", failures);
    return failures != 0;
}
