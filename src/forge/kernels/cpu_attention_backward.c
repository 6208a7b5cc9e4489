/* The gradient of attention within documents in float32, on a CPU: one call for all documents of a row.

   A document may begin with tokens of the one before it, which the row holds once; that one may have taken them itself.
   Documents that are linked in this way are a tree, the first of them its root. Every document and head of keys and
   values is one piece of work, computed by one thread from start to end. What a document adds to the gradient of tokens
   that it takes is kept apart; the thread that finishes the last document of a tree adds it up, in the order of the
   documents. So results do not depend on the number of threads, nor on other documents that share nothing.

   Compile with -ffp-contract=off. */

#include <stdlib.h>
#include <string.h>

#include "threads.h"
#include "vector_math.h"

#define STEP 16        /* keys and dimensions are padded to whole multiples */
#define BLOCK_ROWS 48  /* query rows times heads of a group that are computed together */
#define CHUNK_KEYS 256 /* keys whose scores exist at the same time */
#define TILE_ROWS 6
#define SMALL_WORK (1 << 16) /* multiplications below which other threads are not worth waking */

#define MOST (LANES == 16 ? 4 : 2) /* vectors of a row whose sums are in registers at the same time */

struct backward {
    const float *q, *k, *v, *grad; /* [places, heads, width] with strides */
    const float *out, *lse;        /* [places, heads, width] and [places, heads], without gaps */
    float *dq, *dk, *dv;           /* without gaps; all of their places are written */
    const int32_t *starts;         /* [documents + 1]: the places that a document has for itself */
    const int32_t *lengths;        /* its tokens, those that it takes included */
    const int32_t *roots;          /* the first document of its tree; itself if it takes nothing */
    const int64_t *sources;        /* [tokens of all documents]: their places; NULL if no document takes any */
    int64_t q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head; /* strides, in floats */
    int64_t num_places, num_documents, heads, kv_heads, width;
    float scale;
    int32_t num_threads;
};

struct work {
    const struct backward *of;
    float *shared;        /* [taken tokens, kv_heads, 2, width]: what documents add to tokens that they take */
    int64_t *first_taken; /* [documents]: where those of a document begin */
    int64_t *first_token; /* [documents]: where its tokens begin among those of all documents */
    int32_t *remaining;   /* [documents, kv_heads]: how many documents of a root's tree are still to be done */
    int64_t num_units, next_unit, longest;
    int32_t out_of_memory;
};

/* One document and one head of keys and values. */
struct piece {
    const struct backward *of;
    int64_t document, head, prefix, length, start;
    const int64_t *sources; /* the places of its tokens; NULL if they are consecutive */
    int64_t span; /* between two rows of scores, and two dimensions of turned keys: not a power of two, for the caches */
    float *k, *k_turned, *v_turned, *dk, *dv;                  /* of all keys */
    float *q, *grad, *dq, *weights, *slopes, *lse, *delta;     /* of a block of query rows */
};

INLINE int64_t padded(int64_t count) { return (count + STEP - 1) / STEP * STEP; }
/* A product of matrices: c[m, n] (+)= sum over k of a[m, k] * b[k, n]. */
struct product {
    const float *a, *b;
    float *c;
    int64_t a_row, a_column, b_row, c_row; /* strides */
    int rows, columns, terms;              /* columns in whole steps */
    int adds;                              /* whether c holds something that is to be added to */
};

