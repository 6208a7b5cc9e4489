/* Many calls of other kernels, one after the other, without going back to Python in between; and the small operations of
   a language model that those do not have, with the bits of torch's: norm, addition, look-up. Compile with
   -ffp-contract=off.

   A step is cut into parts that do not depend on each other. Each is computed from its first call to its last by one
   thread, so that threads meet once in a step, at its end, and not after every operation. */

#include <math.h>
#include <string.h>

#include "product.h"
#include "threads.h"
#define LANES 8 /* as torch adds */
#include "vectors.h"

struct call {
    int (*function)(const void *);
    const void *argument;
};

struct part {
    const struct call *calls;
    int64_t num_calls;
};

struct step {
    const struct part *parts;
    int64_t num_parts;
    int32_t num_threads;
};

struct work {
    const struct step *of;
    int64_t next;
    int32_t has_failed;
};

static void work_on(void *argument) {
    struct work *work = argument;
    int64_t at;
    while ((at = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->of->num_parts) {
        const struct part *part = work->of->parts + at;
        for (int64_t i = 0; i < part->num_calls; i++)
            if (part->calls[i].function(part->calls[i].argument)) {
                __atomic_store_n(&work->has_failed, 1, __ATOMIC_RELAXED);
                break;
            }
    }
}

/* 0, or 1 if a call did not return 0: then the rest of its part was not computed. The team always has the same size: the
   pool would end threads that are not asked for. */
int forge_run(const struct step *of) {
    struct work work = {.of = of};
    run_on_threads(work_on, &work, of->num_parts > 1 ? of->num_threads : 1);
    return work.has_failed;
}

/* ---- RMS norm. torch adds squares in vectors of 8, four chains of them side by side, and every 16 terms, 256 and 4096
   carries a chain's sum to one of the next level. -------------------------------------------------------------------- */

#define CHAINS 4
#define LEVELS 4
#define CARRY 16

struct norm {
    const float *x, *weight;
    float *out; /* may be x */
    int64_t rows, width;
    float eps;
};

static inline vec square(const float *from) {
    vec x = load(from);
    return x * x;
}

static float sum_of_squares(const float *x, int64_t width) {
    int64_t num_vectors = width / LANES, num_lines = num_vectors / CHAINS;
    vec sums[LEVELS][CHAINS] = {};
    for (int64_t line = 0; line < num_lines;) {
        for (int c = 0; c < CHAINS; c++) sums[0][c] += square(x + (line * CHAINS + c) * LANES);
        line++;
        int64_t carry = CARRY;
        for (int level = 1; level < LEVELS && line % carry == 0; level++, carry *= CARRY)
            for (int c = 0; c < CHAINS; c++) {
                sums[level][c] += sums[level - 1][c];
                sums[level - 1][c] = (vec){};
            }
    }
    for (int level = 1; level < LEVELS; level++)
        for (int c = 0; c < CHAINS; c++) sums[0][c] += sums[level][c];
    for (int64_t v = num_lines * CHAINS; v < num_vectors; v++) sums[0][0] += square(x + v * LANES);
    for (int c = 1; c < CHAINS; c++) sums[0][0] += sums[0][c];
    float total = 0;
    for (int64_t i = num_vectors * LANES; i < width; i++) total += x[i] * x[i];
    for (int i = 0; i < LANES; i++) total += sums[0][0][i];
    return total;
}

/* Returns 0. */
int forge_norm(const struct norm *of) {
    for (int64_t r = 0; r < of->rows; r++) {
        const float *x = of->x + r * of->width;
        float *out = of->out + r * of->width;
        float factor = 1.0f / sqrtf(sum_of_squares(x, of->width) / (float)of->width + of->eps);
#pragma GCC ivdep
        for (int64_t i = 0; i < of->width; i++) out[i] = x[i] * factor * of->weight[i];
    }
    return 0;
}

struct addition {
    float *x; /* [rows, width] becomes x + y */
    const float *y;
    int64_t rows, width, y_row; /* y_row: floats from one row of y to the next, 0 where all rows get the same */
};

/* Returns 0. */
int forge_add(const struct addition *of) {
    for (int64_t r = 0; r < of->rows; r++) {
        float *x = of->x + r * of->width;
        const float *y = of->y + r * of->y_row;
        for (int64_t i = 0; i < of->width; i++) x[i] += y[i];
    }
    return 0;
}

struct scaling {
    float *x; /* [rows, width] */
    int64_t rows, width;
    float factor;
};

/* Returns 0. */
int forge_scale(const struct scaling *of) {
    for (int64_t i = 0; i < of->rows * of->width; i++) of->x[i] *= of->factor;
    return 0;
}

/* ---- Adapters. Rows of a step are in segments, one after the other, and a segment's rows get what its adapter adds. --- */

struct low_rank {
    const float *a, *b; /* [rank, width] and [outputs, rank]; a is 0 where the adapter adds nothing to this product */
    int64_t rank;
    float scale;
};

struct segment {
    int64_t start, rows, adapter; /* adapter: below 0 for none */
};

struct segments {
    const struct segment *each;
    int64_t count;
};

struct update {
    int (*linear)(const void *);
    const struct low_rank *adapters;
    const struct segments *segments; /* of the whole part, the same for all its updates */
    const float *x;                  /* [rows, width] */
    float *low, *added, *out;        /* space for one segment, and [rows, outputs], which becomes out + (scale x a^T) b^T */
    int64_t width, outputs;
};

/* 0, or 1 if a product did not return 0. */
int forge_update(const struct update *of) {
    for (int64_t i = 0; i < of->segments->count; i++) {
        struct segment part = of->segments->each[i];
        if (part.adapter < 0 || !of->adapters[part.adapter].a) continue;
        struct low_rank by = of->adapters[part.adapter];
        struct product down = {of->x + part.start * of->width, by.a, of->low, part.rows, of->width, by.rank,
                               of->width, by.rank, 1};
        if (of->linear(&down)) return 1;
        forge_scale(&(struct scaling){of->low, part.rows, by.rank, by.scale});
        struct product up = {of->low, by.b, of->added, part.rows, by.rank, of->outputs, by.rank, of->outputs, 1};
        if (of->linear(&up)) return 1;
        forge_add(&(struct addition){of->out + part.start * of->outputs, of->added, part.rows, of->outputs,
                                     of->outputs});
    }
    return 0;
}

struct lookup {
    const float *table; /* [size, width] */
    const int64_t *ids;
    float *out; /* [rows, width] */
    int64_t rows, width, size;
};

/* 0, or 1 for a row that the table does not have. */
int forge_look_up(const struct lookup *of) {
    for (int64_t r = 0; r < of->rows; r++) {
        if (of->ids[r] < 0 || of->ids[r] >= of->size) return 1;
        memcpy(of->out + r * of->width, of->table + of->ids[r] * of->width, (size_t)of->width * sizeof(float));
    }
    return 0;
}
