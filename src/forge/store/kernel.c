/* Copies rectangles between memories and sums their digest on the way.
 *
 * A table row describes one rectangle as three walks over the same elements: through the source, through the
 * destination and through the row-major image of the whole tensor ("image"), which only the digest sees:
 *
 *     digest = sum over 32-bit words k of the image:  word[k] * weight[k % 1024] * block_weight(k / 1024)   mod 2^64
 *
 * It is linear, so every run of bytes adds its own part and partial words count with zeros around them.
 * Little-endian machines only. Nothing here allocates, locks or keeps state, except the weights set once after loading.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the digest is defined on little-endian words"
#endif

#define BLOCK_WORDS 1024
#define MAX_DIMS 8
#define SAMPLES 32
#define PREFETCH 512
#define SHORT_RUN 2048 /* up to this many bytes whole runs are fetched ahead */
#define PREFETCH_COLUMNS 8

enum { ROW_NDIM, ROW_ITEM, ROW_CAST, ROW_SLOT, ROW_SRC_BASE, ROW_DST_BASE, ROW_SRC, ROW_DST, ROW_IMAGE, ROW_HEAD };
enum { COPY = 1, DIGEST = 2, STREAM = 4, FROM_DST = 8 };

/* weight[1 + i] pairs with the odd word of a 64-bit lane: kept apart so that both loads can be aligned. */
static uint32_t weight[BLOCK_WORDS + 64] __attribute__((aligned(64)));
static uint32_t weight_odd[BLOCK_WORDS + 64] __attribute__((aligned(64)));

void forge_set_weights(const uint32_t *values) {
    for (int i = 0; i < BLOCK_WORDS + 64; i++) {
        weight[i] = values[i % BLOCK_WORDS];
        weight_odd[i] = values[(i + 1) % BLOCK_WORDS];
    }
}

static inline uint64_t splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static inline uint64_t block_weight(uint64_t block) { return splitmix64(block + 0xF0E1D2C3B4A59687u) | 1; }

static inline uint64_t word_weight(uint64_t word) {
    return weight[word % BLOCK_WORDS] * block_weight(word / BLOCK_WORDS);
}

