/* Attention over paged keys and values in float32, on a CPU.

   The bits of a query row depend on the row, its keys and its values alone. Every sum is taken in an order that only
   the index of the key or of the dimension decides, with the same operations whatever the number of rows in a tile, so
   blocks, threads and pages may be chosen freely:
     - a score adds over the dimensions, one after the other, each by one fused multiplication and addition;
     - the sum of a row's exponentials runs over sixteen lanes, key j in lane j % 16, which are added in a fixed tree;
     - an output adds over the keys, one after the other.
   Keys that a row does not see are never multiplied by anything: they may be NaN, or memory that nobody has written.

   A page has 16 tokens: keys [Hkv][D][16], values [Hkv][16][D]. Compile with -ffp-contract=off. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "threads.h"
#include "vector_math.h"

#define PAGE 16
#define BLOCK_ROWS 24  /* query rows times heads of a group that are computed together */
#define TILE_ROWS 6    /* of them, those whose sums are in registers at the same time */
#define GROUP_PAGES 4  /* keys that stay in the first cache while the tiles of a block pass over them */
#define CHUNK_KEYS 128 /* the same for values */
#define BLOCK_FLOATS (64 * 1024) /* of scores: with long contexts, blocks have fewer rows */
#define SMALL_WORK (1 << 16)     /* multiplications below which other threads are not worth waking */

#define REGISTERS (LANES == 16 ? 24 : 12) /* for sums */
#define PARTS (PAGE / LANES) /* vectors of a page's keys */
#define MOST 8 /* vectors of one row in registers at the same time */

struct attention {
    const float *q, *k_cache, *v_cache;
    float *out, *lse; /* lse may be NULL */
    const int32_t *query_starts, *context_lens, *table;
    int64_t q_token, q_head, out_token, out_head, lse_token, lse_head; /* strides, in floats */
    int64_t num_tokens, num_sequences, table_width, num_pages;
    int64_t heads, kv_heads, width;
    float scale;
    int32_t num_threads;
};

struct work {
    const struct attention *of;
    const int64_t *first_units; /* [num_sequences + 1] */
    int64_t num_units, next_unit, longest, tokens;
    int32_t out_of_memory;
};

