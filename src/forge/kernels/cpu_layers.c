/* Norms, rotary embeddings and gates in float32 on a CPU, with their gradients: one pass over memory for each.

   Forward results of norms and rotary embeddings have the bits of the torch operations that they stand for: each product
   is rounded, and so is each sum. A gate's bits do not depend on where an element lies: torch's own silu computes the last
   few elements of a tensor, or of a thread's part of it, by another exponential than the rest. Gradients do not depend on
   the number of threads: what is added up over rows is added up in parts of a fixed number of rows first. Compile with
   -ffp-contract=off. */

#include <math.h>
#include <string.h>

#include "threads.h"
#define LANES 16
#include "vectors.h"

#define PART_ROWS 64      /* rows whose contributions to a weight's gradient are added up together */
#define PART_ELEMENTS 8192 /* elements that a thread takes at once */

#if defined(__FP_FAST_FMAF) || defined(__FMA__)
#define FUSED(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FUSED(a, b, c) ((a) * (b) + (c))
#endif

/* Work in parts of `size` out of `count`, in any order and by any thread. */
struct work {
    void (*part)(const void *job, int64_t start, int64_t end);
    const void *job;
    int64_t count, size, next;
};

static void work_on(void *argument) {
    struct work *work = argument;
    int64_t start;
    while ((start = __atomic_fetch_add(&work->next, work->size, __ATOMIC_RELAXED)) < work->count)
        work->part(work->job, start, least(start + work->size, work->count));
}

static int run(struct work work, int num_threads) {
    run_on_threads(work_on, &work, work.count > 2 * work.size ? num_threads : 1);
    return 0;
}

struct norm {
    const float *x, *weight, *factors, *grad; /* x and grad [rows, width]; factors [rows]: 1 / root mean square */
    float *out, *parts;                       /* parts [rows / PART_ROWS, rounded up, width] */
    int64_t rows, width;
    int32_t num_threads;
};

static void scale_rows(const void *job, int64_t start, int64_t end) {
    const struct norm *of = job;
    for (int64_t row = start; row < end; row++) {
        const float *x = of->x + row * of->width, factor = of->factors[row];
        float *out = of->out + row * of->width;
        for (int64_t i = 0; i < of->width; i++) out[i] = x[i] * factor * of->weight[i];
    }
}

/* out[row, i] = x[row, i] * factors[row] * weight[i] */
int forge_norm(const struct norm *of) {
    return run((struct work){scale_rows, of, of->rows, PART_ROWS, 0}, of->num_threads);
}

/* The sum of grad * weight * x over a row. */
static float projected(const float *grad, const float *weight, const float *x, int64_t width) {
    vec lanes = {};
    float sum = 0;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        lanes += load(grad + i) * load(weight + i) * load(x + i);
    for (; i < width; i++) sum += grad[i] * weight[i] * x[i];
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

static void norm_rows_backward(const void *job, int64_t start, int64_t end) {
    const struct norm *of = job;
    int64_t width = of->width;
    float *restrict part = of->parts + start / PART_ROWS * width;
    memset(part, 0, (size_t)width * sizeof(float));
    for (int64_t row = start; row < end; row++) {
        const float *restrict x = of->x + row * width, *restrict grad = of->grad + row * width, factor = of->factors[row];
        const float *restrict weight = of->weight;
        float *restrict out = of->out + row * width;
        float slope = projected(grad, weight, x, width) * factor * factor / (float)width;
        for (int64_t i = 0; i < width; i++) {
            out[i] = factor * (grad[i] * weight[i] - x[i] * slope);
            part[i] += grad[i] * (x[i] * factor);
        }
    }
}

/* out gets the gradient of x, and the first row of parts that of the weight. */
int forge_norm_backward(const struct norm *of) {
    int64_t num_parts = (of->rows + PART_ROWS - 1) / PART_ROWS;
    run((struct work){norm_rows_backward, of, of->rows, PART_ROWS, 0}, of->num_threads);
    for (int64_t i = 0; i < of->width; i++) {
        double sum = 0;
        for (int64_t part = 0; part < num_parts; part++) sum += of->parts[part * of->width + i];
        of->parts[i] = (float)sum;
    }
    return 0;
}

struct rotation {
    const float *x, *table; /* table [positions, 2, width]: cosines, then sines, each for both halves */
    float *out;             /* [tokens, heads, width] without gaps */
    const int64_t *positions;
    int64_t tokens, heads, width, x_token, x_head, num_positions;
    int32_t backward; /* whether `x` is a gradient of what was rotated */
    int32_t num_threads;
};

/* One head. `sign` is 1, or -1 for the gradient: to rotate back is to rotate by the opposite angle. */
static inline void rotate_head(const float *restrict x, const float *restrict cosines, const float *restrict sines,
                             float *restrict out, int64_t half, float sign) {
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cosines[i] + -x[i + half] * (sign * sines[i]);
        out[i + half] = x[i + half] * cosines[i + half] + x[i] * (sign * sines[i + half]);
    }
}

