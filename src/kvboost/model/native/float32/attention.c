// Attention of packed rows over the KV of many requests, in one call: float32 on any CPU.
//
// Rows attend to runs of keys. A run belongs to one request or is shared by several; a row sees the
// first keys of a run, up to its limit. A row that attends to several runs gets a partial result
// from each, merged by their log-sum-exps. Runs are cut into parts that threads take one by one:
//
//   for each block of 64 keys      transposed once
//     for each few queries         scores = Q K'; the softmax so far; out += P V
//
// The queries of all heads that share a head of keys are rows of one matrix: row * group + head.

#include "vectors.h"

#include <omp.h>

#define KEYS 64 // keys of a block
#define MOST_DIM 256
#define MOST_QUERIES 252 // of a part: keys that are transposed once serve all of them
#define NOTHING -1e30f   // the score of a key that is not seen
#define MASS_QUERIES 60  // of a part whose scores are all kept

typedef struct {
    float queries[MOST_QUERIES * MOST_DIM]; // times the scale and log2(e): weights are powers of 2
    float out[MOST_QUERIES * MOST_DIM];
    float sums[MOST_QUERIES], most[MOST_QUERIES];
    int32_t limits[MOST_QUERIES];
    float keys[KEYS * MOST_DIM]; // [32 keys of a panel][dim][key]
    float scores[ROWS * KEYS];
} __attribute__((aligned(64))) Workspace;

// 4 keys of 4 channels, key by key, to 4 channels of 4 keys.
INLINE void transpose_quad(const float *from, int64_t stride, float *to) {
    const quad a = *(const unaligned_quad *)from, b = *(const unaligned_quad *)(from + stride);
    const quad c = *(const unaligned_quad *)(from + 2 * stride);
    const quad d = *(const unaligned_quad *)(from + 3 * stride);
    const quad ab = SHUFFLE(a, b, 0, 4, 1, 5), cd = SHUFFLE(c, d, 0, 4, 1, 5);
    const quad ba = SHUFFLE(a, b, 2, 6, 3, 7), dc = SHUFFLE(c, d, 2, 6, 3, 7);
    *(unaligned_quad *)to = SHUFFLE(ab, cd, 0, 1, 4, 5);
    *(unaligned_quad *)(to + COLUMNS) = SHUFFLE(ab, cd, 2, 3, 6, 7);
    *(unaligned_quad *)(to + 2 * COLUMNS) = SHUFFLE(ba, dc, 0, 1, 4, 5);
    *(unaligned_quad *)(to + 3 * COLUMNS) = SHUFFLE(ba, dc, 2, 3, 6, 7);
}

// A block of keys, [count, dim], to [64 / 32][dim][32]; the keys that are missing become zeros.
static void transpose_keys(const float *keys, int count, int dim, float *out) {
    for (int key = 0; key < KEYS; key += 4) {
        float *to = out + key / COLUMNS * COLUMNS * dim + key % COLUMNS;
        if (key + 4 <= count) {
            for (int d = 0; d < dim; d += 4)
                transpose_quad(keys + (int64_t)key * dim + d, dim, to + d * COLUMNS);
        } else {
            for (int i = 0; i < 4; i++)
                for (int d = 0; d < dim; d++)
                    to[d * COLUMNS + i] = key + i < count ? keys[(int64_t)(key + i) * dim + d] : 0;
        }
    }
}

// Scores of `count` queries with the block's keys: to out, by its stride.
static void score(
    const Workspace *work, const float *queries, int count, int dim, float *out, int64_t stride
) {
    for (int key = 0; key < KEYS; key += COLUMNS)
        multiply(count, dim, queries, dim, work->keys + key * dim, COLUMNS, out + key, stride);
}

INLINE quad larger_quad(quad a, quad b) {
    const quad_ints is_a = a > b;
    return (quad)((is_a & (quad_ints)a) | (~is_a & (quad_ints)b));
}

// The largest number of a vector.
INLINE float largest(vec numbers) {
    float all[LANES] __attribute__((aligned(64)));
    store(all, numbers);
    quad best = *(const unaligned_quad *)all;
    for (int i = 4; i < LANES; i += 4) best = larger_quad(best, *(const unaligned_quad *)(all + i));
    best = larger_quad(best, SHUFFLE(best, best, 2, 3, 0, 1));
    return best[0] > best[1] ? best[0] : best[1];
}

INLINE float total(vec numbers) {
    float all[LANES] __attribute__((aligned(64)));
    store(all, numbers);
    quad sums = *(const unaligned_quad *)all;
    for (int i = 4; i < LANES; i += 4) sums += *(const unaligned_quad *)(all + i);
    sums += SHUFFLE(sums, sums, 2, 3, 0, 1);
    return sums[0] + sums[1];
}

