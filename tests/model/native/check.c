// Compares the float32 kernels with naive loops, without Python. For another processor, compile it
// together with the kernels and run it in an emulator:
//
//   flags="-mcpu=neoverse-n1 -O3 -ffp-contract=fast -fopenmp -static -DKVBOOST_FLOAT32"
//   native=src/kvboost/model/native; kernels="$native/float32/*.c $native/quantized/*.c $native/*.c"
//   aarch64-linux-gnu-gcc $flags tests/model/native/check.c $kernels -lm -o check
//   qemu-aarch64 ./check

#include "../../../src/kvboost/model/native/kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int64_t kvboost_workspace_bytes(void);
int64_t kvboost_mass_bytes(int32_t start, int32_t rows, int32_t kinds);
void kvboost_attention_mass(const MassCall *call, float *mass, void *workspaces, int threads);
void kvboost_pack(const float *weights, int32_t n, int32_t k, float *out);
void kvboost_pack_halved(const float *weights, int32_t n, int32_t k, uint32_t *out);
const char *kvboost_instructions(void);
void kvboost_move(
    const float *keys, int64_t layer_stride, int64_t head_stride, float *out, int64_t out_layer,
    int64_t out_head, int32_t layers, int32_t heads, int32_t tokens, int32_t dim, int32_t pairs,
    const float *cos, const float *sin, int threads
);
void kvboost_shift(
    float *keys, float *values, int64_t head_stride, int32_t heads, int32_t dim, int32_t count,
    const int64_t *which, int32_t offsets, const float *along, const float *across,
    const float *of_values, const float *cos, const float *sin, int threads
);

static int failures = 0;

static float *random_numbers(int64_t count) {
    float *numbers = malloc(count * sizeof(float));
    for (int64_t i = 0; i < count; i++) numbers[i] = (float)rand() / (float)RAND_MAX * 2 - 1;
    return numbers;
}

static void compare_within(
    double limit, const char *name, const float *given, const float *expected, int64_t count
) {
    double worst = 0;
    for (int64_t i = 0; i < count; i++) {
        const double off = fabs((double)given[i] - expected[i]) / (1 + fabs((double)expected[i]));
        if (!(off <= worst)) worst = off; // NaN too
    }
    const int fine = worst < limit;
    printf("%-28s %s, off by %.1e\n", name, fine ? "equal" : "DIFFERENT", worst);
    failures += !fine;
}

static void compare(const char *name, const float *given, const float *expected, int64_t count) {
    compare_within(1e-5, name, given, expected, count);
}

// Two runs of keys, one shared by all rows; limits differ, so that blocks end anywhere.
static void check_attention(int dim, int group, int rows) {
    enum { KV_HEADS = 2, CAPACITY = 208, SHARED = 130 };
    const int heads = KV_HEADS * group;
    const int64_t size = (int64_t)KV_HEADS * CAPACITY * dim;
    float *keys = random_numbers(2 * size), *values = random_numbers(2 * size);
    float *queries = random_numbers((int64_t)heads * rows * dim), *sinks = random_numbers(heads);
    float *out = random_numbers((int64_t)rows * heads * dim);
    float *expected = random_numbers((int64_t)rows * heads * dim);
    int32_t *numbers = malloc(5 * 2 * rows * sizeof(int32_t));
    int32_t *all = numbers, *limits = all + 2 * rows, *slots = limits + 2 * rows;
    int32_t *merged = slots + 2 * rows;
    for (int row = 0; row < rows; row++) {
        all[row] = all[rows + row] = row;
        limits[row] = SHARED, limits[rows + row] = 1 + row;
        slots[row] = 2 * row, slots[rows + row] = 2 * row + 1;
        merged[3 * row] = row, merged[3 * row + 1] = 2 * row, merged[3 * row + 2] = 2;
    }
    const Run runs[2] = {
        {keys, values, 0, (int64_t)CAPACITY * dim, 0, rows},
        {keys + size, values + size, 0, (int64_t)CAPACITY * dim, rows, rows},
    };
    const Plan plan = {KV_HEADS, dim, 2, rows, rows, runs, NULL, all, limits, slots, merged};
    float *parts = malloc((int64_t)2 * rows * heads * (dim + 1) * sizeof(float));
    void *work = aligned_alloc(64, 2 * kvboost_workspace_bytes());
    const Call call = {&plan, 0, heads, 0.3f, queries, (int64_t)rows * dim, dim, out, parts, sinks, work};
    kvboost_attend(&call, 2);
    for (int row = 0; row < rows; row++)
        for (int head = 0; head < heads; head++) {
            const float *query = queries + ((int64_t)head * rows + row) * dim;
            double total = exp(sinks[head]), sums[256] = {0};
            for (int run = 0; run < 2; run++)
                for (int key = 0; key < limits[run * rows + row]; key++) {
                    const int64_t at = (int64_t)(head / group * CAPACITY + key) * dim;
                    double score = 0;
                    for (int d = 0; d < dim; d++) score += query[d] * runs[run].keys[at + d];
                    const double weight = exp(score * 0.3);
                    total += weight;
                    for (int d = 0; d < dim; d++) sums[d] += weight * runs[run].values[at + d];
                }
            for (int d = 0; d < dim; d++)
                expected[((int64_t)row * heads + head) * dim + d] = (float)(sums[d] / total);
        }
    char name[40];
    snprintf(name, sizeof name, "attention %d, %d rows", dim, rows);
    compare(name, out, expected, (int64_t)rows * heads * dim);
}