INLINE void multiply_tile(const struct product *p, int row, int column, const int R, const int C) {
    vec sums[TILE_ROWS][MOST];
    const float *a = p->a + row * p->a_row, *b = p->b + column;
    float *c = p->c + row * p->c_row + column;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < C; i++) sums[r][i] = p->adds ? load(c + r * p->c_row + i * LANES) : (vec){};
    for (int t = 0; t < p->terms; t++, a += p->a_column, b += p->b_row) {
        vec values[MOST];
#pragma GCC unroll 8
        for (int i = 0; i < C; i++) values[i] = load(b + i * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            vec one = all(a[r * p->a_row]);
#pragma GCC unroll 8
            for (int i = 0; i < C; i++) sums[r][i] = fused(one, values[i], sums[r][i]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < C; i++) store(c + r * p->c_row + i * LANES, sums[r][i]);
}

INLINE void multiply_columns(const struct product *p, int column, const int C) {
    for (int row = 0; row < p->rows; row += TILE_ROWS) switch (p->rows - row) {
        case 1: multiply_tile(p, row, column, 1, C); break;
        case 2: multiply_tile(p, row, column, 2, C); break;
        case 3: multiply_tile(p, row, column, 3, C); break;
        case 4: multiply_tile(p, row, column, 4, C); break;
        case 5: multiply_tile(p, row, column, 5, C); break;
        default: multiply_tile(p, row, column, 6, C); break;
        }
}

static void multiply(const struct product *p) {
    int column = 0;
    for (; column + MOST * LANES <= p->columns; column += MOST * LANES) multiply_columns(p, column, MOST);
    for (; column < p->columns; column += LANES) multiply_columns(p, column, 1);
}

INLINE int64_t place_of(const struct piece *p, int64_t token) {
    return p->sources ? p->sources[token] : p->start + token;
}

INLINE int64_t span_of(int64_t length) { return least(CHUNK_KEYS, padded(length)) + STEP; }

static void turn(const float *from, float *to, int64_t span, int64_t width) {
    for (int64_t d = 0; d < width; d++) to[d * span] = from[d];
}

static void gather_keys(const struct piece *p) {
    const struct backward *of = p->of;
    int64_t width = of->width, wide = padded(width), end = padded(p->length);
    for (int64_t t = 0; t < end; t++) {
        int64_t at = t / CHUNK_KEYS * p->span * width + t % CHUNK_KEYS;
        if (t >= p->length) { /* only so that nothing is read that was not written */
            for (int64_t d = 0; d < width; d++) p->k_turned[at + d * p->span] = p->v_turned[at + d * p->span] = 0;
            continue;
        }
        int64_t place = place_of(p, t);
        const float *key = of->k + place * of->k_token + p->head * of->k_head;
        memcpy(p->k + t * wide, key, (size_t)width * sizeof(float));
        memset(p->k + t * wide + width, 0, (size_t)(wide - width) * sizeof(float));
        turn(key, p->k_turned + at, p->span, width);
        turn(of->v + place * of->v_token + p->head * of->v_head, p->v_turned + at, p->span, width);
    }
    memset(p->dk, 0, (size_t)(p->length * wide) * sizeof(float));
    memset(p->dv, 0, (size_t)(p->length * wide) * sizeof(float));
}

/* The sum of a[i] * b[i]; `count` in whole steps. */
INLINE float inner(const float *a, const float *b, int64_t count) {
    vec lanes = {};
    float sum = 0;
    for (int64_t i = 0; i < count; i += LANES) lanes = fused(load(a + i), load(b + i), lanes);
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

static void gather_queries(const struct piece *p, int64_t first, int rows) {
    const struct backward *of = p->of;
    int64_t width = of->width, wide = padded(width), group = of->heads / of->kv_heads;
    for (int r = 0; r < rows; r++) {
        int64_t place = p->start + first + r / group, head = p->head * group + r % group;
        const float *query = of->q + place * of->q_token + head * of->q_head;
        const float *grad = of->grad + place * of->grad_token + head * of->grad_head;
        const float *out = of->out + (place * of->heads + head) * width;
        float *q = p->q + r * wide, *g = p->grad + r * wide, *o = p->dq + r * wide;
        for (int64_t d = 0; d < width; d++) q[d] = query[d] * of->scale;
        for (int64_t d = 0; d < width; d++) g[d] = grad[d];
        for (int64_t d = 0; d < width; d++) o[d] = out[d];
        for (int64_t d = width; d < wide; d++) q[d] = g[d] = o[d] = 0;
        p->delta[r] = inner(g, o, wide);
        p->lse[r] = of->lse[place * of->heads + head];
    }
    memset(p->dq, 0, (size_t)(rows * wide) * sizeof(float));
}

/* Turns a row's scores into weights, and the gradients of its weights into those of its scores; 0 for unseen keys. */
INLINE void weigh(float *weights, float *slopes, int64_t seen, int64_t end, float lse, float delta) {
    for (int64_t j = 0; j < padded(seen); j += LANES) {
        vec weight = exponential(load(weights + j) - all(lse));
        store(weights + j, weight);
        store(slopes + j, weight * (load(slopes + j) - all(delta)));
    }
    for (int64_t j = seen; j < end; j++) weights[j] = slopes[j] = 0;
}

static void add_block(const struct piece *p, int64_t first, int rows) {
    int64_t group = p->of->heads / p->of->kv_heads, width = p->of->width, wide = padded(width), span = p->span;
    int64_t last = p->prefix + first + (rows - 1) / group + 1; /* the keys that the last row sees */
    for (int64_t chunk = 0; chunk < last; chunk += CHUNK_KEYS) {
        int keys = (int)least(CHUNK_KEYS, last - chunk), end = (int)padded(keys), n = (int)width, w = (int)wide;
        const float *k_turned = p->k_turned + chunk / CHUNK_KEYS * span * width;
        const float *v_turned = p->v_turned + chunk / CHUNK_KEYS * span * width;
        multiply(&(struct product){p->q, k_turned, p->weights, wide, 1, span, span, rows, end, n, 0});
        multiply(&(struct product){p->grad, v_turned, p->slopes, wide, 1, span, span, rows, end, n, 0});
        for (int r = 0; r < rows; r++) {
            int64_t seen = p->prefix + first + r / group + 1 - chunk;
            seen = seen < 0 ? 0 : least(seen, keys);
            weigh(p->weights + r * span, p->slopes + r * span, seen, end, p->lse[r], p->delta[r]);
        }
        multiply(&(struct product){p->weights, p->grad, p->dv + chunk * wide, 1, span, wide, wide, keys, w, rows, 1});
        multiply(&(struct product){p->slopes, p->q, p->dk + chunk * wide, 1, span, wide, wide, keys, w, rows, 1});
        multiply(&(struct product){p->slopes, p->k + chunk * wide, p->dq, span, 1, wide, wide, rows, w, keys, 1});
    }
}

static void differentiate(const struct piece *p) {
    const struct backward *of = p->of;
    int64_t width = of->width, wide = padded(width), group = of->heads / of->kv_heads;
    int64_t tokens = BLOCK_ROWS / group < 1 ? 1 : BLOCK_ROWS / group, count = p->length - p->prefix;
    gather_keys(p);
    for (int64_t first = 0; first < count; first += tokens) {
        int rows = (int)(least(tokens, count - first) * group);
        gather_queries(p, first, rows);
        add_block(p, first, rows);
        for (int r = 0; r < rows; r++) {
            int64_t place = p->start + first + r / group, head = p->head * group + r % group;
            float *to = of->dq + (place * of->heads + head) * width;
            for (int64_t d = 0; d < width; d++) to[d] = p->dq[r * wide + d] * of->scale;
        }
    }
}

static void keep(const struct work *work, const struct piece *p) {
    const struct backward *of = p->of;
    int64_t width = of->width, wide = padded(width);
    size_t size = (size_t)width * sizeof(float);
    for (int64_t t = 0; t < p->length; t++) {
        int64_t at = ((p->start + t - p->prefix) * of->kv_heads + p->head) * width;
        float *dk = of->dk + at, *dv = of->dv + at;
        if (t < p->prefix) {
            dk = work->shared + ((work->first_taken[p->document] + t) * of->kv_heads + p->head) * 2 * width;
            dv = dk + width;
        }
        memcpy(dk, p->dk + t * wide, size);
        memcpy(dv, p->dv + t * wide, size);
    }
}

static int64_t prefix_of(const struct backward *of, int64_t document) {
    return of->lengths[document] - (of->starts[document + 1] - of->starts[document]);
}

/* What all documents of a tree add to tokens that they take, in their order. */
static void add_shared(const struct work *work, int64_t root, int64_t head) {
    const struct backward *of = work->of;
    int64_t width = of->width;
    for (int64_t s = root + 1; s < of->num_documents && of->roots[s] == root; s++)
        for (int64_t t = 0, end = prefix_of(of, s); t < end; t++) {
            const float *from = work->shared + ((work->first_taken[s] + t) * of->kv_heads + head) * 2 * width;
            int64_t at = (of->sources[work->first_token[s] + t] * of->kv_heads + head) * width;
            for (int64_t d = 0; d < width; d++) of->dk[at + d] += from[d];
            for (int64_t d = 0; d < width; d++) of->dv[at + d] += from[width + d];
        }
}

static void work_on(void *argument) {
    struct work *work = argument;
    const struct backward *of = work->of;
    int64_t wide = padded(of->width), group = of->heads / of->kv_heads;
    int64_t rows = BLOCK_ROWS > group ? BLOCK_ROWS : group, most = padded(work->longest);
    int64_t span = span_of(work->longest), turned = (work->longest + CHUNK_KEYS - 1) / CHUNK_KEYS * span * of->width;
    size_t floats = (size_t)(3 * most * wide + 2 * turned + rows * (3 * wide + 2 * span + 2));
    float *memory = malloc(floats * sizeof(float));
    if (!memory) {
        __atomic_store_n(&work->out_of_memory, 1, __ATOMIC_RELAXED);
        return;
    }
    struct piece p = {.of = of, .k = memory, .dk = memory + most * wide, .dv = memory + 2 * most * wide};
    p.k_turned = p.dv + most * wide;
    p.v_turned = p.k_turned + turned;
    p.q = p.v_turned + turned;
    p.grad = p.q + rows * wide;
    p.dq = p.grad + rows * wide;
    p.weights = p.dq + rows * wide;
    p.slopes = p.weights + rows * span;
    p.lse = p.slopes + rows * span;
    p.delta = p.lse + rows;
    int64_t unit;
    while ((unit = __atomic_fetch_add(&work->next_unit, 1, __ATOMIC_RELAXED)) < work->num_units) {
        int64_t root;
        p.document = unit / of->kv_heads;
        p.head = unit % of->kv_heads;
        p.prefix = prefix_of(of, p.document);
        p.length = of->lengths[p.document];
        p.start = of->starts[p.document];
        p.span = span_of(p.length);
        p.sources = of->sources ? of->sources + work->first_token[p.document] : NULL;
        root = of->roots[p.document];
        differentiate(&p);
        keep(work, &p);
        if (__atomic_sub_fetch(&work->remaining[root * of->kv_heads + p.head], 1, __ATOMIC_ACQ_REL) == 0)
            add_shared(work, root, p.head);
    }
    free(memory);
}

/* Whether the places of a document's tokens are those of its predecessor's and then its own. */
static int are_sources(const struct backward *of, int64_t document, int64_t first) {
    int64_t prefix = prefix_of(of, document), start = of->starts[document];
    if (!of->sources) return prefix == 0;
    for (int64_t t = 0; t < of->lengths[document]; t++) {
        int64_t before = t < prefix ? of->sources[first - of->lengths[document - 1] + t] : start + t - prefix;
        if (of->sources[first + t] != before) return 0;
    }
    return 1;
}

/* Whether all that would be read exists, and documents take tokens from the one before them. */
static int is_sound(const struct backward *of) {
    if (of->starts[0] != 0 || of->starts[of->num_documents] != of->num_places) return 0;
    for (int64_t s = 0, first = 0; s < of->num_documents; first += of->lengths[s], s++) {
        int64_t root = of->roots[s], prefix = prefix_of(of, s);
        if (of->starts[s + 1] < of->starts[s] || prefix < 0) return 0;
        if (root == s ? prefix != 0 : s == 0 || root != of->roots[s - 1] || prefix > of->lengths[s - 1]) return 0;
        if (!are_sources(of, s, first)) return 0;
    }
    return 1;
}

/* 0, or 1 for documents that name what does not exist, or 2 if there is not enough memory. */
int forge_attend_backward(const struct backward *of) {
    if (!is_sound(of)) return 1;
    struct work work = {.of = of, .num_units = of->num_documents * of->kv_heads, .longest = 1};
    work.first_taken = malloc((size_t)(of->num_documents + 1) * sizeof(int64_t));
    work.first_token = malloc((size_t)(of->num_documents + 1) * sizeof(int64_t));
    work.remaining = calloc((size_t)(work.num_units + 1), sizeof(int32_t));
    int has_tables = work.first_taken && work.first_token && work.remaining;
    int64_t taken = 0, tokens = 0;
    double size = 0;
    for (int64_t s = 0; has_tables && s < of->num_documents; s++) {
        work.first_taken[s] = taken;
        work.first_token[s] = tokens;
        taken += prefix_of(of, s);
        tokens += of->lengths[s];
        if (of->lengths[s] > work.longest) work.longest = of->lengths[s];
        size += (double)(of->starts[s + 1] - of->starts[s]) * of->lengths[s] * of->heads * of->width;
        for (int64_t h = 0; h < of->kv_heads; h++) work.remaining[of->roots[s] * of->kv_heads + h]++;
    }
    work.shared = malloc((size_t)(taken * of->kv_heads * 2 * of->width + 1) * sizeof(float));
    work.out_of_memory = !has_tables || !work.shared;
    if (!work.out_of_memory) run_on_threads(work_on, &work, size > SMALL_WORK ? of->num_threads : 1);
    free(work.first_taken);
    free(work.first_token);
    free(work.remaining);
    free(work.shared);
    return work.out_of_memory ? 2 : 0;
}