// Turns one query's scores into weights, relative to its highest score so far; rescales what the
// query has added up when that score rises.
INLINE void weigh(Workspace *work, int query, float *scores, int seen, int dim) {
    for (int key = seen; key < KEYS; key++) scores[key] = NOTHING;
    vec best = load(scores);
    for (int key = LANES; key < KEYS; key += LANES) best = larger(best, load(scores + key));
    float top = largest(best);
    if (top > work->most[query]) {
        const float less = power_of_2(work->most[query] - top);
        work->most[query] = top;
        work->sums[query] *= less;
        float *out = work->out + query * dim;
        for (int d = 0; d < dim; d += LANES) store(out + d, load(out + d) * less);
    }
    top = work->most[query];
    vec sum = {0};
    for (int key = 0; key < KEYS; key += LANES) {
        const vec weights = powers_of_2(load(scores + key) - top);
        store(scores + key, weights);
        sum += weights;
    }
    work->sums[query] += total(sum);
}

// Queries [first, first + count) of one head of a run's keys.
static void attend_part(
    const Call *call, const Run *run, int kv_head, int first, int count, Workspace *work
) {
    const Plan *plan = call->plan;
    const int dim = plan->dim, group = call->heads / plan->kv_heads;
    const float factor = call->scale * LOG2_E;
    memset(work->out, 0, (size_t)count * dim * sizeof(float));
    memset(work->sums, 0, (size_t)count * sizeof(float));
    for (int i = 0; i < count; i++) {
        const int at = run->first + (first + i) / group;
        const int head = kv_head * group + (first + i) % group;
        const float *query = call->queries + head * call->head_stride;
        query += plan->rows[at] * call->row_stride;
        for (int d = 0; d < dim; d++) work->queries[i * dim + d] = query[d] * factor;
        work->limits[i] = plan->limits[at];
        work->most[i] = NOTHING;
    }
    const int64_t offset = call->layer * run->layer_stride + kv_head * run->head_stride;
    const int last = work->limits[count - 1];
    for (int key = 0; key < last; key += KEYS) {
        const int keys = last - key < KEYS ? last - key : KEYS;
        const float *values = run->values + offset + (int64_t)key * dim;
        transpose_keys(run->keys + offset + (int64_t)key * dim, keys, dim, work->keys);
        for (int tile = 0; tile < count; tile += ROWS) {
            const int rows = count - tile < ROWS ? count - tile : ROWS;
            const int seen_by_last = work->limits[tile + rows - 1] - key;
            if (seen_by_last <= 0) continue;
            score(work, work->queries + tile * dim, rows, dim, work->scores, KEYS);
            for (int row = 0; row < rows; row++) {
                const int seen = work->limits[tile + row] - key;
                if (seen > 0)
                    weigh(work, tile + row, work->scores + row * KEYS, seen, dim);
                else
                    memset(work->scores + row * KEYS, 0, KEYS * sizeof(float));
            }
            const int weighed = seen_by_last < KEYS ? seen_by_last : KEYS;
            for (int d = 0; d < dim; d += COLUMNS)
                multiply_add(rows, weighed, work->scores, KEYS, values + d, dim,
                             work->out + tile * dim + d, dim);
        }
    }
    for (int i = 0; i < count; i++) {
        const int at = run->first + (first + i) / group;
        const int head = kv_head * group + (first + i) % group;
        const float *mine = work->out + i * dim;
        float *to = call->out + ((int64_t)plan->rows[at] * call->heads + head) * dim;
        float share = 1 / work->sums[i];
        if (plan->slots[at] >= 0) {
            to = call->parts + ((int64_t)plan->slots[at] * call->heads + head) * (dim + 1);
            to[dim] = work->most[i] + log2f(work->sums[i]);
        } else {
            share = 1 / (work->sums[i] + sink_weight(call->sinks, head, work->most[i]));
        }
        for (int d = 0; d < dim; d++) to[d] = mine[d] * share;
    }
}

// Merges the partial results of a row.
static void merge(const Call *call, const int32_t *merged, int head) {
    const int dim = call->plan->dim, step = call->heads * (dim + 1);
    const float *parts = call->parts + ((int64_t)merged[1] * call->heads + head) * (dim + 1);
    float most = NOTHING, total = 0, sum[MOST_DIM] = {0};
    for (int i = 0; i < merged[2]; i++) most = fmaxf(most, parts[i * step + dim]);
    for (int i = 0; i < merged[2]; i++) {
        const float share = exp2f(parts[i * step + dim] - most);
        total += share;
        for (int d = 0; d < dim; d++) sum[d] += share * parts[i * step + d];
    }
    total += sink_weight(call->sinks, head, most);
    float *out = call->out + ((int64_t)merged[0] * call->heads + head) * dim;
    for (int d = 0; d < dim; d++) out[d] = sum[d] / total;
}

static int num_parts(const Run *run, int group) {
    return (run->num_rows * group + MOST_QUERIES - 1) / MOST_QUERIES;
}

int64_t kvboost_workspace_bytes(void) { return sizeof(Workspace); }