/* Sums of whole vectors: n words, a multiple of VECTOR_WORDS. dst may be NULL; streaming needs it aligned to a vector. */
#if defined(__AVX512F__)
#define VECTOR_WORDS 16
typedef __m512i vector;
#define LOAD(p) _mm512_loadu_si512((const void *)(p))
#define STORE(p, v) _mm512_storeu_si512((void *)(p), v)
#define STORE_PAST_CACHE(p, v) _mm512_stream_si512((void *)(p), v)
#define ZERO() _mm512_setzero_si512()
#define ADD(a, b) _mm512_add_epi64(a, b)
#define MULTIPLY_LOW(a, b) _mm512_mul_epu32(a, b)
#define HIGH_TO_LOW(a) _mm512_srli_epi64(a, 32)
#elif defined(__AVX2__)
#define VECTOR_WORDS 8
typedef __m256i vector;
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define STORE(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#define STORE_PAST_CACHE(p, v) _mm256_stream_si256((__m256i *)(p), v)
#define ZERO() _mm256_setzero_si256()
#define ADD(a, b) _mm256_add_epi64(a, b)
#define MULTIPLY_LOW(a, b) _mm256_mul_epu32(a, b)
#define HIGH_TO_LOW(a) _mm256_srli_epi64(a, 32)
#endif

/* What to fetch ahead of a run: `by` bytes on, and after the end of the run `skip` more, to where the next one lies.
 * Fetching straight on past short runs would bring in what nobody wants, and not what comes next. */
typedef struct {
    ptrdiff_t by, skip;
} ahead;

static const ahead straight_on = {PREFETCH, 0};

static inline const uint8_t *next_of(ahead next, const uint8_t *at, const uint8_t *end) {
    at += next.by;
    return at >= end ? at + next.skip : at;
}

/* For runs of n bytes of which each begins `step` bytes after the one before. */
static ahead between_runs(size_t n, ptrdiff_t step) {
    if (n > SHORT_RUN) return (ahead){PREFETCH, step - (ptrdiff_t)n};
    return (ahead){(ptrdiff_t)((SHORT_RUN + n - 1) / n) * step, 0};
}

#ifdef VECTOR_WORDS
#define VECTOR_BYTES (4 * VECTOR_WORDS)

#define ACCUMULATE(v, t, even, odd)                                             \
    even = ADD(even, MULTIPLY_LOW(v, LOAD(weight + (t))));                      \
    odd = ADD(odd, MULTIPLY_LOW(HIGH_TO_LOW(v), LOAD(weight_odd + (t))))

#define SUM_LOOP(ON_VECTOR)                                                     \
    for (; i + 2 * VECTOR_WORDS <= n; i += 2 * VECTOR_WORDS) {                  \
        vector v = LOAD(src + 4 * i), w = LOAD(src + 4 * (i + VECTOR_WORDS));   \
        for (size_t line = 0; line < 2 * VECTOR_BYTES; line += 64)              \
            __builtin_prefetch(next_of(next, src + 4 * i + line, end));         \
        ON_VECTOR(dst + 4 * i, v);                                              \
        ON_VECTOR(dst + 4 * (i + VECTOR_WORDS), w);                             \
        ACCUMULATE(v, t + i, a, b);                                             \
        ACCUMULATE(w, t + i + VECTOR_WORDS, c, d);                              \
    }                                                                           \
    for (; i < n; i += VECTOR_WORDS) {                                          \
        vector v = LOAD(src + 4 * i);                                           \
        ON_VECTOR(dst + 4 * i, v);                                              \
        ACCUMULATE(v, t + i, a, b);                                             \
    }
#define NO_STORE(p, v) (void)(v)

static uint64_t sum_vectors(uint8_t *dst, const uint8_t *src, size_t n, size_t t, int stream, ahead next,
                            const uint8_t *end) {
    vector a = ZERO(), b = ZERO(), c = ZERO(), d = ZERO();
    size_t i = 0;
    if (dst == NULL) {
        SUM_LOOP(NO_STORE)
    } else if (stream) {
        SUM_LOOP(STORE_PAST_CACHE)
    } else {
        SUM_LOOP(STORE)
    }
    uint64_t lanes[VECTOR_WORDS / 2], total = 0;
    a = ADD(ADD(a, b), ADD(c, d));
    memcpy(lanes, &a, sizeof lanes);
    for (int lane = 0; lane < VECTOR_WORDS / 2; lane++) total += lanes[lane];
    return total;
}
#endif

/* Sum of n words whose first is word t of its block, t + n <= BLOCK_WORDS; without the block's weight. */
static uint64_t sum_words(uint8_t *dst, const uint8_t *src, size_t n, size_t t) {
    uint64_t total = 0;
    if (dst) memcpy(dst, src, 4 * n);
    for (size_t i = 0; i < n; i++) {
        uint32_t word;
        memcpy(&word, src + 4 * i, 4);
        total += (uint64_t)word * weight[t + i];
    }
    return total;
}

static uint64_t sum_block(uint8_t *dst, const uint8_t *src, size_t n, size_t t, int stream, ahead next,
                          const uint8_t *end) {
#ifdef VECTOR_WORDS
    uint64_t total = 0;
    if (dst && stream) {
        size_t off = (uintptr_t)dst % VECTOR_BYTES;
        stream = off % 4 == 0 && n >= 4 * VECTOR_WORDS;
        if (stream && off) {
            size_t peel = (VECTOR_BYTES - off) / 4;
            total = sum_words(dst, src, peel, t);
            dst += 4 * peel, src += 4 * peel, n -= peel, t += peel;
        }
    }
    size_t whole = n / VECTOR_WORDS * VECTOR_WORDS;
    if (whole) total += sum_vectors(dst, src, whole, t, stream, next, end);
    if (n > whole) total += sum_words(dst ? dst + 4 * whole : NULL, src + 4 * whole, n - whole, t + whole);
    return total;
#else
    (void)stream, (void)next, (void)end;
    return sum_words(dst, src, n, t);
#endif
}

/* Copies n bytes (unless dst is NULL) and returns their part of the digest; the first is byte `image` of the image. */
static uint64_t sum_run(uint8_t *dst, const uint8_t *src, size_t n, uint64_t image, int stream, ahead next) {
    const uint8_t *end = src + n;
    uint64_t total = 0;
    while (n) {
        size_t inside = image % 4, bytes;
        if (inside || n < 4) {
            uint32_t word = 0;
            bytes = n < 4 - inside ? n : 4 - inside;
            for (size_t i = 0; i < bytes; i++) {
                word |= (uint32_t)src[i] << (8 * (inside + i));
                if (dst) dst[i] = src[i];
            }
            total += word * word_weight(image / 4);
        } else {
            size_t t = image / 4 % BLOCK_WORDS, words = n / 4;
            if (words > BLOCK_WORDS - t) words = BLOCK_WORDS - t;
            bytes = 4 * words;
            total += sum_block(dst, src, words, t, stream, next, end) * block_weight(image / 4 / BLOCK_WORDS);
        }
        if (dst) dst += bytes;
        src += bytes, image += bytes, n -= bytes;
    }
    return total;
}

static void copy_run(uint8_t *dst, const uint8_t *src, size_t n, int stream, ahead next) {
#ifdef VECTOR_WORDS
    const uint8_t *end = src + n;
    if (stream && n >= 8 * VECTOR_BYTES) {
        size_t peel = (VECTOR_BYTES - (uintptr_t)dst % VECTOR_BYTES) % VECTOR_BYTES;
        memcpy(dst, src, peel);
        dst += peel, src += peel, n -= peel;
        for (; n >= 4 * VECTOR_BYTES; n -= 4 * VECTOR_BYTES, dst += 4 * VECTOR_BYTES, src += 4 * VECTOR_BYTES) {
            vector a = LOAD(src), b = LOAD(src + VECTOR_BYTES);
            vector c = LOAD(src + 2 * VECTOR_BYTES), d = LOAD(src + 3 * VECTOR_BYTES);
            for (int line = 0; line < 4 * VECTOR_BYTES; line += 64) __builtin_prefetch(next_of(next, src + line, end));
            STORE_PAST_CACHE(dst, a);
            STORE_PAST_CACHE(dst + VECTOR_BYTES, b);
            STORE_PAST_CACHE(dst + 2 * VECTOR_BYTES, c);
            STORE_PAST_CACHE(dst + 3 * VECTOR_BYTES, d);
        }
    }
#else
    (void)stream, (void)next;
#endif
    memcpy(dst, src, n);
}

/* Round to nearest even; every NaN becomes the one quiet NaN 0x7FC0; denormals are kept. */
static inline uint16_t bf16_of(const uint8_t *src) {
    uint32_t bits;
    memcpy(&bits, src, 4);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

static void cast_fp32_to_bf16(uint16_t *dst, const uint8_t *src, size_t n) {
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __builtin_prefetch(src + 4 * i + PREFETCH);
        __builtin_prefetch(src + 4 * i + PREFETCH + 64);
        for (size_t j = i; j < i + 32; j++) dst[j] = bf16_of(src + 4 * j);
    }
    for (; i < n; i++) dst[i] = bf16_of(src + 4 * i);
}

/* What a walk needs at each element; strides are bytes. `item` is the size of what is written, `item_src` of what is read. */
typedef struct {
    int ndim, cast, flags;
    size_t item, item_src;
    int64_t shape[MAX_DIMS + 1], src_stride[MAX_DIMS + 1], dst_stride[MAX_DIMS + 1], image_stride[MAX_DIMS + 1];
    uint8_t *dst;
    const uint8_t *src;
    uint64_t image;
    ahead next;
} rect;

static uint64_t one_run(const rect *r, uint8_t *dst, const uint8_t *src, size_t count, uint64_t image) {
    int stream = r->flags & STREAM;
    if (!(r->flags & COPY)) dst = NULL;
    if (!r->cast) {
        if (r->flags & DIGEST) return sum_run(dst, src, count * r->item, image, stream, r->next);
        if (dst) copy_run(dst, src, count * r->item, stream, r->next);
        return 0;
    }
    uint16_t staged[2 * BLOCK_WORDS] __attribute__((aligned(64)));
    uint64_t total = 0;
    while (count) {
        size_t n = 2 * BLOCK_WORDS - image / 2 % (2 * BLOCK_WORDS);
        if (n > count) n = count;
        cast_fp32_to_bf16(staged, src, n);
        if (r->flags & DIGEST) total += sum_run(dst, (uint8_t *)staged, 2 * n, image, stream, straight_on);
        else if (dst) copy_run(dst, (uint8_t *)staged, 2 * n, stream, straight_on);
        if (dst) dst += 2 * n;
        src += 4 * n, image += 2 * n, count -= n;
    }
    return total;
}

typedef struct { uint64_t low, high; } sixteen;

#define SPREAD(type)                                                                                          \
    for (int64_t c = 0; c < cols; c++) {                                                                      \
        for (int64_t r = 0; r < rows; r += 64 / (int64_t)sizeof(type)) {                                      \
            __builtin_prefetch(src + r * src_row + (c + PREFETCH_COLUMNS) * src_col);                         \
            __builtin_prefetch(dst + r * dst_row + (c + PREFETCH_COLUMNS) * dst_col, 1);                      \
        }                                                                                                     \
        for (int64_t r = 0; r < rows; r++) {                                                                  \
            type value;                                                                                       \
            memcpy(&value, src + r * src_row + c * src_col, sizeof value);                                    \
            memcpy(dst + r * dst_row + c * dst_col, &value, sizeof value);                                    \
        }                                                                                                     \
    }

/* Copies single elements, rows innermost: the caller lets rows be the direction in which strided memory is dense. */
static void spread(uint8_t *dst, int64_t dst_row, int64_t dst_col, const uint8_t *src, int64_t src_row, int64_t src_col,
                   int64_t rows, int64_t cols, size_t item) {
    switch (item) {
    case 1: SPREAD(uint8_t) break;
    case 2: SPREAD(uint16_t) break;
    case 4: SPREAD(uint32_t) break;
    case 8: SPREAD(uint64_t) break;
    default: SPREAD(sixteen) break;
    }
}

static uint64_t sum_elements(const uint8_t *src, size_t item, int64_t count, uint64_t image, int64_t stride) {
    uint64_t total = 0;
    for (int64_t i = 0; i < count; i++, src += item, image += stride) {
        if (item >= 4) {
            for (size_t at = 0; at < item; at += 4) {
                uint32_t word;
                memcpy(&word, src + at, 4);
                total += word * word_weight((image + at) / 4);
            }
        } else {
            total += sum_run(NULL, src, item, image, 0, straight_on);
        }
    }
    return total;
}

/* One tile of the two innermost dimensions: gather, cast, sum, scatter; whatever of these the tile needs. */
static uint64_t one_tile(const rect *r, uint8_t *dst, const uint8_t *src, uint64_t image, int64_t rows, int64_t cols) {
    uint64_t gathered[4096] __attribute__((aligned(64)));
    uint16_t narrow[2048] __attribute__((aligned(64)));
    int row = r->ndim - 2, col = r->ndim - 1;
    int64_t src_row = r->src_stride[row], item = (int64_t)r->item, item_src = (int64_t)r->item_src;
    uint64_t total = 0;
    if (r->src_stride[col] != item_src) {
        spread((uint8_t *)gathered, cols * item_src, item_src, src, src_row, r->src_stride[col], rows, cols, r->item_src);
        src = (uint8_t *)gathered, src_row = cols * item_src;
    }
    if (r->cast) {
        for (int64_t i = 0; i < rows; i++) cast_fp32_to_bf16(narrow + i * cols, src + i * src_row, (size_t)cols);
        src = (uint8_t *)narrow, src_row = cols * item;
    }
    int dense_dst = (r->flags & COPY) && r->dst_stride[col] == item;
    int dense_image = (r->flags & DIGEST) && r->image_stride[col] == item;
    if ((r->flags & COPY) && !dense_dst)
        spread(dst, r->dst_stride[row], r->dst_stride[col], src, src_row, item, rows, cols, r->item);
    for (int64_t i = 0; i < rows; i++) {
        uint8_t *to = dense_dst ? dst + i * r->dst_stride[row] : NULL;
        const uint8_t *from = src + i * src_row;
        uint64_t at = image + (uint64_t)(i * r->image_stride[row]);
        if (dense_image) {
            total += sum_run(to, from, (size_t)(cols * item), at, r->flags & STREAM, straight_on);
        } else {
            if (to) memcpy(to, from, (size_t)(cols * item));
            if (r->flags & DIGEST) total += sum_elements(from, r->item, cols, at, r->image_stride[col]);
        }
    }
    return total;
}

static uint64_t tiled(const rect *r, uint8_t *dst, const uint8_t *src, uint64_t image) {
    int row = r->ndim - 2, col = r->ndim - 1;
    int64_t wide = (int64_t)((r->shape[row] == 1 ? 4096 : 256) / r->item_src), high = (int64_t)(128 / r->item_src);
    uint64_t total = 0;
    if (wide < 16) wide = 16;
    if (high < 8) high = 8;
    for (int64_t i = 0; i < r->shape[row]; i += high)
        for (int64_t j = 0; j < r->shape[col]; j += wide) {
            int64_t rows = r->shape[row] - i < high ? r->shape[row] - i : high;
            int64_t cols = r->shape[col] - j < wide ? r->shape[col] - j : wide;
            total += one_tile(r, dst + i * r->dst_stride[row] + j * r->dst_stride[col],
                              src + i * r->src_stride[row] + j * r->src_stride[col],
                              image + (uint64_t)(i * r->image_stride[row] + j * r->image_stride[col]), rows, cols);
        }
    return total;
}

static void put_dim(rect *r, int to, const rect *s, int from) {
    r->shape[to] = s->shape[from];
    r->src_stride[to] = s->src_stride[from];
    r->dst_stride[to] = s->dst_stride[from];
    r->image_stride[to] = s->image_stride[from];
}

/* Drops dimensions of size one and joins those that every walk in use crosses without a gap. */
static void collapse(rect *r) {
    int kept = 0;
    for (int d = 0; d < r->ndim; d++) {
        if (r->shape[d] == 1) continue;
        put_dim(r, kept, r, d);
        if (kept) {
            int64_t n = r->shape[kept];
            int p = kept - 1;
            if (r->src_stride[p] == n * r->src_stride[kept] &&
                (!(r->flags & COPY) || r->dst_stride[p] == n * r->dst_stride[kept]) &&
                (!(r->flags & DIGEST) || r->image_stride[p] == n * r->image_stride[kept])) {
                int64_t outer = r->shape[p];
                put_dim(r, p, r, kept);
                r->shape[p] = outer * n;
                continue;
            }
        }
        kept++;
    }
    if (!kept) {
        r->shape[0] = 1, kept = 1;
        r->src_stride[0] = (int64_t)r->item_src, r->dst_stride[0] = r->image_stride[0] = (int64_t)r->item;
    }
    r->ndim = kept;
}

static int is_dense(const rect *r) {
    int col = r->ndim - 1;
    return r->src_stride[col] == (int64_t)r->item_src &&
           (!(r->flags & COPY) || r->dst_stride[col] == (int64_t)r->item) &&
           (!(r->flags & DIGEST) || r->image_stride[col] == (int64_t)r->item);
}

/* For strided memory: makes the second innermost dimension the one in which that memory is densest. */
static void order_for_tiles(rect *r) {
    if (r->ndim == 1) {
        put_dim(r, 1, r, 0);
        r->shape[0] = 1, r->src_stride[0] = r->dst_stride[0] = r->image_stride[0] = 0, r->ndim = 2;
    }
    const int64_t *stride = r->src_stride[r->ndim - 1] != (int64_t)r->item_src ? r->src_stride : r->dst_stride;
    int row = r->ndim - 2, best = row;
    for (int d = 0; d < row; d++)
        if (stride[d] < stride[best]) best = d;
    if (best == row) return;
    rect other = *r;
    put_dim(r, row, &other, best);
    put_dim(r, best, &other, row);
}

static uint64_t walk(rect *r) {
    for (int d = 0; d < r->ndim; d++)
        if (r->shape[d] == 0) return 0;
    collapse(r);
    int dense = is_dense(r);
    if (!dense) order_for_tiles(r);
    int outer = r->ndim - (dense ? 1 : 2);
    r->next = straight_on;
    if (dense && outer > 0) r->next = between_runs((size_t)r->shape[outer] * r->item_src, r->src_stride[outer - 1]);
    int64_t at[MAX_DIMS + 1] = {0};
    uint8_t *dst = r->dst;
    const uint8_t *src = r->src;
    uint64_t image = r->image, total = 0;
    for (;;) {
        total += dense ? one_run(r, dst, src, (size_t)r->shape[outer], image) : tiled(r, dst, src, image);
        int d = outer - 1;
        for (; d >= 0; d--) {
            src += r->src_stride[d], dst += r->dst_stride[d], image += (uint64_t)r->image_stride[d];
            if (++at[d] < r->shape[d]) break;
            at[d] = 0;
            src -= r->shape[d] * r->src_stride[d], dst -= r->shape[d] * r->dst_stride[d];
            image -= (uint64_t)(r->shape[d] * r->image_stride[d]);
        }
        if (d < 0) return total;
    }
}

static void read_row(rect *r, const int64_t *row) {
    const int64_t *dims = row + ROW_HEAD;
    r->ndim = (int)row[ROW_NDIM];
    r->cast = (int)row[ROW_CAST];
    r->item = (size_t)row[ROW_ITEM];
    r->item_src = r->cast ? 4 : r->item;
    for (int d = 0; d < r->ndim; d++) {
        r->shape[d] = dims[d];
        r->src_stride[d] = dims[r->ndim + d];
        r->dst_stride[d] = dims[2 * r->ndim + d];
        r->image_stride[d] = dims[3 * r->ndim + d];
    }
    r->image = (uint64_t)row[ROW_IMAGE];
}

/* Works through rows [first, last). slots receives sums; a row with a negative slot is copied without a digest. */
void forge_run(const int64_t *table, const int64_t *starts, int64_t first, int64_t last, const uint64_t *src_bases,
               const uint64_t *dst_bases, uint64_t *slots, int flags) {
    for (int64_t i = first; i < last; i++) {
        const int64_t *row = table + starts[i];
        rect r;
        read_row(&r, row);
        r.flags = row[ROW_SLOT] < 0 ? flags & ~DIGEST : flags;
        if (!(r.flags & (COPY | DIGEST))) continue;
        r.src = src_bases ? (const uint8_t *)(uintptr_t)(src_bases[row[ROW_SRC_BASE]] + (uint64_t)row[ROW_SRC]) : NULL;
        r.dst = dst_bases ? (uint8_t *)(uintptr_t)(dst_bases[row[ROW_DST_BASE]] + (uint64_t)row[ROW_DST]) : NULL;
        if (flags & FROM_DST) {
            r.src = r.dst, r.cast = 0, r.item_src = r.item;
            memcpy(r.src_stride, r.dst_stride, sizeof r.src_stride);
        }
        uint64_t sum = walk(&r);
        if (r.flags & DIGEST) slots[row[ROW_SLOT]] += sum;
    }
#if defined(__AVX512F__) || defined(__AVX2__)
    if (flags & STREAM) _mm_sfence();
#endif
}

/* SAMPLES elements of each piece, up to eight bytes of each, zero padded: 8 * SAMPLES bytes per piece. */
void forge_sample(uint64_t base, const int64_t *starts, const int64_t *numels, const int64_t *items,
                  const int64_t *numbers, int64_t count, uint64_t seed, uint8_t *out) {
    memset(out, 0, (size_t)(8 * SAMPLES * count));
    for (int64_t i = 0; i < count; i++)
        for (int j = 0; j < SAMPLES && numels[i]; j++) {
            uint64_t at = splitmix64(seed + SAMPLES * (uint64_t)numbers[i] + (uint64_t)j) % (uint64_t)numels[i];
            const uint8_t *src = (const uint8_t *)(uintptr_t)(base + (uint64_t)starts[i] + at * (uint64_t)items[i]);
            memcpy(out + 8 * (SAMPLES * i + j), src, (size_t)(items[i] < 8 ? items[i] : 8));
        }
}

/* Byte offset inside the destination of byte `distance` after the rectangle's first one in the source; -1 if outside.
 * Sources are row-major pieces, so dividing by the strides in order gives the one possible position. */
static int64_t place_in_dst(const rect *r, int64_t distance) {
    int64_t to = 0;
    if (distance < 0) return -1;
    for (int d = 0; d < r->ndim; d++) {
        if (r->shape[d] == 1) continue;
        int64_t at = distance / r->src_stride[d];
        if (at >= r->shape[d]) return -1;
        distance -= at * r->src_stride[d];
        to += at * r->dst_stride[d];
    }
    return distance ? -1 : to;
}

/* Compares the samples that lie inside each row's rectangle with what stands there in the destination. */
void forge_check(const int64_t *table, const int64_t *row_starts, int64_t rows, const uint64_t *dst_bases,
                 const int64_t *starts, const int64_t *numels, const int64_t *numbers, uint64_t seed,
                 const uint8_t *samples, uint8_t *differs) {
    for (int64_t i = 0; i < rows; i++) {
        const int64_t *row = table + row_starts[i];
        int64_t piece = row[ROW_SLOT], empty = 0;
        rect r;
        read_row(&r, row);
        for (int d = 0; d < r.ndim; d++) empty |= r.shape[d] == 0;
        if (piece < 0 || empty || !numels[piece]) continue;
        for (int j = 0; j < SAMPLES; j++) {
            uint64_t at = splitmix64(seed + SAMPLES * (uint64_t)numbers[piece] + (uint64_t)j) % (uint64_t)numels[piece];
            int64_t to = place_in_dst(&r, (int64_t)(at * r.item_src) - (row[ROW_SRC] - starts[piece]));
            if (to < 0) continue;
            const uint8_t *want = samples + 8 * (SAMPLES * piece + j);
            uint16_t narrow;
            if (r.cast) {
                cast_fp32_to_bf16(&narrow, want, 1);
                want = (const uint8_t *)&narrow;
            }
            const uint8_t *have = (const uint8_t *)(uintptr_t)(dst_bases[row[ROW_DST_BASE]] + (uint64_t)(row[ROW_DST] + to));
            if (memcmp(have, want, r.item < 8 ? r.item : 8)) differs[piece] = 1;
        }
    }
}
