/* What products and steps must agree on: the width of a vector, how rows are padded to it, and how a factor is handed over.
   `real` is float or double, defined before this file. */
#include <stdint.h>

#if defined(__AVX512F__)
enum { BYTES = 64 };
#elif defined(__AVX__)
enum { BYTES = 32 };
#else
enum { BYTES = 16 };
#endif
enum { V = BYTES / sizeof(real) };
#define PAD(n) (((n) + V - 1) / V * V)

/* One term of a product: A [m, k], with lda from row to row, times a packed B [k, n]. */
typedef struct { const real* a; int64_t lda; const real* b; int64_t k; } Part;
