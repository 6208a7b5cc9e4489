/* x @ weight.T in float32 on a CPU, fast for the few rows of a decode step.

   Every result is a chain of fused multiply-adds over `chain` terms, then the next chain, and the chains are added up
   in order. So a row's bits depend neither on the other rows nor on the number of threads. Libraries of products add
   in the same way: with the right length of a chain the bits are theirs.

   Lanes of a vector are rows of x, which is turned first; the weight is read once, as it lies. */

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>

#if !defined(__AVX2__) || !defined(__FMA__)
#error "written for AVX2 with fused multiply-adds, and for AVX-512"
#endif

#define TILE 48 /* outputs that are put in place together */
#define ROWS 64 /* rows of x that are turned together */
#define LINE 16 /* floats of one line of the cache */
#if defined(__AVX512F__)
#define LANES 64 /* rows that are computed together */
#else
#define LANES 16
#endif

struct product {
    const float *x, *weight;
    float *out;
    int64_t rows, width, outputs; /* x [rows, width], weight [outputs, width], out [rows, outputs] */
    int64_t x_row, out_row;       /* floats from one row to the next */
    int64_t chain;
    int32_t num_threads;
};

struct work {
    const struct product *of;
    const float *turned; /* rows of x in parts of LANES (the last may be narrower), each [width, lanes] */
    int64_t first_row, num_rows, next;
};

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(__AVX512F__)
#define EACH_WIDE(WIDE, ...) _Pragma("GCC unroll 4") for (int v = 0; v < WIDE; v++) __VA_ARGS__
typedef __m512 wide;

static inline wide fused_wide(wide terms, float factor, wide sums) {
    return _mm512_fmadd_ps(terms, _mm512_set1_ps(factor), sums);
}

static inline void add_wide(float *to, wide sums, int is_first) {
    _mm512_storeu_ps(to, is_first ? sums : _mm512_add_ps(_mm512_loadu_ps(to), sums));
}
#else
#define EACH_WIDE(WIDE, ...)
typedef __m256 wide;
#endif

static inline __m256 fused(__m256 terms, float factor, __m256 sums) {
    return _mm256_fmadd_ps(terms, _mm256_set1_ps(factor), sums);
}

static inline void add(float *to, __m256 sums, int is_first) {
    _mm256_storeu_ps(to, is_first ? sums : _mm256_add_ps(_mm256_loadu_ps(to), sums));
}

#define EACH_NARROW(NARROW, ...) _Pragma("GCC unroll 2") for (int v = 0; v < NARROW; v++) __VA_ARGS__
#define EACH_OUTPUT(NR, ...) _Pragma("GCC unroll 8") for (int n = 0; n < NR; n++) __VA_ARGS__

/* NR outputs for lanes of WIDE vectors of 16 and NARROW ones of 8, into tile [NR, lanes]. */
#define STRIP(NAME, WIDE, NARROW, NR)                                                                              \
    static void NAME(const float *restrict turned, const float *restrict weight, float *restrict tile,             \
                     int64_t width, int64_t chain) {                                                               \
        enum { lanes = 16 * WIDE + 8 * NARROW };                                                                   \
        for (int64_t start = 0; start < width; start += chain) {                                                   \
            int64_t end = least(start + chain, width);                                                             \
            wide sums[NR][WIDE + 1];                                                                               \
            __m256 few[NR][NARROW + 1];                                                                            \
            EACH_OUTPUT(NR, {                                                                                      \
                EACH_WIDE(WIDE, sums[n][v] = _mm512_setzero_ps();)                                                 \
                EACH_NARROW(NARROW, few[n][v] = _mm256_setzero_ps();)                                              \
            })                                                                                                     \
            for (int64_t k = start; k < end; k++) {                                                                \
                const float *from = turned + k * lanes;                                                            \
                wide terms[WIDE + 1];                                                                              \
                __m256 few_terms[NARROW + 1];                                                                      \
                EACH_WIDE(WIDE, terms[v] = _mm512_loadu_ps(from + 16 * v);)                                        \
                EACH_NARROW(NARROW, few_terms[v] = _mm256_loadu_ps(from + 16 * WIDE + 8 * v);)                     \
                if (k % LINE == 0) EACH_OUTPUT(NR, __builtin_prefetch(weight + (NR + n) * width + k);)             \
                EACH_OUTPUT(NR, {                                                                                  \
                    float factor = weight[n * width + k];                                                          \
                    EACH_WIDE(WIDE, sums[n][v] = fused_wide(terms[v], factor, sums[n][v]);)                        \
                    EACH_NARROW(NARROW, few[n][v] = fused(few_terms[v], factor, few[n][v]);)                       \
                })                                                                                                 \
            }                                                                                                      \
            EACH_OUTPUT(NR, {                                                                                      \
                float *to = tile + n * lanes;                                                                      \
                EACH_WIDE(WIDE, add_wide(to + 16 * v, sums[n][v], start == 0);)                                    \
                EACH_NARROW(NARROW, add(to + 16 * WIDE + 8 * v, few[n][v], start == 0);)                           \
            })                                                                                                     \
        }                                                                                                          \
    }