INLINE float fused_one(float a, float b, float c) {
#if defined(__FP_FAST_FMAF) || defined(__FMA__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* Scores of R rows with the keys of P pages. On the way it asks for memory that will be needed: the same number of
   `ahead`, unless that is NULL. A page has one line of the cache, of 64 bytes, for each dimension. */
INLINE void score_tile(const float *q, const float *const *pages, const float *const *ahead, float *scores,
                       int64_t stride, int width, const int R, const int P) {
    vec sums[TILE_ROWS][MOST];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P * PARTS; p++) sums[r][p] = (vec){};
    for (int d = 0; d < width; d++) {
        if (ahead)
            for (int p = 0; p < 2 * P; p++) __builtin_prefetch(ahead[p] + d * PAGE, 0, 2);
        vec keys[MOST];
#pragma GCC unroll 8
        for (int p = 0; p < P * PARTS; p++) keys[p] = load(pages[p / PARTS] + d * PAGE + p % PARTS * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            vec one = all(q[r * width + d]);
#pragma GCC unroll 8
            for (int p = 0; p < P * PARTS; p++) sums[r][p] = fused(one, keys[p], sums[r][p]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P * PARTS; p++) store(scores + r * stride + p * LANES, sums[r][p]);
}

/* Adds the values of the first `count` keys of some pages, times the rows' weights, to C vectors of R rows. */
INLINE void value_tile(const float *weights, int64_t stride, const float *const *pages, int count, float *sums,
                       int width, const int R, const int C) {
    vec kept[TILE_ROWS][MOST];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) kept[r][c] = load(sums + r * width + c * LANES);
    for (int page = 0; page < count; page += PAGE) {
        const float *values = pages[page / PAGE];
        int end = count - page < PAGE ? count - page : PAGE;
        for (int j = 0; j < end; j++, values += width) {
            vec row[MOST];
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) row[c] = load(values + c * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                vec one = all(weights[r * stride + page + j]);
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) kept[r][c] = fused(one, row[c], kept[r][c]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) store(sums + r * width + c * LANES, kept[r][c]);
}

#define AT_ONCE(R) (REGISTERS / (R) > MOST ? MOST : REGISTERS / (R)) /* vectors for each of R rows */
#define SCORE_PAGES(R) (AT_ONCE(R) / PARTS >= 4 ? 4 : AT_ONCE(R) / PARTS >= 2 ? 2 : 1)
#define VALUE_VECTORS(R) (AT_ONCE(R) >= 8 ? 8 : AT_ONCE(R) >= 4 ? 4 : 2)

INLINE void score_rows(const float *q, const float *const *pages, const float *const *ahead, int num_pages,
                       float *scores, int64_t stride, int width, const int R) {
    int p = 0;
    for (; p + SCORE_PAGES(R) <= num_pages; p += SCORE_PAGES(R))
        score_tile(q, pages + p, ahead ? ahead + 2 * p : NULL, scores + p * PAGE, stride, width, R, SCORE_PAGES(R));
    for (; p < num_pages; p++)
        score_tile(q, pages + p, ahead ? ahead + 2 * p : NULL, scores + p * PAGE, stride, width, R, 1);
}

INLINE void value_rows(const float *weights, int64_t stride, const float *const *pages, int count, float *sums,
                       int width, const int R) {
    const float *columns[CHUNK_KEYS / PAGE];
    int c = 0, num_pages = (count + PAGE - 1) / PAGE;
    for (; c + VALUE_VECTORS(R) * LANES <= width; c += VALUE_VECTORS(R) * LANES) {
        for (int p = 0; p < num_pages; p++) columns[p] = pages[p] + c;
        value_tile(weights, stride, columns, count, sums + c, width, R, VALUE_VECTORS(R));
    }
    for (; c + LANES <= width; c += LANES) {
        for (int p = 0; p < num_pages; p++) columns[p] = pages[p] + c;
        value_tile(weights, stride, columns, count, sums + c, width, R, 1);
    }
    for (; c < width; c++) /* eight dimensions, where a vector has sixteen */
        for (int r = 0; r < R; r++)
            for (int j = 0; j < count; j++)
                sums[r * width + c] = fused_one(weights[r * stride + j], pages[j / PAGE][j % PAGE * width + c],
                                                sums[r * width + c]);
}

#define FOR_ROWS(rows, call) \
    switch (rows) { \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    case 4: call(4); break; \
    case 5: call(5); break; \
    default: call(6); break; \
    }

/* Turns the scores of `seen` keys into exponentials; what is between `seen` and a whole page becomes 0. */
static void weigh(float *scores, int seen, float *largest, float *total) {
    int end = (seen + PAGE - 1) / PAGE * PAGE;
    for (int j = seen; j < end; j++) scores[j] = -INFINITY;
    vec top = all(-INFINITY);
    for (int j = 0; j < end; j += LANES) top = larger(load(scores + j), top);
    float best = top[0];
    for (int i = 1; i < LANES; i++) best = top[i] > best ? top[i] : best;
    vec lanes[PARTS] = {};
    for (int j = 0; j < end; j += PAGE)
        for (int p = 0; p < PARTS; p++) {
            vec weight = exponential(load(scores + j + p * LANES) - all(best));
            store(scores + j + p * LANES, weight);
            lanes[p] += weight;
        }
    float sums[PAGE];
    for (int p = 0; p < PARTS; p++) store(sums + p * LANES, lanes[p]);
    for (int half = PAGE / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    *largest = best;
    *total = sums[0];
}

struct block {
    const struct attention *of;
    const int32_t *pages;
    int64_t kv_head, first_token;
    int rows, group, first_seen; /* rows counts heads too; the keys that the first query row sees */
    float *q, *sums, *largest, *total, *scores;
    int64_t stride;
};

INLINE int seen_by(const struct block *b, int row) { return b->first_seen + row / b->group; }
INLINE int within_chunk(int keys) { return keys < 0 ? 0 : keys > CHUNK_KEYS ? CHUNK_KEYS : keys; }
INLINE int64_t page_of(const struct block *b, int index) {
    return (b->pages[index] * b->of->kv_heads + b->kv_head) * b->of->width * PAGE;
}

static void score(const struct block *b) {
    const struct attention *of = b->of;
    int width = (int)of->width, num_pages = (seen_by(b, b->rows - 1) + PAGE - 1) / PAGE;
    int is_decode = b->rows <= TILE_ROWS; /* then memory is what takes the time */
    int64_t next_head = b->kv_head + 1 < of->kv_heads ? of->width * PAGE : 0;
    for (int p = 0; p < num_pages; p += GROUP_PAGES) {
        const float *pages[GROUP_PAGES], *ahead[2 * GROUP_PAGES];
        int count = num_pages - p < GROUP_PAGES ? num_pages - p : GROUP_PAGES;
        for (int i = 0; i < count; i++) {
            int next = p + i + GROUP_PAGES;
            pages[i] = of->k_cache + page_of(b, p + i);
            ahead[2 * i] = of->v_cache + page_of(b, p + i);
            ahead[2 * i + 1] = of->k_cache + (next < num_pages ? page_of(b, next) : page_of(b, i) + next_head);
        }
        for (int r = 0; r < b->rows; r += TILE_ROWS) {
            float *scores = b->scores + r * b->stride + p * PAGE;
#define CALL(R) score_rows(b->q + r * width, pages, is_decode ? ahead : NULL, count, scores, b->stride, width, R)
            FOR_ROWS(b->rows - r, CALL)
#undef CALL
        }
    }
}

static void add_values(const struct block *b) {
    const struct attention *of = b->of;
    int width = (int)of->width, most = seen_by(b, b->rows - 1);
    for (int chunk = 0; chunk < most; chunk += CHUNK_KEYS) {
        const float *pages[CHUNK_KEYS / PAGE];
        for (int j = chunk; j < most && j < chunk + CHUNK_KEYS; j += PAGE)
            pages[(j - chunk) / PAGE] = of->v_cache + page_of(b, j / PAGE);
        for (int r = 0; r < b->rows; r += TILE_ROWS) {
            const float *weights = b->scores + r * b->stride + chunk;
            int rows = b->rows - r < TILE_ROWS ? b->rows - r : TILE_ROWS;
            int shared = within_chunk(seen_by(b, r) - chunk);
#define CALL(R) value_rows(weights, b->stride, pages, shared, b->sums + r * width, width, R)
            FOR_ROWS(rows, CALL)
#undef CALL
            for (int i = 1; i < rows; i++) /* keys that only the later rows of the tile see */
                for (int j = shared, end = within_chunk(seen_by(b, r + i) - chunk); j < end; j++) {
                    const float *value = pages[j / PAGE] + j % PAGE * width;
                    value_rows(weights + i * b->stride + j, b->stride, &value, 1, b->sums + (r + i) * width, width, 1);
                }
        }
    }
}

static void attend_block(const struct block *b) {
    const struct attention *of = b->of;
    int64_t width = of->width;
    for (int r = 0; r < b->rows; r++) {
        const float *from = of->q + (b->first_token + r / b->group) * of->q_token +
                            (b->kv_head * b->group + r % b->group) * of->q_head;
        for (int64_t d = 0; d < width; d++) b->q[r * width + d] = from[d] * of->scale;
    }
    memset(b->sums, 0, (size_t)(b->rows * width) * sizeof(float));
    score(b);
    for (int r = 0; r < b->rows; r++) weigh(b->scores + r * b->stride, seen_by(b, r), b->largest + r, b->total + r);
    add_values(b);
    for (int r = 0; r < b->rows; r++) {
        int64_t token = b->first_token + r / b->group, head = b->kv_head * b->group + r % b->group;
        float *to = of->out + token * of->out_token + head * of->out_head;
        for (int64_t d = 0; d < width; d++) to[d] = b->sums[r * width + d] / b->total[r];
        if (of->lse) of->lse[token * of->lse_token + head * of->lse_head] = b->largest[r] + (float)log(b->total[r]);
    }
}

/* The query rows of a block. With long contexts there are fewer, so that the scores stay in the second cache. */
static int64_t block_tokens(const struct attention *of, int64_t longest) {
    int64_t group = of->heads / of->kv_heads, rows = BLOCK_ROWS / group, fitting = BLOCK_FLOATS / (longest * group);
    rows = rows < fitting ? rows : fitting;
    return rows < 1 ? 1 : rows;
}

static void work_on(void *argument) {
    struct work *work = argument;
    const struct attention *of = work->of;
    int64_t stride = (work->longest + PAGE - 1) / PAGE * PAGE + PAGE, group = of->heads / of->kv_heads;
    int64_t tokens = work->tokens, rows = tokens * group;
    float *memory = malloc((size_t)(rows * (stride + 2 * of->width + 2)) * sizeof(float));
    if (!memory) {
        __atomic_store_n(&work->out_of_memory, 1, __ATOMIC_RELAXED);
        return;
    }
    struct block b = {.of = of, .group = (int)group, .scores = memory, .stride = stride};
    b.q = b.scores + rows * stride;
    b.sums = b.q + rows * of->width;
    b.largest = b.sums + rows * of->width;
    b.total = b.largest + rows;
    int64_t sequence = 0, unit;
    while ((unit = __atomic_fetch_add(&work->next_unit, 1, __ATOMIC_RELAXED)) < work->num_units) {
        while (work->first_units[sequence + 1] <= unit) sequence++;
        int64_t start = of->query_starts[sequence], count = of->query_starts[sequence + 1] - start;
        int64_t blocks = (count + tokens - 1) / tokens, at = unit - work->first_units[sequence];
        int64_t first = at % blocks * tokens;
        b.kv_head = at / blocks;
        b.pages = of->table + sequence * of->table_width;
        b.first_token = start + first;
        b.first_seen = (int)(of->context_lens[sequence] - count + first + 1);
        b.rows = (int)((count - first < tokens ? count - first : tokens) * group);
        attend_block(&b);
    }
    free(memory);
}

/* Whether every row and every page that would be read exists. */
static int is_sound(const struct attention *of) {
    int64_t before = 0;
    if (of->query_starts[0] != 0) return 0;
    for (int64_t s = 0; s < of->num_sequences; s++) {
        int64_t end = of->query_starts[s + 1], context = of->context_lens[s], pages = (context + PAGE - 1) / PAGE;
        if (end < before || end > of->num_tokens || context < end - before || pages > of->table_width) return 0;
        if (end > before)
            for (int64_t p = 0; p < pages; p++) {
                int32_t page = of->table[s * of->table_width + p];
                if (page < 0 || page >= of->num_pages) return 0;
            }
        before = end;
    }
    return before == of->num_tokens;
}

int forge_has_threads(void) { return HAS_THREADS; }

/* 0, or 1 for a layout that names what does not exist, or 2 if there is not enough memory. */
int forge_attend(const struct attention *of) {
    if (!is_sound(of)) return 1;
    int64_t *first_units = malloc((size_t)(of->num_sequences + 1) * sizeof(int64_t));
    if (!first_units) return 2;
    struct work work = {.of = of, .first_units = first_units, .longest = 1};
    for (int64_t s = 0; s < of->num_sequences; s++)
        if (of->query_starts[s + 1] > of->query_starts[s] && of->context_lens[s] > work.longest)
            work.longest = of->context_lens[s];
    work.tokens = block_tokens(of, work.longest);
    double size = 0;
    for (int64_t s = 0; s < of->num_sequences; s++) {
        int64_t count = of->query_starts[s + 1] - of->query_starts[s];
        first_units[s] = work.num_units;
        work.num_units += (count + work.tokens - 1) / work.tokens * of->kv_heads;
        size += (double)count * of->context_lens[s] * of->heads * of->width;
    }
    first_units[of->num_sequences] = work.num_units;
    run_on_threads(work_on, &work, size > SMALL_WORK ? of->num_threads : 1);
    free(first_units);
    return work.out_of_memory ? 2 : 0;
}

struct writing {
    const float *k, *v;
    float *k_cache, *v_cache;
    const int64_t *slots;
    int64_t k_token, k_head, v_token, v_head; /* strides, in floats */
    int64_t num_tokens, num_slots, kv_heads, width;
    const int64_t *sources; /* which row of k and v each token has; NULL where token t has row t */
    int64_t num_sources;    /* rows of k and v, if there are sources */
};

/* 0, or 1 for a slot beyond the cache, or 2 for a source that is no row: then nothing is written. */
int forge_write(const struct writing *of) {
    int64_t width = of->width, head_size = width * PAGE;
    for (int64_t t = 0; t < of->num_tokens; t++) {
        if (of->slots[t] >= of->num_slots) return 1;
        if (of->sources && (of->sources[t] < 0 || of->sources[t] >= of->num_sources)) return 2;
    }
    for (int64_t t = 0; t < of->num_tokens; t++) {
        if (of->slots[t] < 0) continue;
        int64_t page = of->slots[t] / PAGE, place = of->slots[t] % PAGE, row = of->sources ? of->sources[t] : t;
        for (int64_t h = 0; h < of->kv_heads; h++) {
            const float *key = of->k + row * of->k_token + h * of->k_head;
            float *to = of->k_cache + (page * of->kv_heads + h) * head_size + place;
            for (int64_t d = 0; d < width; d++) to[d * PAGE] = key[d];
            memcpy(of->v_cache + (page * of->kv_heads + h) * head_size + place * width,
                   of->v + row * of->v_token + h * of->v_head, (size_t)width * sizeof(float));
        }
    }
    return 0;
}
