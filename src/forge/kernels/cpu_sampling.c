/* Where a uniform number falls in a distribution over tokens, on a CPU: by the arithmetic of
   forge.generator.native.sampler, operation by operation, in one pass and on one thread. Compile with
   -ffp-contract=off. */

#define LANES 8
#include "vectors.h"

#define BLOCK 128
#define CHAINS 4
#define BLOCK_UNITS 0x1p60
#define TOKEN_UNITS 0x1p52

struct sampling {
    const float *probs;     /* [rows, width] */
    const double *uniforms; /* [rows] */
    int64_t *sums;          /* [width / BLOCK], to work in */
    int64_t *tokens;        /* [rows] */
    int64_t rows, width;
};

struct found {
    int64_t place;
    double into; /* how far into it, from 0 to below 1 */
};

/* As torch adds rows of 128: vectors of 8 in four chains. */
static float block_sum(const float *probs) {
    vec sums[CHAINS] = {};
    for (int i = 0; i < BLOCK; i += CHAINS * LANES)
        for (int c = 0; c < CHAINS; c++) sums[c] += load(probs + i + c * LANES);
    for (int c = 1; c < CHAINS; c++) sums[0] += sums[c];
    float total = 0;
    for (int i = 0; i < LANES; i++) total += sums[0][i];
    return total;
}

/* The first of `count` running sums of whole numbers that exceeds its share of the last. */
static struct found invert(const int64_t *sums, int64_t count, double uniform) {
    int64_t total = sums[count - 1], target = (int64_t)(uniform * (double)total), place = 0;
    target = target < total - 1 ? target : total - 1;
    while (place < count - 1 && sums[place] <= target) place++;
    int64_t before = place ? sums[place - 1] : 0;
    return (struct found){place, (double)(target - before) / (double)(sums[place] - before)};
}

/* 0 for a row that is not a distribution. */
static int64_t sample(const struct sampling *of, const float *probs, double uniform) {
    int64_t num_blocks = of->width / BLOCK, sum = 0, inside[BLOCK];
    for (int64_t b = 0; b < num_blocks; b++) {
        float block = block_sum(probs + b * BLOCK);
        if (!(block >= 0 && block < 4)) return 0;
        of->sums[b] = sum += (int64_t)((double)block * BLOCK_UNITS);
    }
    if (sum <= 0) return 0;
    struct found block = invert(of->sums, num_blocks, uniform);
    probs += block.place * BLOCK;
    float largest = 0;
    for (int i = 0; i < BLOCK; i++) largest = probs[i] > largest ? probs[i] : largest;
    sum = 0;
    for (int i = 0; i < BLOCK; i++) inside[i] = sum += (int64_t)((double)probs[i] / (double)largest * TOKEN_UNITS);
    return block.place * BLOCK + invert(inside, BLOCK, block.into).place;
}

/* Returns 0. */
int forge_sample(const struct sampling *of) {
    for (int64_t r = 0; r < of->rows; r++) of->tokens[r] = sample(of, of->probs + r * of->width, of->uniforms[r]);
    return 0;
}

/* The threads that OpenMP, and with it torch, uses for what this thread asks for. 0, or 1 if there is no OpenMP. */
#if defined(__linux__)
extern void omp_set_num_threads(int) __attribute__((weak));

int forge_use_threads(const int32_t *count) {
    if (!omp_set_num_threads) return 1;
    omp_set_num_threads(*count);
    return 0;
}
#else
int forge_use_threads(const int32_t *count) { return count != 0; }
#endif