static void check_mass(int start, int rows) {
    enum { HEADS = 6, KV_HEADS = 2, DIM = 64, KINDS = 2 };
    const int end = start + rows;
    float *queries = random_numbers(HEADS * rows * DIM), *keys = random_numbers(KV_HEADS * end * DIM);
    uint8_t *absent = calloc(end + 16, 1);
    for (int key = 0; key < start; key++) absent[key] = key % 5 == 3;
    float *mass = random_numbers(KINDS * start), *expected = calloc(KINDS * start, sizeof(float));
    float *counted = random_numbers(KINDS * rows), *sinks = random_numbers(HEADS);
    const MassCall call = {queries, rows * DIM, DIM, keys, end * DIM, absent, counted,
                           sinks, HEADS, KV_HEADS, DIM, start, rows, KINDS, 0.3f};
    void *work = aligned_alloc(64, 2 * kvboost_mass_bytes(start, rows, KINDS));
    kvboost_attention_mass(&call, mass, work, 2);
    double *weights = malloc(end * sizeof(double));
    for (int head = 0; head < HEADS; head++)
        for (int row = 0; row < rows; row++) {
            double total = exp(sinks[head]);
            for (int key = 0; key <= start + row; key++) {
                const int64_t at = (int64_t)(head / (HEADS / KV_HEADS) * end + key) * DIM;
                double score = 0;
                for (int d = 0; d < DIM; d++)
                    score += queries[(head * rows + row) * DIM + d] * keys[at + d];
                weights[key] = absent[key] ? 0 : exp(score * 0.3);
                total += weights[key];
            }
            for (int kind = 0; kind < KINDS; kind++)
                for (int key = 0; key < start; key++)
                    expected[kind * start + key] +=
                        (float)(counted[kind * rows + row] * weights[key] / total / HEADS);
        }
    compare("attention mass", mass, expected, KINDS * start);
}

