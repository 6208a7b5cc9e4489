/* x @ weight.T in float32 on a CPU, for the few rows of a decode step and the many of a training step.

   Every result is a chain of multiply-adds over CHAIN terms, then the next chain, and the chains are added up in order.
   Each lane of a vector is one row, so a row's bits depend neither on the other rows, nor on its place among them, nor
   on the number of threads, nor on a library. Multiply-adds are fused where the processor has them, in every loop.

   Lanes of a vector are rows of x, which is transposed first; the weight is read as it lies.
   Compile with -ffp-contract=off. */

#include <stdlib.h>

#include "product.h"
#include "threads.h"

#if defined(__AVX2__) && defined(__FMA__)
#define HAS_AVX2 1
#define LANES 8
#else
#define HAS_AVX2 0
#define LANES 4
#endif
#if HAS_AVX2 && defined(__AVX512F__)
#define HAS_AVX512 1
#define BATCH 64 /* rows that are computed together */
#elif HAS_AVX2
#define HAS_AVX512 0
#define BATCH 16
#else
#define HAS_AVX512 0
#define BATCH 8
#endif
#include "vectors.h"

#define CHAIN 384            /* terms that are added in one go */
#define TILE 48              /* outputs that are put in place together */
#define ROWS 64              /* rows of x that are transposed together */
#define LINE 16              /* floats of one line of the cache */
#define ITEMS_PER_THREAD 4   /* so that threads finish at about the same time */
#define SMALL_WORK (1 << 18) /* multiplications below which other threads are not worth waking */

struct work {
    const struct product *of;
    int64_t tiles_per_item, items_per_block, num_items, next;
    int32_t out_of_memory;
};

INLINE int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

INLINE vec fused(vec terms, float factor, vec sums) {
#if HAS_AVX2
    return (vec)_mm256_fmadd_ps((__m256)terms, _mm256_set1_ps(factor), (__m256)sums);
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; i++) sums[i] = __builtin_fmaf(terms[i], factor, sums[i]);
    return sums;
#else
    return terms * factor + sums;
#endif
}

INLINE void add(float *to, vec sums, int is_first) {
    if (!is_first) sums += load(to);
    store(to, sums);
}

#if HAS_AVX512
#define EACH_WIDE(WIDE, ...) _Pragma("GCC unroll 4") for (int v = 0; v < WIDE; v++) __VA_ARGS__
typedef __m512 wide;

INLINE wide fused_wide(wide terms, float factor, wide sums) {
    return _mm512_fmadd_ps(terms, _mm512_set1_ps(factor), sums);
}

INLINE void add_wide(float *to, wide sums, int is_first) {
    _mm512_storeu_ps(to, is_first ? sums : _mm512_add_ps(_mm512_loadu_ps(to), sums));
}
#else
#define EACH_WIDE(WIDE, ...)
typedef vec wide;
#endif

#define EACH_NARROW(NARROW, ...) _Pragma("GCC unroll 2") for (int v = 0; v < NARROW; v++) __VA_ARGS__
#define EACH_OUTPUT(NR, ...) _Pragma("GCC unroll 8") for (int n = 0; n < NR; n++) __VA_ARGS__