static void rotate_tokens(const void *job, int64_t start, int64_t end) {
    const struct rotation *of = job;
    int64_t width = of->width;
    for (int64_t t = start; t < end; t++) {
        const float *cosines = of->table + of->positions[t] * 2 * width;
        for (int64_t h = 0; h < of->heads; h++)
            rotate_head(of->x + t * of->x_token + h * of->x_head, cosines, cosines + width,
                      of->out + (t * of->heads + h) * width, width / 2, of->backward ? -1.0f : 1.0f);
    }
}

/* 0, or 1 for a position that the table does not have: then nothing is written. */
int forge_rotate(const struct rotation *of) {
    for (int64_t t = 0; t < of->tokens; t++)
        if (of->positions[t] < 0 || of->positions[t] >= of->num_positions) return 1;
    int64_t size = PART_ELEMENTS / (of->heads * of->width);
    return run((struct work){rotate_tokens, of, of->tokens, size < 1 ? 1 : size, 0}, of->num_threads);
}

struct gating {
    const float *gate, *up;
    float *out; /* forward */
    const float *grad;
    float *gate_grad, *up_grad; /* backward */
    int64_t count;
    int32_t num_threads;
};

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* exp(x) to about one unit in the last place; 0 below -87 and infinite above 88. */
static inline float exponential(float x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    float shifted = FUSED(x, 1.44269504f, shift), whole = shifted - shift;
    float rest = FUSED(whole, 2.12194440e-4f, FUSED(whole, -0.693359375f, x));
    float series = 1.9875691500e-4f;
    series = FUSED(series, rest, 1.3981999507e-3f);
    series = FUSED(series, rest, 8.3334519073e-3f);
    series = FUSED(series, rest, 4.1665795894e-2f);
    series = FUSED(series, rest, 1.6666665459e-1f);
    series = FUSED(series, rest, 5.0000001201e-1f);
    series = FUSED(series, rest * rest, rest) + 1.0f;
    float result = series * from_bits((to_bits(shifted) - to_bits(shift) + 127u) << 23);
    result = x < -87.0f ? 0.0f : result;
    return x > 88.0f ? INFINITY : result;
}

static void gate_part(const void *job, int64_t start, int64_t end) {
    const struct gating *of = job;
    const float *restrict gates = of->gate, *restrict ups = of->up;
    float *restrict out = of->out;
    for (int64_t i = start; i < end; i++) out[i] = gates[i] / (1.0f + exponential(-gates[i])) * ups[i];
}

/* silu(gate) * up */
int forge_gate(const struct gating *of) {
    return run((struct work){gate_part, of, of->count, PART_ELEMENTS, 0}, of->num_threads);
}

static void gate_part_backward(const void *job, int64_t start, int64_t end) {
    const struct gating *of = job;
    const float *restrict gates = of->gate, *restrict ups = of->up, *restrict grads = of->grad;
    float *restrict gate_grad = of->gate_grad, *restrict up_grad = of->up_grad;
    for (int64_t i = start; i < end; i++) {
        float gate = gates[i], grad = grads[i], open = 1.0f / (1.0f + exponential(-gate));
        up_grad[i] = grad * (gate * open);
        gate_grad[i] = grad * ups[i] * (open * (1.0f + gate * (1.0f - open)));
    }
}

/* The gradients of silu(gate) * up. */
int forge_gate_backward(const struct gating *of) {
    return run((struct work){gate_part_backward, of, of->count, PART_ELEMENTS, 0}, of->num_threads);
}