static void check_linear(int m, int n, int k, int gated, int halved) {
    float *weights = random_numbers((int64_t)n * k), *rows = random_numbers((int64_t)m * k);
    float *bias = random_numbers(n), *out = random_numbers((int64_t)m * n);
    float *packed = aligned_alloc(64, (int64_t)n * k * sizeof(float));
    if (halved) {
        uint32_t *words = (uint32_t *)(void *)weights;
        for (int64_t i = 0; i < (int64_t)n * k; i++) words[i] &= 0xffff0000u;
        kvboost_pack_halved(weights, n, k, (uint32_t *)(void *)packed);
    } else {
        kvboost_pack(weights, n, k, packed);
    }
    const Linear linear = {packed, bias, n, k, gated, halved, NULL, 0};
    kvboost_linear(&linear, rows, m, NULL, out, NULL, 2);
    const int width = gated ? n / 2 : n;
    float *expected = random_numbers((int64_t)m * width);
    for (int row = 0; row < m; row++)
        for (int column = 0; column < width; column++) {
            double sums[2];
            for (int part = 0; part < 2; part++) {
                const int from = gated ? column / 16 * 32 + part * 16 + column % 16 : column;
                sums[part] = bias[from];
                for (int i = 0; i < k; i++)
                    sums[part] += (double)rows[(int64_t)row * k + i] * weights[(int64_t)from * k + i];
            }
            const double value = gated ? sums[0] / (1 + exp(-sums[0])) * sums[1] : sums[0];
            expected[(int64_t)row * width + column] = (float)value;
        }
    char name[40];
    snprintf(name, sizeof name, "linear %d%s%s", m, gated ? ", gated" : "", halved ? ", halved" : "");
    // A gated product multiplies two sums, and with them their rounding.
    compare_within(gated ? 3e-5 : 1e-5, name, out, expected, (int64_t)m * width);
}

static void check_rows(void) {
    enum { M = 5, DIM = 64, HEADS = 3, WIDTH = HEADS * DIM };
    float *rows = random_numbers(M * WIDTH), *weight = random_numbers(WIDTH);
    float *out = random_numbers(M * WIDTH), *expected = random_numbers(M * WIDTH);
    kvboost_norm(rows, M, WIDTH, weight, 1e-5f, out, 2);
    for (int row = 0; row < M; row++) {
        double squares = 0;
        for (int d = 0; d < WIDTH; d++)
            squares += (double)rows[row * WIDTH + d] * rows[row * WIDTH + d];
        for (int d = 0; d < WIDTH; d++)
            expected[row * WIDTH + d] =
                (float)(weight[d] * rows[row * WIDTH + d] / sqrt(squares / WIDTH + 1e-5));
    }
    compare("norm", out, expected, M * WIDTH);
    float *cos = random_numbers(M * DIM), *sin = random_numbers(M * DIM);
    for (int row = 0; row < M; row++)
        for (int head = 0; head < HEADS; head++)
            for (int d = 0; d < DIM; d++) {
                const float *from = rows + row * WIDTH + head * DIM;
                const float other = d < DIM / 2 ? -from[d + DIM / 2] : from[d - DIM / 2];
                const int at = row * DIM + d;
                expected[row * WIDTH + head * DIM + d] = from[d] * cos[at] + other * sin[at];
            }
    kvboost_rotate(rows, M, WIDTH, HEADS, DIM, cos, sin, 2);
    compare("rotation", rows, expected, M * WIDTH);
}

static void check_moved(void) {
    enum { LAYERS = 2, HEADS = 3, TOKENS = 11, DIM = 64, PAIRS = 16 };
    enum { SIZE = LAYERS * HEADS * TOKENS * DIM };
    float *keys = random_numbers(SIZE), *out = random_numbers(SIZE), *expected = random_numbers(SIZE);
    float *cos = random_numbers(LAYERS * PAIRS), *sin = random_numbers(LAYERS * PAIRS);
    kvboost_move(keys, HEADS * TOKENS * DIM, TOKENS * DIM, out, HEADS * TOKENS * DIM, TOKENS * DIM,
                 LAYERS, HEADS, TOKENS, DIM, PAIRS, cos, sin, 2);
    for (int i = 0; i < SIZE; i++) {
        const int d = i % DIM, pair = i / (HEADS * TOKENS * DIM) * PAIRS + d % PAIRS;
        expected[i] = d < PAIRS       ? keys[i] * cos[pair] - keys[i + PAIRS] * sin[pair]
                      : d < 2 * PAIRS ? keys[i] * cos[pair] + keys[i - PAIRS] * sin[pair]
                                      : keys[i];
    }
    compare("moved keys", out, expected, SIZE);
    enum { OFFSETS = 3, ROWS = TOKENS, PLANE = HEADS * ROWS * DIM };
    float *along = random_numbers(HEADS * OFFSETS * DIM);
    float *across = random_numbers(HEADS * OFFSETS * DIM);
    float *offsets = random_numbers(HEADS * OFFSETS * DIM), *values = random_numbers(PLANE);
    float *c = random_numbers(ROWS * DIM), *s = random_numbers(ROWS * DIM);
    int64_t which[ROWS];
    for (int row = 0; row < ROWS; row++) which[row] = row % OFFSETS;
    float *shifted = random_numbers(2 * PLANE);
    for (int i = 0; i < PLANE; i++) {
        const int head = i / (ROWS * DIM), row = i / DIM % ROWS, d = i % DIM;
        const int from = (head * OFFSETS + (int)which[row]) * DIM + d, at = row * DIM + d;
        const int moves = which[row] != OFFSETS - 1;
        shifted[i] = keys[i] + moves * (along[from] * c[at] + across[from] * s[at]);
        shifted[PLANE + i] = values[i] + moves * offsets[from];
    }
    kvboost_shift(keys, values, ROWS * DIM, HEADS, DIM, ROWS, which, OFFSETS, along, across, offsets,
                  c, s, 2);
    compare("shifted keys", keys, shifted, PLANE);
    compare("shifted values", values, shifted + PLANE, PLANE);
}

