// Attention of packed rows over the KV of many requests, in one call: bf16 on a CPU with AMX.
//
// Rows attend to runs of keys. A run belongs to one request or is shared by several; a row sees the
// first keys of a run, up to its limit. A row that attends to several runs gets a partial result
// from each, merged by their log-sum-exps. Runs are cut into parts that threads take one by one:
//
//   for each block of 64 keys      packed once as the tiles want them
//     for each 16 queries          scores = Q K'; the softmax so far; out += P V
//
// The queries of all heads that share a head of keys are rows of one matrix: row * group + head.

#include "tiles.h"

#include <omp.h>

#define KEYS 64          // keys of a block
#define MOST_DIM 256
#define MOST_QUERIES 256 // of a part: keys that are packed once serve all of them
#define NOTHING -1e30f   // the score of a key that is not seen
#define SLACK 8          // powers of 2
#define MASS_QUERIES 64  // of a part whose scores are all kept

typedef struct {
    bf16 queries[MOST_QUERIES * MOST_DIM];
    float out[MOST_QUERIES * MOST_DIM];
    float sums[MOST_QUERIES * TILE];
    float most[MOST_QUERIES];
    int32_t limits[MOST_QUERIES];
    bf16 keys[KEYS * MOST_DIM];   // [key tile][dim pair][key, 2]
    bf16 values[KEYS * MOST_DIM]; // [key half][dim tile][key pair][dim, 2]
    float scores[TILE * KEYS];
    bf16 weights[TILE * KEYS];
} __attribute__((aligned(64))) Workspace;

static void pack_keys(const bf16 *keys, int count, int dim, bf16 *out) {
    for (int key = 0; key < KEYS; key += TILE)
        for (int d = 0; d < dim; d += 2 * TILE, out += 2 * TILE * TILE)
            transpose(keys + key * dim + d, count - key, dim, out);
}

static void pack_values(const bf16 *values, int count, int dim, bf16 *out) {
    __m512i low, high;
    {
        uint16_t first[32], second[32];
        for (int i = 0; i < 16; i++) {
            first[2 * i] = i, first[2 * i + 1] = 32 + i;
            second[2 * i] = 16 + i, second[2 * i + 1] = 48 + i;
        }
        low = _mm512_loadu_si512(first), high = _mm512_loadu_si512(second);
    }
    for (int half = 0; half < KEYS; half += 2 * TILE)
        for (int d = 0; d < dim; d += 2 * TILE)
            for (int pair = 0; pair < TILE; pair++) {
                const int key = half + 2 * pair;
                const __m512i none = _mm512_setzero_si512();
                const bf16 *at = values + (int64_t)key * dim + d;
                const __m512i a = key < count ? _mm512_loadu_si512(at) : none;
                const __m512i b = key + 1 < count ? _mm512_loadu_si512(at + dim) : none;
                bf16 *to = out + half * dim + d * 2 * TILE + pair * 2 * TILE;
                _mm512_store_si512(to, _mm512_permutex2var_epi16(a, low, b));
                _mm512_store_si512(to + 2 * TILE * TILE, _mm512_permutex2var_epi16(a, high, b));
            }
}

static void score(Workspace *work, const bf16 *queries, int dim) {
    compiler_barrier();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const int step = dim / 32 * 2 * TILE * TILE; // from one tile of keys to the next
    for (int d = 0; d < dim / 32; d++) {
        const bf16 *keys = work->keys + d * 2 * TILE * TILE;
        _tile_loadd(4, queries + d * 32, dim * 2);
        _tile_loadd(5, keys, 64);
        _tile_loadd(6, keys + step, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, keys + 2 * step, 64);
        _tile_loadd(6, keys + 3 * step, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 6);
    }
    float *scores = work->scores;
    _tile_stored(0, scores, KEYS * 4);
    _tile_stored(1, scores + 16, KEYS * 4);
    _tile_stored(2, scores + 32, KEYS * 4);
    _tile_stored(3, scores + 48, KEYS * 4);
}