#if defined(__AVX512F__)
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
#else
STRIP(lanes8, 0, 1, 8)
STRIP(lanes8_one, 0, 1, 1)
STRIP(lanes16, 0, 2, 6)
STRIP(lanes16_one, 0, 2, 1)
#endif

typedef void (*strip)(const float *, const float *, float *, int64_t, int64_t);

static const struct {
    strip many, one;
    int count; /* outputs of `many` */
} strips[] = {
    {0, 0, 0},
    {lanes8, lanes8_one, 8},
#if defined(__AVX512F__)
    {lanes16, lanes16_one, 8},
    {lanes24, lanes24_one, 8},
    {lanes32, lanes32_one, 8},
    {lanes40, lanes40_one, 8},
    {lanes48, lanes48_one, 8},
    {lanes56, lanes56_one, 6},
    {lanes64, lanes64_one, 6},
#else
    {lanes16, lanes16_one, 6},
#endif
};

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

/* to[k * lanes + m] = from[m * row + k] for m below `rows` and k below `width`, and 0 for m from there to 8. */
static void turn(const float *from, int64_t row, int64_t rows, int64_t width, float *to, int64_t lanes) {
    int64_t k = 0;
    for (; k + 8 <= width; k += 8) {
        __m256 r[8];
        for (int m = 0; m < 8; m++) r[m] = m < rows ? _mm256_loadu_ps(from + m * row + k) : _mm256_setzero_ps();
        turn8(r);
        for (int i = 0; i < 8; i++) _mm256_storeu_ps(to + (k + i) * lanes, r[i]);
    }
    for (; k < width; k++)
        for (int64_t m = 0; m < 8; m++) to[k * lanes + m] = m < rows ? from[m * row + k] : 0.0f;
}

/* out[m * row + n] = tile[n * lanes + m] for m below `rows`, at most 8, and n below `count`. */
static void put(const float *tile, int64_t lanes, float *out, int64_t row, int64_t rows, int64_t count) {
    int64_t n = 0;
    for (; n + 8 <= count; n += 8) {
        __m256 r[8];
        for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(tile + (n + i) * lanes);
        turn8(r);
        for (int64_t m = 0; m < rows; m++) _mm256_storeu_ps(out + m * row + n, r[m]);
    }
    for (; n < count; n++)
        for (int64_t m = 0; m < rows; m++) out[m * row + n] = tile[n * lanes + m];
}

static inline int64_t lanes_for(int64_t rows) { return (least(rows, LANES) + 7) / 8 * 8; }

/* A tile of outputs for some lanes of rows: computed, and put in place. */
static void compute(const struct product *of, const float *turned, int64_t row, int64_t rows, int64_t start) {
    float tile[TILE * LANES] __attribute__((aligned(64)));
    int64_t lanes = lanes_for(rows), count = least(of->outputs - start, TILE), n = 0;
    int64_t step = strips[lanes / 8].count;
    const float *weight = of->weight + start * of->width;
    for (; n + step <= count; n += step)
        strips[lanes / 8].many(turned, weight + n * of->width, tile + n * lanes, of->width, of->chain);
    for (; n < count; n++)
        strips[lanes / 8].one(turned, weight + n * of->width, tile + n * lanes, of->width, of->chain);
    float *out = of->out + row * of->out_row + start;
    for (int64_t m = 0; m < rows; m += 8)
        put(tile + m, lanes, out + m * of->out_row, of->out_row, least(rows - m, 8), count);
}

static void work_on(void *argument) {
    struct work *work = argument;
    const struct product *of = work->of;
    int64_t start;
    while ((start = __atomic_fetch_add(&work->next, TILE, __ATOMIC_RELAXED)) < of->outputs)
        for (int64_t row = 0; row < work->num_rows; row += LANES)
            compute(of, work->turned + row * of->width, work->first_row + row, least(work->num_rows - row, LANES),
                    start);
}

#if defined(__linux__)
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak)); /* torch's pool */
#define HAS_THREADS (GOMP_parallel != NULL)
#else
#define GOMP_parallel(function, argument, count, flags) function(argument)
#define HAS_THREADS 0
#endif

/* 0, or 1 where there is no memory. */
int forge_linear(const struct product *of) {
    float *turned = aligned_alloc(64, (size_t)(of->width * ROWS) * sizeof(float));
    if (!turned) return 1;
    for (int64_t first = 0; first < of->rows; first += ROWS) {
        int64_t num_rows = least(of->rows - first, ROWS);
        for (int64_t row = 0; row < num_rows; row += 8) {
            int64_t part = row / LANES * LANES, lanes = lanes_for(num_rows - part);
            turn(of->x + (first + row) * of->x_row, of->x_row, least(num_rows - row, 8), of->width,
                 turned + part * of->width + row - part, lanes);
        }
        struct work work = {of, turned, first, num_rows, 0};
        if (HAS_THREADS && of->num_threads > 1)
            GOMP_parallel(work_on, &work, (unsigned)of->num_threads, 0);
        else
            work_on(&work);
    }
    free(turned);
    return 0;
}
