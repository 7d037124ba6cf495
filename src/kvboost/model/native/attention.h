// The course of attention over runs of keys; each form's attention.c includes it at its end.
//
// Rows attend to runs of keys. A run belongs to one request or is shared by several; a row sees the
// first keys of a run, up to its limit. A row that attends to several runs gets a partial result
// from each, merged by their log-sum-exps. Runs are cut into parts that threads take one by one:
//
//   for each block of 64 keys      packed once as the form wants them
//     for each STEP queries        scores = Q K'; the softmax so far; out += P V
//
// The queries of all heads that share a head of keys are rows of one matrix: row * group + head.
#pragma once

#include <omp.h>

// Queries [first, first + count) of one head of a run's keys.
static void attend_part(
    const Call *call, const Run *run, int kv_head, int first, int count, Workspace *work
) {
    const Plan *plan = call->plan;
    const int dim = plan->dim, group = call->heads / plan->kv_heads;
    clear(work, count, dim);
    work->factor = call->scale * LOG2_E; // weights are powers of 2
    for (int i = 0; i < count; i++) {
        const int at = run->first + (first + i) / group;
        const int head = kv_head * group + (first + i) % group;
        const number *query = call->queries + head * call->head_stride;
        take_query(work, i, query + plan->rows[at] * call->row_stride, dim);
        work->limits[i] = plan->limits[at];
        work->most[i] = NOTHING;
    }
    const int64_t offset = call->layer * run->layer_stride + kv_head * run->head_stride;
    const int last = work->limits[count - 1];
    for (int key = 0; key < last; key += KEYS) {
        const int keys = last - key < KEYS ? last - key : KEYS;
        const number *values = run->values + offset + (int64_t)key * dim;
        pack_keys(run->keys + offset + (int64_t)key * dim, keys, dim, work->keys);
        pack_values(work, values, keys, dim);
        for (int tile = 0; tile < count; tile += STEP) {
            const int rows = count - tile < STEP ? count - tile : STEP;
            const int seen_by_last = work->limits[tile + rows - 1] - key;
            if (seen_by_last <= 0) continue;
            score(work, tile, rows, dim, work->scores, KEYS);
            for (int row = 0; row < rows; row++) {
                const int seen = work->limits[tile + row] - key;
                weigh(work, tile + row, row, seen, dim);
            }
            add_values(work, tile, rows, seen_by_last < KEYS ? seen_by_last : KEYS, values, dim);
        }
    }
    for (int i = 0; i < count; i++) {
        const int at = run->first + (first + i) / group;
        const int head = kv_head * group + (first + i) % group;
        const float sum = sum_of(work, i);
        float *mine = work->out + i * dim;
        if (plan->slots[at] >= 0) {
            const int64_t slot = (int64_t)plan->slots[at] * call->heads + head;
            float *part = call->parts + slot * (dim + 1);
            divide(mine, sum, dim, part);
            part[dim] = work->most[i] + log2f(sum);
        } else {
            divide(mine, sum + sink_weight(call->sinks, head, work->most[i]), dim, mine);
            round_row(mine, dim, call->out + ((int64_t)plan->rows[at] * call->heads + head) * dim);
        }
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
    for (int d = 0; d < dim; d++) sum[d] /= total;
    round_row(sum, dim, call->out + ((int64_t)merged[0] * call->heads + head) * dim);
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
        BEGIN_THREAD
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
        END_THREAD
    }
}

// Where the sums of the next kind begin, in a thread's own: whole vectors after the last.
static int64_t sums_stride(const MassCall *call) { return (call->start + 16) / 16 * 16; }

// Adds to the sums of each kind, [start], the weights that queries [first, first + count) of one
// head of keys, rows from start on, give to the keys before start, divided by the number of heads.
// Absent keys get none.
static void add_mass(
    const MassCall *call, int kv_head, int first, int count, Workspace *work, float *scores,
    float *mass
) {
    const int dim = call->dim, group = call->heads / call->kv_heads, end = call->start + call->rows;
    const int64_t width = (end + KEYS - 1) / KEYS * KEYS;
    clear(work, MASS_QUERIES, dim);
    work->factor = call->scale * LOG2_E;
    for (int i = 0; i < count; i++) {
        const int row = (first + i) / group, head = kv_head * group + (first + i) % group;
        const number *query = call->queries + head * call->head_stride;
        take_query(work, i, query + row * call->row_stride, dim);
    }
    for (int key = 0; key < end; key += KEYS) {
        const int keys = end - key < KEYS ? end - key : KEYS;
        const number *block = call->keys + kv_head * call->key_stride + (int64_t)key * dim;
        pack_keys(block, keys, dim, work->keys);
        for (int tile = 0; tile < count; tile += STEP) {
            const int rows = count - tile < STEP ? count - tile : STEP;
            score(work, tile, rows, dim, scores + tile * width + key, width);
        }
    }
    for (int i = 0; i < count; i++) {
        float *mine = scores + i * width, top;
        const int seen = call->start + (first + i) / group + 1;
        const float sum = weigh_all(work, mine, call->absent, seen, width, &top);
        const float *weights = call->weights + (first + i) / group;
        const float sink = sink_weight(call->sinks, kv_head * group + (first + i) % group, top);
        const float each = 1 / ((sum + sink) * call->heads);
        for (int kind = 0; kind < call->kinds; kind++) {
            const float share = weights[kind * call->rows] * each;
            float *to = mass + kind * sums_stride(call);
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
// row by its weights. workspaces has kvboost_mass_bytes() for each thread, aligned to 64 bytes. The
// order of summation is fixed, because the rows to recompute are chosen by the result.
void kvboost_attention_mass(const MassCall *call, float *mass, void *workspaces, int threads) {
    const int queries = call->rows * (call->heads / call->kv_heads);
    const int parts = (queries + MASS_QUERIES - 1) / MASS_QUERIES;
    const int64_t bytes = kvboost_mass_bytes(call->start, call->rows, call->kinds);
    const int64_t stride = sums_stride(call);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Workspace *work = (Workspace *)((char *)workspaces + omp_get_thread_num() * bytes);
        float *own = (float *)(work + 1), *scores = own + call->kinds * stride;
        memset(own, 0, (char *)scores - (char *)own);
        BEGIN_THREAD
#pragma omp for schedule(static)
        for (int task = 0; task < parts * call->kv_heads; task++) {
            const int first = task / call->kv_heads * MASS_QUERIES, left = queries - first;
            const int count = left < MASS_QUERIES ? left : MASS_QUERIES;
            add_mass(call, task % call->kv_heads, first, count, work, scores, own);
        }
        END_THREAD
#pragma omp for schedule(static)
        for (int64_t at = 0; at < (int64_t)call->kinds * call->start; at++) {
            const int64_t from = at / call->start * stride + at % call->start;
            mass[at] = 0;
            for (int thread = 0; thread < omp_get_num_threads(); thread++)
                mass[at] += ((float *)((Workspace *)((char *)workspaces + thread * bytes) + 1))[from];
        }
    }
}