/* One chain of NR outputs for lanes of WIDE vectors of 16 and NARROW ones of LANES, added to tile [NR, lanes]. */
#define STRIP(NAME, WIDE, NARROW, NR)                                                                              \
    static void NAME(const float *restrict turned, const float *restrict weight, float *restrict tile,             \
                     int64_t width, int64_t count, int is_first) {                                                 \
        enum { lanes = 16 * WIDE + LANES * NARROW };                                                                   \
        wide sums[NR][WIDE + 1];                                                                                   \
        vec few[NR][NARROW + 1];                                                                                   \
        EACH_OUTPUT(NR, {                                                                                          \
            EACH_WIDE(WIDE, sums[n][v] = _mm512_setzero_ps();)                                                     \
            EACH_NARROW(NARROW, few[n][v] = (vec){};)                                                              \
        })                                                                                                         \
        for (int64_t k = 0; k < count; k++) {                                                                      \
            const float *from = turned + k * lanes;                                                                \
            wide terms[WIDE + 1];                                                                                  \
            vec few_terms[NARROW + 1];                                                                             \
            EACH_WIDE(WIDE, terms[v] = _mm512_loadu_ps(from + 16 * v);)                                            \
            EACH_NARROW(NARROW, few_terms[v] = load(from + 16 * WIDE + LANES * v);)                                    \
            if (k % LINE == 0) EACH_OUTPUT(NR, __builtin_prefetch(weight + (NR + n) * width + k);)                 \
            EACH_OUTPUT(NR, {                                                                                      \
                float factor = weight[n * width + k];                                                              \
                EACH_WIDE(WIDE, sums[n][v] = fused_wide(terms[v], factor, sums[n][v]);)                            \
                EACH_NARROW(NARROW, few[n][v] = fused(few_terms[v], factor, few[n][v]);)                           \
            })                                                                                                     \
        }                                                                                                          \
        EACH_OUTPUT(NR, {                                                                                          \
            float *to = tile + n * lanes;                                                                          \
            EACH_WIDE(WIDE, add_wide(to + 16 * v, sums[n][v], is_first);)                                          \
            EACH_NARROW(NARROW, add(to + 16 * WIDE + LANES * v, few[n][v], is_first);)                                 \
        })                                                                                                         \
    }

#if HAS_AVX512
STRIP(lanes8, 0, 1, 8)
STRIP(lanes8_one, 0, 1, 1)
STRIP(lanes16, 1, 0, 8)
STRIP(lanes16_one, 1, 0, 1)
STRIP(lanes24, 1, 1, 8)
STRIP(lanes24_one, 1, 1, 1)
STRIP(lanes32, 2, 0, 8)
STRIP(lanes32_one, 2, 0, 1)
STRIP(lanes40, 2, 1, 8)
STRIP(lanes40_one, 2, 1, 1)
STRIP(lanes48, 3, 0, 8)
STRIP(lanes48_one, 3, 0, 1)
STRIP(lanes56, 3, 1, 6)
STRIP(lanes56_one, 3, 1, 1)
STRIP(lanes64, 4, 0, 6)
STRIP(lanes64_one, 4, 0, 1)
#elif HAS_AVX2
STRIP(lanes8, 0, 1, 8)
STRIP(lanes8_one, 0, 1, 1)
STRIP(lanes16, 0, 2, 6)
STRIP(lanes16_one, 0, 2, 1)
#else
STRIP(lanes8, 0, 2, 6)
STRIP(lanes8_one, 0, 2, 1)
#endif

typedef void (*strip)(const float *, const float *, float *, int64_t, int64_t, int);

static const struct {
    strip many, one;
    int count; /* outputs of `many` */
} strips[] = {
    {0, 0, 0},
    {lanes8, lanes8_one, HAS_AVX2 ? 8 : 6},
#if HAS_AVX512
    {lanes16, lanes16_one, 8},
    {lanes24, lanes24_one, 8},
    {lanes32, lanes32_one, 8},
    {lanes40, lanes40_one, 8},
    {lanes48, lanes48_one, 8},
    {lanes56, lanes56_one, 6},
    {lanes64, lanes64_one, 6},
#elif HAS_AVX2
    {lanes16, lanes16_one, 6},
#endif
};

#if HAS_AVX2
static inline void turn8(__m256 r[8]) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
            b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}
#endif

/* to[k * lanes + m] = from[m * row + k] for m below `rows` and k below `width`, and 0 for m from there to 8. */
static void turn(const float *from, int64_t row, int64_t rows, int64_t width, float *to, int64_t lanes) {
    int64_t k = 0;
#if HAS_AVX2
    for (; k + 8 <= width; k += 8) {
        __m256 r[8];
        for (int m = 0; m < 8; m++) r[m] = m < rows ? _mm256_loadu_ps(from + m * row + k) : _mm256_setzero_ps();
        turn8(r);
        for (int i = 0; i < 8; i++) _mm256_storeu_ps(to + (k + i) * lanes, r[i]);
    }
#endif
    for (; k < width; k++)
        for (int64_t m = 0; m < 8; m++) to[k * lanes + m] = m < rows ? from[m * row + k] : 0.0f;
}

