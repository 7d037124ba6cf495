// Attention of packed rows over the KV of many requests, in one call: bf16 on a CPU with AMX.

#include "tiles.h"

#define KEYS 64          // keys of a block
#define STEP TILE        // queries that are scored at once
#define MOST_DIM 256
#define MOST_QUERIES 256 // of a part: keys that are packed once serve all of them
#define NOTHING -1e30f   // the score of a key that is not seen
#define SLACK 8          // powers of 2
#define MASS_QUERIES 64  // of a part whose scores are all kept

#define BEGIN_THREAD TileConfig before; configure_tiles(&before);
#define END_THREAD restore_tiles(&before);

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
    float factor;
} __attribute__((aligned(64))) Workspace;

static void pack_keys(const bf16 *keys, int count, int dim, bf16 *out) {
    for (int key = 0; key < KEYS; key += TILE)
        for (int d = 0; d < dim; d += 2 * TILE, out += 2 * TILE * TILE)
            transpose(keys + key * dim + d, count - key, dim, out);
}

static void pack_values(Workspace *work, const bf16 *values, int count, int dim) {
    bf16 *out = work->values;
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

// Scores of `rows` queries from `tile` on with the block's keys: to out, by its stride.
static void score(
    Workspace *work, int tile, int rows, int dim, float *out, int64_t stride
) {
    const bf16 *queries = work->queries + tile * dim;
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
    if (out == scores) return;
    compiler_barrier();
    for (int row = 0; row < rows; row++)
        memcpy(out + row * stride, scores + row * KEYS, KEYS * sizeof(float));
}

// The weights of one query's keys, relative to its highest score so far, or nearly: what the query
// has added up is only rescaled when a score exceeds that reference by more than SLACK.
static inline void weigh(Workspace *work, int query, int row, int seen, int dim) {
    bf16 *weights = work->weights + row * KEYS;
    if (seen <= 0) {
        memset(weights, 0, KEYS * sizeof(bf16));
        return;
    }
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
    const __m512 factor = _mm512_set1_ps(work->factor);
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
    _mm512_store_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(s[1], s[0]));
    _mm512_store_si512(weights + 32, (__m512i)_mm512_cvtne2ps_pbh(s[3], s[2]));
}

static void add_values(
    Workspace *work, int tile, int rows, int weighed, const bf16 *values_as_they_are, int dim
) {
    (void)rows, (void)weighed, (void)values_as_they_are; // all of the tile, and packed values
    compiler_barrier();
    _tile_loadd(4, work->weights, KEYS * 2);
    _tile_loadd(5, work->weights + 32, KEYS * 2);
    for (int d = 0; d < dim; d += 16) {
        float *out = work->out + tile * dim + d;
        const bf16 *values = work->values + d * 2 * TILE;
        _tile_loadd(0, out, dim * 4);
        _tile_loadd(6, values, 64);
        _tile_loadd(7, values + 32 * dim, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(0, 5, 7);
        _tile_stored(0, out, dim * 4);
    }
}

static void clear(Workspace *work, int count, int dim) {
    const int tiles = (count + TILE - 1) / TILE;
    memset(work->queries, 0, (size_t)tiles * TILE * dim * sizeof(bf16));
    memset(work->out, 0, (size_t)tiles * TILE * dim * sizeof(float));
    memset(work->sums, 0, (size_t)tiles * TILE * TILE * sizeof(float));
}

static void take_query(Workspace *work, int i, const bf16 *query, int dim) {
    memcpy(work->queries + i * dim, query, dim * sizeof(bf16));
}

static float sum_of(const Workspace *work, int query) {
    return _mm512_reduce_add_ps(_mm512_load_ps(work->sums + query * TILE));
}

static void divide(const float *from, float by, int dim, float *to) {
    for (int d = 0; d < dim; d++) to[d] = from[d] / by;
}

// Turns the scores of all keys into weights, relative to the highest score, which is written to
// `top`; returns their sum.
static float weigh_all(
    const Workspace *work, float *scores, const uint8_t *absent, int seen, int64_t width, float *top
) {
    (void)width;
    const __m512 factor = _mm512_set1_ps(work->factor), nothing = _mm512_set1_ps(NOTHING);
    __m512 most = nothing, sum = _mm512_setzero_ps();
    for (int key = 0; key < seen; key += TILE) {
        const __mmask16 there = _mm_cmpeq_epi8_mask(
            _mm_loadu_si128((const __m128i *)(absent + key)), _mm_setzero_si128());
        const __mmask16 before = seen - key < TILE ? (1u << (seen - key)) - 1 : 0xffff;
        const __m512 found = _mm512_mul_ps(_mm512_load_ps(scores + key), factor);
        const __m512 shown = _mm512_mask_mov_ps(nothing, there & before, found);
        _mm512_store_ps(scores + key, shown);
        most = _mm512_max_ps(most, shown);
    }
    *top = _mm512_reduce_max_ps(most);
    for (int key = 0; key < seen; key += TILE) {
        const __m512 less = _mm512_sub_ps(_mm512_load_ps(scores + key), _mm512_set1_ps(*top));
        const __m512 weights = power_of_2(less);
        _mm512_store_ps(scores + key, weights);
        sum = _mm512_add_ps(sum, weights);
    }
    return _mm512_reduce_add_ps(sum);
}

#include "../attention.h"
