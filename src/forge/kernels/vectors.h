/* Vectors of LANES floats: as many as the widest register holds, unless the including file defines another number. */

#ifndef FORGE_VECTORS_H
#define FORGE_VECTORS_H

#include <stdint.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#ifndef LANES
#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
#endif

typedef float vec __attribute__((vector_size(4 * LANES), may_alias));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), may_alias));

INLINE vec load(const float *from) { return *(const loose *)from; }
INLINE void store(float *to, vec value) { *(loose *)to = value; }
INLINE vec all(float value) { return value - (vec){}; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#endif
