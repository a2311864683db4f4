/* Products of a tile of rows with packed matrices: one library for all kernels of a precision, compiled once.
   Compiled after layout.h. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "fp-contract=fast") /* sums stay in registers only where every inner loop is unrolled */
#elif defined(__clang__)
#pragma clang fp contract(fast)
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

/* Six rows of a panel of products are held in registers: 12 of 16, or 24 of 32. */
#if defined(__AVX__) && !defined(__AVX512F__)
enum { PANEL_VECTORS = 2 };
#define WIDE_PANEL 0
#else
enum { PANEL_VECTORS = 4 };
#define WIDE_PANEL 1
#endif
enum { PANEL = PANEL_VECTORS * V };
typedef real vec __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));

/* A matrix M [k, n] is packed in panels of PANEL columns, the last one as wide as what is left, padded to V with zeros:
   panel after panel, row after row, so that a product reads it once from front to back. */

/* C[row.., col..] = sum over parts of A B: ROWS rows of WIDE panels of N vectors, all sums in registers. */
#define MICRO(ROWS, WIDE, N) \
static void micro_##ROWS##_##WIDE##_##N(const Part* part, int parts, int row, int col, real* c, int ldc) { \
  vec sum[ROWS][WIDE * N]; \
  for (int r = 0; r < ROWS; r++) for (int j = 0; j < WIDE * N; j++) sum[r][j] = (vec){0}; \
  for (int q = 0; q < parts; q++) { \
    const int64_t lda = part[q].lda, k_end = part[q].k; \
    const real* a = part[q].a + row * lda; \
    const real* b = part[q].b + col * k_end; \
    for (int64_t k = 0; k < k_end; k++, b += N * V) { \
      vec x[WIDE * N]; \
      for (int w = 0; w < WIDE; w++) for (int j = 0; j < N; j++) x[w * N + j] = *(const vec*)(b + w * k_end * (N * V) + j * V); \
      for (int r = 0; r < ROWS; r++) { \
        const real s = a[r * lda + k]; \
        for (int j = 0; j < WIDE * N; j++) sum[r][j] += s * x[j]; \
      } \
    } \
  } \
  for (int r = 0; r < ROWS; r++) for (int j = 0; j < WIDE * N; j++) *(vec*)(c + (int64_t)(row + r) * ldc + col + j * V) = sum[r][j]; \
}
#define MICROS(N) MICRO(1, 1, N) MICRO(2, 1, N) MICRO(3, 1, N) MICRO(4, 1, N) MICRO(5, 1, N) MICRO(6, 1, N)
MICROS(1)
MICROS(2)
#if WIDE_PANEL
MICROS(3)
MICROS(4)
MICRO(1, 2, 4)
#define WHOLE(rows) micro_##rows##_1_4
#define LONG micro_1_2_4
enum { LONG_PANELS = 2 };
#else
MICRO(1, 4, 2)
#define WHOLE(rows) micro_##rows##_1_2
#define LONG micro_1_4_2
enum { LONG_PANELS = 4 };
#endif

typedef void (*Micro)(const Part*, int, int, int, real*, int);

/* m rows of one panel, in groups of at most six rows of nearly equal size. */
static void panel_rows(const Micro* micro, const Part* part, int parts, int m, int col, real* c, int ldc) {
  int row = 0;
  for (int groups = (m + 5) / 6; groups > 0; groups--) {
    const int rows = (m - row + groups - 1) / groups;
    micro[rows - 1](part, parts, row, col, c, ldc);
    row += rows;
  }
}

/* C [m, PAD(n)] = sum over parts of A [m, k] B [k, n]. */
void product(const Part* part, int parts, int m, int n, real* c) {
  static const Micro whole[6] = {WHOLE(1), WHOLE(2), WHOLE(3), WHOLE(4), WHOLE(5), WHOLE(6)};
  static const Micro narrow[][6] = {
    {micro_1_1_1, micro_2_1_1, micro_3_1_1, micro_4_1_1, micro_5_1_1, micro_6_1_1},
#if WIDE_PANEL
    {micro_1_1_2, micro_2_1_2, micro_3_1_2, micro_4_1_2, micro_5_1_2, micro_6_1_2},
    {micro_1_1_3, micro_2_1_3, micro_3_1_3, micro_4_1_3, micro_5_1_3, micro_6_1_3},
#endif
  };
  const int width = PAD(n), rest = width % PANEL / V;
  int col = 0;
  if (m == 1) for (; col + LONG_PANELS * PANEL <= width; col += LONG_PANELS * PANEL) LONG(part, parts, 0, col, c, width);
  for (; col + PANEL <= width; col += PANEL) panel_rows(whole, part, parts, m, col, c, width);
  if (rest) panel_rows(narrow[rest > 0 ? rest - 1 : 0], part, parts, m, col, c, width);
}

