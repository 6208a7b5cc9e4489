/* Work on torch's own pool of threads: that of the OpenMP runtime that torch has loaded, absent if there is none. */

#ifndef FORGE_THREADS_H
#define FORGE_THREADS_H

#include <stddef.h>

#if defined(__linux__)
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
#define HAS_THREADS (GOMP_parallel != NULL)
#else
#define GOMP_parallel(function, argument, count, flags) function(argument)
#define HAS_THREADS 0
#endif

/* Calls the function on so many threads at once, or once where one thread is enough. */
static inline void run_on_threads(void (*function)(void *), void *work, int num_threads) {
    if (HAS_THREADS && num_threads > 1)
        GOMP_parallel(function, work, (unsigned)num_threads, 0);
    else
        function(work);
}

#endif
