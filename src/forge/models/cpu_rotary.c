/* Rotary embeddings in float32, on a CPU, in the bits of the operations that training uses: each product is rounded, and
   so is each sum. Compile with -ffp-contract=off. */

#include <stdint.h>

struct rotation {
    const float *x, *table;
    float *out;
    const int64_t *positions;
    int64_t tokens, heads, width; /* x [tokens, heads, width], out the same without gaps */
    int64_t x_token, x_head;      /* strides, in floats */
    int64_t num_positions;        /* of the table [num_positions, 2, width]: cosines, then sines */
};

/* 0, or 1 for a position that the table does not have: then nothing is written. */
int forge_rotate(const struct rotation *of) {
    int64_t width = of->width, half = width / 2;
    for (int64_t t = 0; t < of->tokens; t++)
        if (of->positions[t] < 0 || of->positions[t] >= of->num_positions) return 1;
    for (int64_t t = 0; t < of->tokens; t++) {
        const float *cosines = of->table + of->positions[t] * 2 * width, *sines = cosines + width;
        for (int64_t h = 0; h < of->heads; h++) {
            const float *x = of->x + t * of->x_token + h * of->x_head;
            float *out = of->out + (t * of->heads + h) * width;
            for (int64_t i = 0; i < half; i++) {
                out[i] = x[i] * cosines[i] + -x[i + half] * sines[i];
                out[i + half] = x[i + half] * cosines[i + half] + x[i] * sines[i + half];
            }
        }
    }
    return 0;
}