/* M [k, n] with M[i][j] = from[i * down + j * right], packed. */
static void pack(const real* from, int64_t down, int64_t right, int64_t k, int64_t n, real* to) {
  for (int64_t col = 0; col < PAD(n); col += PANEL) {
    const int64_t width = PAD(n) - col < PANEL ? PAD(n) - col : PANEL;
    for (int64_t i = 0; i < k; i++)
      for (int64_t j = 0; j < width; j++) *to++ = col + j < n ? from[i * down + (col + j) * right] : 0;
  }
}
/* Blocks of several matrices: of each, which matrix, its first entry, steps down and right, k, n, and where it goes. */
void pack_all(const int64_t* blocks, int64_t count, const real** matrices, real* to) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t* b = blocks + 7 * i;
    pack(matrices[b[0]] + b[1], b[2], b[3], b[4], b[5], to + b[6]);
  }
}

/* Ask for large pages: the first touch of a page costs more than filling it. */
void advise(void* start, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = 4096, first = ((uintptr_t)start + page - 1) / page * page, end = ((uintptr_t)start + bytes) / page * page;
  if (end > first) madvise((void*)first, end - first, MADV_HUGEPAGE);
#else
  (void)start; (void)bytes;
#endif
}
int64_t packed_size(int64_t k, int64_t n) { return k * PAD(n); }

/* C[i0.., j..] += scale * sum over lines of A[line][i0..] B[line][j..]: ROWS entries of A by N vectors of B, in registers. */
#define OUTER(ROWS, N) \
static void outer_##ROWS##_##N(const real* a, int64_t lda, const real* b, int64_t ldb, int64_t lines, real* c, int64_t ldc, real scale) { \
  vec sum[ROWS][N]; \
  for (int r = 0; r < ROWS; r++) for (int j = 0; j < N; j++) sum[r][j] = (vec){0}; \
  for (int64_t line = 0; line < lines; line++, a += lda, b += ldb) { \
    vec x[N]; \
    for (int j = 0; j < N; j++) x[j] = *(const vec*)(b + j * V); \
    for (int r = 0; r < ROWS; r++) { \
      const real s = a[r]; \
      for (int j = 0; j < N; j++) sum[r][j] += s * x[j]; \
    } \
  } \
  for (int r = 0; r < ROWS; r++) for (int j = 0; j < N; j++) { \
    vec* to = (vec*)(c + r * ldc + j * V); \
    *to = *to + scale * sum[r][j]; \
  } \
}
#define OUTERS(N) OUTER(1, N) OUTER(2, N) OUTER(3, N) OUTER(4, N) OUTER(5, N) OUTER(6, N)
OUTERS(1)
OUTERS(2)
#if WIDE_PANEL
OUTERS(4)
#define WHOLE_OUTER(rows) outer_##rows##_4
#else
#define WHOLE_OUTER(rows) outer_##rows##_2
#endif
typedef void (*Outer)(const real*, int64_t, const real*, int64_t, int64_t, real*, int64_t, real);

/* Columns of B that fill no vector, one by one. */
static void outer_rest(const real* a, int64_t lda, const real* b, int64_t ldb, int64_t lines, int64_t n, int64_t k, real* c, int64_t ldc, real scale) {
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < k; j++) {
      real sum = 0;
      for (int64_t line = 0; line < lines; line++) sum += a[line * lda + i] * b[line * ldb + j];
      c[i * ldc + j] += scale * sum;
    }
}

/* C [n, k] += scale * A^T B for A [lines, n] and B [lines, k]: the gradient of a matrix. Lines go in blocks that stay in the
   nearest caches, and what a block adds up to is added in one go, which also keeps long sums exact. */
void outer(const real* a, int64_t lda, const real* b, int64_t ldb, int64_t lines, int64_t n, int64_t k, real* c, int64_t ldc, double scale) {
  static const Outer whole[6] = {WHOLE_OUTER(1), WHOLE_OUTER(2), WHOLE_OUTER(3), WHOLE_OUTER(4), WHOLE_OUTER(5), WHOLE_OUTER(6)};
  static const Outer single[6] = {outer_1_1, outer_2_1, outer_3_1, outer_4_1, outer_5_1, outer_6_1};
  enum { BLOCK = 128 };
  for (int64_t line = 0; line < lines; line += BLOCK) {
    const int64_t some = lines - line < BLOCK ? lines - line : BLOCK;
    const real *a_block = a + line * lda, *b_block = b + line * ldb;
    for (int64_t j = 0; j < k;) {
      const int64_t wide = k - j >= PANEL ? PANEL : k - j >= V ? V : k - j;
      if (wide < V) {
        outer_rest(a_block, lda, b_block + j, ldb, some, n, wide, c + j, ldc, scale);
      } else {
        const Outer* micro = wide == PANEL ? whole : single;
        for (int64_t i = 0; i < n; i += 6) {
          const int64_t rows = n - i < 6 ? n - i : 6;
          micro[rows - 1](a_block + i, lda, b_block + j, ldb, some, c + i * ldc + j, ldc, scale);
        }
      }
      j += wide;
    }
  }
}
