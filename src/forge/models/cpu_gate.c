/* silu(gate) * up in float32, on a CPU: the bits of an element do not depend on where it lies.

   torch's own silu computes the last few elements of a tensor, or of a thread's part of it, by another exponential than
   the rest. Here every operation is exact to the last bit wherever the compiler puts it, in a vector or by itself. Compile
   with -ffp-contract=off. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PART 16384 /* elements that a thread takes at once */

#if defined(__FP_FAST_FMAF) || defined(__FMA__)
#define FUSED(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FUSED(a, b, c) ((a) * (b) + (c))
#endif

struct gating {
    const float *gate, *up;
    float *out;
    int64_t count;
    int32_t num_threads;
};

struct work {
    const struct gating *of;
    int64_t next;
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

static void gate_part(const float *restrict gate, const float *restrict up, float *restrict out, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

static void work_on(void *argument) {
    struct work *work = argument;
    const struct gating *of = work->of;
    int64_t start;
    while ((start = __atomic_fetch_add(&work->next, PART, __ATOMIC_RELAXED)) < of->count) {
        int64_t count = of->count - start < PART ? of->count - start : PART;
        gate_part(of->gate + start, of->up + start, of->out + start, count);
    }
}

#if defined(__linux__)
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak)); /* torch's pool */
#define HAS_THREADS (GOMP_parallel != NULL)
#else
#define GOMP_parallel(function, argument, count, flags) function(argument)
#define HAS_THREADS 0
#endif

/* Returns 0. */
int forge_gate(const struct gating *of) {
    struct work work = {.of = of, .next = 0};
    if (HAS_THREADS && of->num_threads > 1 && of->count > 2 * PART)
        GOMP_parallel(work_on, &work, (unsigned)of->num_threads, 0);
    else
        work_on(&work);
    return 0;
}