// The weights of one query's keys, relative to its highest score so far, or nearly: what the query
// has added up is only rescaled when a score exceeds that reference by more than SLACK.
static inline void weigh(Workspace *work, int query, int row, int seen, int dim, float scale) {
    __m512 s[4];
    __m512 most = _mm512_set1_ps(NOTHING);
    for (int i = 0; i < 4; i++) {
        s[i] = _mm512_load_ps(work->scores + row * KEYS + 16 * i);
        if (seen < 16 * (i + 1)) {
            const int left = seen > 16 * i ? seen - 16 * i : 0;
            s[i] = _mm512_mask_mov_ps(_mm512_set1_ps(NOTHING), (1u << left) - 1, s[i]);
        }
        most = _mm512_max_ps(most, s[i]);
    }
    const __m512 factor = _mm512_set1_ps(scale);
    most = _mm512_mul_ps(most, factor);
    __m512 sum = _mm512_load_ps(work->sums + query * TILE);
    float top = work->most[query];
    if (_mm512_cmp_ps_mask(most, _mm512_set1_ps(top + SLACK), _CMP_GT_OQ)) {
        const float before = top;
        work->most[query] = top = _mm512_reduce_max_ps(most);
        const __m512 less = power_of_2(_mm512_set1_ps(before - top));
        sum = _mm512_mul_ps(sum, less);
        float *out = work->out + query * dim;
        for (int d = 0; d < dim; d += 16)
            _mm512_store_ps(out + d, _mm512_mul_ps(_mm512_load_ps(out + d), less));
    }
    for (int i = 0; i < 4; i++) {
        s[i] = power_of_2(_mm512_fmsub_ps(s[i], factor, _mm512_set1_ps(top)));
        sum = _mm512_add_ps(sum, s[i]);
    }
    _mm512_store_ps(work->sums + query * TILE, sum);
    bf16 *weights = work->weights + row * KEYS;
    _mm512_store_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(s[1], s[0]));
    _mm512_store_si512(weights + 32, (__m512i)_mm512_cvtne2ps_pbh(s[3], s[2]));
}

