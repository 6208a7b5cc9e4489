/* The argument of forge_linear (cpu_linear.c), for kernels that call it. */

#ifndef FORGE_PRODUCT_H
#define FORGE_PRODUCT_H

#include <stdint.h>

struct product {
    const float *x, *weight;
    float *out;
    int64_t rows, width, outputs; /* x [rows, width], weight [outputs, width], out [rows, outputs] */
    int64_t x_row, out_row;       /* floats from one row to the next */
    int32_t num_threads;
};

#endif
