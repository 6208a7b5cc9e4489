/* Arithmetic on the widest vectors, the same bits in every lane. Compile with -ffp-contract=off. */

#ifndef FORGE_VECTOR_MATH_H
#define FORGE_VECTOR_MATH_H

#include "vectors.h"

INLINE vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

INLINE vec larger(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    bits chosen = (bits)(a > b);
    return (vec)(((bits)a & chosen) | ((bits)b & ~chosen));
#endif
}

/* exp(x) for x up to 80, to about one unit in the last place; 0 below -87, where float32 has no more normal numbers. */
INLINE vec exponential(vec x) {
    const vec shift = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    vec shifted = fused(x, all(1.44269504f), shift);
    vec whole = shifted - shift;
    vec rest = fused(whole, all(-0.693359375f), x);
    rest = fused(whole, all(2.12194440e-4f), rest);
    vec series = all(1.9875691500e-4f);
    series = fused(series, rest, all(1.3981999507e-3f));
    series = fused(series, rest, all(8.3334519073e-3f));
    series = fused(series, rest, all(4.1665795894e-2f));
    series = fused(series, rest, all(1.6666665459e-1f));
    series = fused(series, rest, all(5.0000001201e-1f));
    series = fused(series, rest * rest, rest) + all(1.0f);
    bits power = ((bits)shifted - (bits)shift + 127u) << 23;
    bits vanishes = (bits)(x < all(-87.0f));
    return (vec)((bits)(series * (vec)power) & ~vanishes);
}

#endif