// Attention of one layer.
void kvboost_attend(const Call *call, int threads) {
    const Plan *plan = call->plan;
    const int group = call->heads / plan->kv_heads;
    int tasks = 0;
    for (int i = 0; i < plan->num_runs; i++) tasks += num_parts(plan->runs + i, group);
    tasks *= plan->kv_heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Workspace *work = (Workspace *)call->workspaces + omp_get_thread_num();
#pragma omp for schedule(dynamic, 1)
        for (int task = tasks - 1; task >= 0; task--) { // late queries see most keys: start them first
            int part = task / plan->kv_heads;
            const Run *run = plan->runs;
            for (; part >= num_parts(run, group); run++) part -= num_parts(run, group);
            const int first = part * MOST_QUERIES, left = run->num_rows * group - first;
            const int count = left < MOST_QUERIES ? left : MOST_QUERIES;
            attend_part(call, run, task % plan->kv_heads, first, count, work);
        }
#pragma omp for schedule(static)
        for (int i = 0; i < plan->num_merged * call->heads; i++)
            merge(call, plan->merged + i / call->heads * 3, i % call->heads);
    }
}

// Adds to mass, [start], the weights that queries [first, first + count) of one head of keys, rows
// from start on, give to the keys before start, divided by the number of heads. Absent keys get
// none.
static void add_mass(
    const MassCall *call, int kv_head, int first, int count, Workspace *work, float *scores,
    float *mass
) {
    const int dim = call->dim, group = call->heads / call->kv_heads, end = call->start + call->rows;
    const int64_t width = (end + KEYS - 1) / KEYS * KEYS;
    const float factor = call->scale * LOG2_E;
    for (int i = 0; i < count; i++) {
        const int row = (first + i) / group, head = kv_head * group + (first + i) % group;
        const float *query = call->queries + head * call->head_stride + row * call->row_stride;
        for (int d = 0; d < dim; d++) work->queries[i * dim + d] = query[d] * factor;
    }
    for (int key = 0; key < end; key += KEYS) {
        const int keys = end - key < KEYS ? end - key : KEYS;
        const float *block = call->keys + kv_head * call->key_stride + (int64_t)key * dim;
        transpose_keys(block, keys, dim, work->keys);
        for (int tile = 0; tile < count; tile += ROWS) {
            const int rows = count - tile < ROWS ? count - tile : ROWS;
            float *to = scores + tile * width + key;
            score(work, work->queries + tile * dim, rows, dim, to, width);
        }
    }
    for (int i = 0; i < count; i++) {
        float *mine = scores + i * width;
        const int seen = call->start + (first + i) / group + 1;
        for (int key = 0; key < seen; key++) mine[key] = call->absent[key] ? NOTHING : mine[key];
        for (int key = seen; key < width; key++) mine[key] = NOTHING;
        vec best = {0}, sums = {0};
        best += NOTHING;
        for (int key = 0; key < width; key += LANES) best = larger(best, load(mine + key));
        const float top = largest(best);
        for (int key = 0; key < width; key += LANES) {
            const vec weights = powers_of_2(load(mine + key) - top);
            store(mine + key, weights);
            sums += weights;
        }
        const float *weights = call->weights + (first + i) / group;
        const float sink = sink_weight(call->sinks, kv_head * group + (first + i) % group, top);
        const float each = 1 / ((total(sums) + sink) * call->heads);
        for (int kind = 0; kind < call->kinds; kind++) {
            const float share = weights[kind * call->rows] * each;
            float *to = mass + (int64_t)kind * call->start;
            if (share == 0) continue;
#pragma omp simd
            for (int key = 0; key < call->start; key++) to[key] += mine[key] * share;
        }
    }
}

// What a thread needs: a workspace, its own sums, and the scores of a part's queries.
int64_t kvboost_mass_bytes(int32_t start, int32_t rows, int32_t kinds) {
    const int64_t floats = (int64_t)(start + rows + KEYS) * (MASS_QUERIES + kinds);
    return sizeof(Workspace) + (floats + 15) / 16 * 16 * sizeof(float);
}

// Writes to mass, [kinds, start], how much rows attend to each key before the first of them, each
// row by its weights. workspaces
// has kvboost_mass_bytes() for each thread, aligned to 64 bytes. The order of summation is fixed,
// because the rows to recompute are chosen by the result.
void kvboost_attention_mass(const MassCall *call, float *mass, void *workspaces, int threads) {
    const int queries = call->rows * (call->heads / call->kv_heads);
    const int parts = (queries + MASS_QUERIES - 1) / MASS_QUERIES;
    const int64_t bytes = kvboost_mass_bytes(call->start, call->rows, call->kinds);
    const int64_t sums = (int64_t)call->kinds * call->start;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Workspace *work = (Workspace *)((char *)workspaces + omp_get_thread_num() * bytes);
        float *own = (float *)(work + 1), *scores = own + sums;
        memset(own, 0, sums * sizeof(float));
#pragma omp for schedule(static)
        for (int task = 0; task < parts * call->kv_heads; task++) {
            const int first = task / call->kv_heads * MASS_QUERIES, left = queries - first;
            const int count = left < MASS_QUERIES ? left : MASS_QUERIES;
            add_mass(call, task % call->kv_heads, first, count, work, scores, own);
        }
#pragma omp for schedule(static)
        for (int64_t at = 0; at < sums; at++) {
            mass[at] = 0;
            for (int thread = 0; thread < omp_get_num_threads(); thread++)
                mass[at] += ((float *)((Workspace *)((char *)workspaces + thread * bytes) + 1))[at];
        }
    }
}