// Two adapters: one row has the first, none the next, all others the second. Of two interleaved
// linear layers, as gates and values are, the first adapter changes the second only.
static void check_adapters(int m, int width, int k, int rank, int halved) {
    enum { RUNS = 2, PARTS = 2 };
    float *rows = random_numbers((int64_t)m * k), *out = random_numbers((int64_t)m * 2 * width);
    float *expected = malloc((int64_t)m * 2 * width * sizeof(float));
    memcpy(expected, out, (int64_t)m * 2 * width * sizeof(float));
    Change changes[PARTS][RUNS];
    for (int part = 0; part < PARTS; part++)
        for (int run = 0; run < RUNS; run++) {
            const int first = run ? 2 : 0, count = run ? m - 2 : 1, ranks = run || part ? rank : 0;
            float *down = random_numbers((int64_t)rank * k), *up = random_numbers(rank * width);
            bf16 *halves = malloc(((int64_t)rank * (k + width)) * sizeof(bf16));
            for (int i = 0; halved && i < rank * (k + width); i++) {
                uint32_t *word = (uint32_t *)(void *)(i < rank * k ? down + i : up + i - rank * k);
                *word &= 0xffff0000u;
                halves[i] = (bf16)(*word >> 16);
            }
            changes[part][run] = (Change){
                halved ? (void *)halves : down, halved ? (void *)(halves + rank * k) : up,
                ranks, width, part * 16, 1, first, count, halved, 0,
            };
            for (int row = first; row < first + count; row++)
                for (int j = 0; j < ranks; j++) {
                    double sum = 0;
                    for (int i = 0; i < k; i++) sum += (double)rows[row * k + i] * down[j * k + i];
                    for (int c = 0; c < width; c++)
                        expected[row * 2 * width + c / 16 * 32 + part * 16 + c % 16] +=
                            (float)(sum * up[j * width + c]);
                }
        }
    const Changes all = {&changes[0][0], RUNS, rank, random_numbers(3 * m * rank), NULL};
    kvboost_adapt(&all, &changes[0][0], PARTS, rows, m, k, out, 2 * width, 2);
    char name[40];
    snprintf(name, sizeof name, "adapters %d, rank %d%s", m, rank, halved ? ", halved" : "");
    compare(name, out, expected, (int64_t)m * 2 * width);
}

int main(void) {
    printf("float32 kernels on %s\n", kvboost_instructions());
    const int rows[] = {1, 2, 3, 13, 70, 200};
    for (int i = 0; i < 6; i++) {
        check_attention(32, 1, rows[i]);
        check_attention(64, 3, rows[i]);
        check_linear(rows[i], 96, 160, 0, 0);
        check_linear(rows[i], 96, 160, 0, 1);
        check_linear(rows[i], 96, 160, 1, 1);
    }
    for (int halved = 0; halved < 2; halved++) {
        check_adapters(3, 32, 64, 4, halved);
        check_adapters(13, 1056, 96, 7, halved);
    }
    check_mass(3, 1);
    check_mass(300, 37);
    check_rows();
    check_moved();
    printf(failures ? "%d differ\n" : "all equal\n", failures);
    return failures != 0;
}