static void add_values(Workspace *work, int query, int dim) {
    compiler_barrier();
    _tile_loadd(4, work->weights, KEYS * 2);
    _tile_loadd(5, work->weights + 32, KEYS * 2);
    for (int d = 0; d < dim; d += 16) {
        float *out = work->out + query * dim + d;
        const bf16 *values = work->values + d * 2 * TILE;
        _tile_loadd(0, out, dim * 4);
        _tile_loadd(6, values, 64);
        _tile_loadd(7, values + 32 * dim, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(0, 5, 7);
        _tile_stored(0, out, dim * 4);
    }
}

// Queries [first, first + count) of one head of a run's keys.
static void attend_part(
    const Call *call, const Run *run, int kv_head, int first, int count, Workspace *work
) {
    const Plan *plan = call->plan;
    const int dim = plan->dim, group = call->heads / plan->kv_heads;
    const int tiles = (count + TILE - 1) / TILE;
    memset(work->queries, 0, (size_t)tiles * TILE * dim * sizeof(bf16));
    memset(work->out, 0, (size_t)tiles * TILE * dim * sizeof(float));
    memset(work->sums, 0, (size_t)tiles * TILE * TILE * sizeof(float));
    for (int i = 0; i < count; i++) {
        const int at = run->first + (first + i) / group;
        const int head = kv_head * group + (first + i) % group;
        const bf16 *query = call->queries + head * call->head_stride;
        query += plan->rows[at] * call->row_stride;
        memcpy(work->queries + i * dim, query, dim * sizeof(bf16));
        work->limits[i] = plan->limits[at];
        work->most[i] = NOTHING;
    }
    const int64_t offset = call->layer * run->layer_stride + kv_head * run->head_stride;
    const int last = work->limits[count - 1];
    for (int key = 0; key < last; key += KEYS) {
        const int keys = last - key < KEYS ? last - key : KEYS;
        pack_keys(run->keys + offset + (int64_t)key * dim, keys, dim, work->keys);
        pack_values(run->values + offset + (int64_t)key * dim, keys, dim, work->values);
        for (int tile = 0; tile < count; tile += TILE) {
            const int rows = count - tile < TILE ? count - tile : TILE;
            if (work->limits[tile + rows - 1] <= key) continue;
            score(work, work->queries + tile * dim, dim);
            for (int row = 0; row < rows; row++) {
                const int seen = work->limits[tile + row] - key;
                if (seen > 0)
                    weigh(work, tile + row, row, seen, dim, call->scale * LOG2_E);
                else
                    memset(work->weights + row * KEYS, 0, KEYS * sizeof(bf16));
            }
            add_values(work, tile, dim);
        }
    }
    for (int i = 0; i < count; i++) {
        const int at = run->first + (first + i) / group;
        const int head = kv_head * group + (first + i) % group;
        float sum = _mm512_reduce_add_ps(_mm512_load_ps(work->sums + i * TILE));
        if (plan->slots[at] < 0) sum += sink_weight(call->sinks, head, work->most[i]);
        float *mine = work->out + i * dim;
        for (int d = 0; d < dim; d++) mine[d] /= sum;
        if (plan->slots[at] < 0) {
            round_row(mine, dim, call->out + ((int64_t)plan->rows[at] * call->heads + head) * dim);
        } else {
            float *part = call->parts + ((int64_t)plan->slots[at] * call->heads + head) * (dim + 1);
            memcpy(part, mine, dim * sizeof(float));
            part[dim] = work->most[i] + log2f(sum);
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
        TileConfig before;
        configure_tiles(&before);
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
        restore_tiles(&before);
    }
}

// Where the sums of the next kind begin, in a thread's own: whole vectors after the last.
static int64_t sums_stride(const MassCall *call) {
    return (call->start + TILE) / TILE * TILE;
}

// Adds to the sums of each kind, [start] and up to 15 more without meaning, the weights that queries [first, first +
// count) of one head of keys, rows from start on, give to the keys before start, divided by the
// number of heads. Absent keys get none.
static void add_mass(
    const MassCall *call, int kv_head, int first, int count, Workspace *work, float *scores,
    float *mass
) {
    const int dim = call->dim, group = call->heads / call->kv_heads, end = call->start + call->rows;
    const int64_t width = (end + KEYS - 1) / KEYS * KEYS;
    const __m512 factor = _mm512_set1_ps(call->scale * LOG2_E), nothing = _mm512_set1_ps(NOTHING);
    memset(work->queries, 0, (size_t)MASS_QUERIES * dim * sizeof(bf16));
    for (int i = 0; i < count; i++) {
        const int row = (first + i) / group, head = kv_head * group + (first + i) % group;
        const bf16 *query = call->queries + head * call->head_stride + row * call->row_stride;
        memcpy(work->queries + i * dim, query, dim * sizeof(bf16));
    }
    for (int key = 0; key < end; key += KEYS) {
        const int keys = end - key < KEYS ? end - key : KEYS;
        pack_keys(call->keys + kv_head * call->key_stride + (int64_t)key * dim, keys, dim, work->keys);
        for (int tile = 0; tile < count; tile += TILE) {
            score(work, work->queries + tile * dim, dim);
            for (int row = 0; row < TILE; row++)
                memcpy(scores + (tile + row) * width + key, work->scores + row * KEYS, KEYS * 4);
        }
    }
    for (int i = 0; i < count; i++) {
        float *mine = scores + i * width;
        const int seen = call->start + (first + i) / group + 1;
        __m512 most = nothing, sum = _mm512_setzero_ps();
        for (int key = 0; key < seen; key += TILE) {
            const __mmask16 there = _mm_cmpeq_epi8_mask(
                _mm_loadu_si128((const __m128i *)(call->absent + key)), _mm_setzero_si128());
            const __mmask16 before = seen - key < TILE ? (1u << (seen - key)) - 1 : 0xffff;
            const __m512 found = _mm512_mul_ps(_mm512_load_ps(mine + key), factor);
            const __m512 shown = _mm512_mask_mov_ps(nothing, there & before, found);
            _mm512_store_ps(mine + key, shown);
            most = _mm512_max_ps(most, shown);
        }
        const float highest = _mm512_reduce_max_ps(most);
        const __m512 top = _mm512_set1_ps(highest);
        for (int key = 0; key < seen; key += TILE) {
            const __m512 weights = power_of_2(_mm512_sub_ps(_mm512_load_ps(mine + key), top));
            _mm512_store_ps(mine + key, weights);
            sum = _mm512_add_ps(sum, weights);
        }
        const float *weights = call->weights + (first + i) / group;
        const float sink = sink_weight(call->sinks, kv_head * group + (first + i) % group, highest);
        const float each = 1 / ((_mm512_reduce_add_ps(sum) + sink) * call->heads);
        for (int kind = 0; kind < call->kinds; kind++) {
            const float weight = weights[kind * call->rows] * each;
            const __m512 share = _mm512_set1_ps(weight);
            float *to = mass + kind * sums_stride(call);
            if (weight == 0) continue;
            for (int key = 0; key < call->start; key += TILE)
                _mm512_store_ps(to + key, _mm512_fmadd_ps(_mm512_load_ps(mine + key), share,
                                                          _mm512_load_ps(to + key)));
        }
    }
}

// What a thread needs: a workspace, its own sums, and the scores of a part's queries.
int64_t kvboost_mass_bytes(int32_t start, int32_t rows, int32_t kinds) {
    const int64_t floats = (int64_t)(start + rows + KEYS) * (MASS_QUERIES + kinds);
    return sizeof(Workspace) + (floats + TILE - 1) / TILE * TILE * sizeof(float);
}

// Writes to mass, [kinds, start], how much rows attend to each key before the first of them, each
// row by its weights. workspaces
// has kvboost_mass_bytes() for each thread, aligned to 64 bytes. The order of summation is fixed,
// because the rows to recompute are chosen by the result.
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
        TileConfig before;
        configure_tiles(&before);
#pragma omp for schedule(static)
        for (int task = 0; task < parts * call->kv_heads; task++) {
            const int first = task / call->kv_heads * MASS_QUERIES, left = queries - first;
            const int count = left < MASS_QUERIES ? left : MASS_QUERIES;
            add_mass(call, task % call->kv_heads, first, count, work, scores, own);
        }
        restore_tiles(&before);
#pragma omp for schedule(static)
        for (int64_t at = 0; at < (int64_t)call->kinds * call->start; at++) {
            const int64_t from = at / call->start * stride + at % call->start;
            mass[at] = 0;
            for (int thread = 0; thread < omp_get_num_threads(); thread++)
                mass[at] += ((float *)((Workspace *)((char *)workspaces + thread * bytes) + 1))[from];
        }
    }
}