/* out[m * row + n] = tile[n * lanes + m] for m below `rows`, at most 8, and n below `count`. */
static void put(const float *tile, int64_t lanes, float *out, int64_t row, int64_t rows, int64_t count) {
    int64_t n = 0;
#if HAS_AVX2
    for (; n + 8 <= count; n += 8) {
        __m256 r[8];
        for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(tile + (n + i) * lanes);
        turn8(r);
        for (int64_t m = 0; m < rows; m++) _mm256_storeu_ps(out + m * row + n, r[m]);
    }
#endif
    for (; n < count; n++)
        for (int64_t m = 0; m < rows; m++) out[m * row + n] = tile[n * lanes + m];
}

INLINE int64_t lanes_for(int64_t rows) { return parts_of(least(rows, BATCH), 8) * 8; }

/* A tile of outputs for some lanes of rows: computed, and put in place. */
static void compute(const struct product *of, const float *turned, int64_t row, int64_t rows, int64_t start) {
    float tile[TILE * BATCH] __attribute__((aligned(64)));
    int64_t lanes = lanes_for(rows), count = least(of->outputs - start, TILE), width = of->width;
    int64_t step = strips[lanes / 8].count;
    for (int64_t k = 0; k < width; k += CHAIN) {
        const float *terms = turned + k * lanes, *weight = of->weight + start * width + k;
        int64_t n = 0, length = least(width - k, CHAIN);
        for (; n + step <= count; n += step)
            strips[lanes / 8].many(terms, weight + n * width, tile + n * lanes, width, length, k == 0);
        for (; n < count; n++)
            strips[lanes / 8].one(terms, weight + n * width, tile + n * lanes, width, length, k == 0);
    }
    float *out = of->out + row * of->out_row + start;
    for (int64_t m = 0; m < rows; m += 8)
        put(tile + m, lanes, out + m * of->out_row, of->out_row, least(rows - m, 8), count);
}

/* Rows [first, first + num_rows) of x in parts of BATCH (the last may be narrower), each [width, lanes]. */
static void turn_block(const struct product *of, int64_t first, int64_t num_rows, float *turned) {
    for (int64_t row = 0; row < num_rows; row += 8) {
        int64_t part = row / BATCH * BATCH, lanes = lanes_for(num_rows - part);
        turn(of->x + (first + row) * of->x_row, of->x_row, least(num_rows - row, 8), of->width,
             turned + part * of->width + row - part, lanes);
    }
}

/* An item is some tiles of outputs for one block of rows, which a thread transposes for itself. */
static void work_on(void *argument) {
    struct work *work = argument;
    const struct product *of = work->of;
    float *turned = aligned_alloc(64, (size_t)(of->width * ROWS) * sizeof(float));
    if (!turned) {
        __atomic_store_n(&work->out_of_memory, 1, __ATOMIC_RELAXED);
        return;
    }
    int64_t item, present = -1;
    while ((item = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->num_items) {
        int64_t block = item / work->items_per_block, first = block * ROWS;
        int64_t num_rows = least(of->rows - first, ROWS);
        int64_t start = item % work->items_per_block * work->tiles_per_item * TILE;
        int64_t end = least(start + work->tiles_per_item * TILE, of->outputs);
        if (block != present) turn_block(of, first, num_rows, turned);
        present = block;
        for (; start < end; start += TILE)
            for (int64_t row = 0; row < num_rows; row += BATCH)
                compute(of, turned + row * of->width, first + row, least(num_rows - row, BATCH), start);
    }
    free(turned);
}

/* 0, or 1 where there is no memory. */
int forge_linear(const struct product *of) {
    if (of->rows == 0 || of->outputs == 0) return 0;
    int64_t num_blocks = parts_of(of->rows, ROWS), num_tiles = parts_of(of->outputs, TILE);
    int64_t is_small = of->rows * of->width * of->outputs < SMALL_WORK;
    int64_t num_threads = HAS_THREADS && !is_small && of->num_threads > 1 ? of->num_threads : 1;
    int64_t wanted = num_threads == 1 ? 1 : least(parts_of(ITEMS_PER_THREAD * num_threads, num_blocks), num_tiles);
    struct work work = {.of = of, .tiles_per_item = parts_of(num_tiles, wanted)};
    work.items_per_block = parts_of(num_tiles, work.tiles_per_item);
    work.num_items = num_blocks * work.items_per_block;
    num_threads = least(num_threads, work.num_items);
    run_on_threads(work_on, &work, (int)num_threads);
    return work.out_of_memory;
}
