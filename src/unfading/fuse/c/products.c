/* Products of a tile of rows with packed matrices: one library for all kernels of a precision, compiled once.
   Compiled after layout.h. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "fp-contract=fast") /* sums stay in registers only where every inner loop is unrolled */
#elif defined(__clang__)
#pragma clang fp contract(fast)
#endif
#include <string.h>
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

/* s x + sum, rounded once where a processor can do that. For a single sum gcc does not join them on some processors (AMD Zen), so
   that a row would have other last digits alone than beside others. For several sums it does, and better than from this loop. */
static inline vec joined(real s, vec x, vec sum) {
#if defined(__FP_FAST_FMAF) && defined(__FP_FAST_FMA)
  for (int i = 0; i < V; i++) sum[i] = sizeof(real) == sizeof(float) ? __builtin_fmaf(s, x[i], sum[i]) : __builtin_fma(s, x[i], sum[i]);
  return sum;
#else
  return s * x + sum;
#endif
}

/* A matrix M [k, n] is packed in panels of PANEL columns, the last one as wide as what is left, padded to V with zeros:
   panel after panel, row after row, so that a product reads it once from front to back. */

/* C[row.., col..] = sum over parts of A B: ROWS rows of N vectors, or of WIDE panels of N vectors, all sums in registers. The
   panel that the columns lie in is `width` columns wide. */
#define MICRO(ROWS, WIDE, N) \
static void micro_##ROWS##_##WIDE##_##N(const Part* part, int parts, int row, int col, int width, real* c, int ldc) { \
  const int64_t panel = col & -PANEL; /* PANEL is a power of two */ \
  vec sum[ROWS][WIDE * N]; \
  for (int r = 0; r < ROWS; r++) for (int j = 0; j < WIDE * N; j++) sum[r][j] = (vec){0}; \
  for (int q = 0; q < parts; q++) { \
    const int64_t lda = part[q].lda, k_end = part[q].k; \
    const real* a = part[q].a + row * lda; \
    const real* b = part[q].b + panel * k_end + (col - panel); \
    _Pragma("GCC unroll 2") for (int64_t k = 0; k < k_end; k++, b += width) { \
      vec x[WIDE * N]; \
      for (int w = 0; w < WIDE; w++) for (int j = 0; j < N; j++) x[w * N + j] = *(const vec*)(b + w * k_end * (N * V) + j * V); \
      for (int r = 0; r < ROWS; r++) { \
        const real s = a[r * lda + k]; \
        if (ROWS * WIDE * N == 1) sum[r][0] = joined(s, x[0], sum[r][0]); \
        else for (int j = 0; j < WIDE * N; j++) sum[r][j] += s * x[j]; \
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
#define LONG micro_1_2_4
enum { LONG_PANELS = 2 };
#else
MICRO(1, 4, 2)
#define LONG micro_1_4_2
enum { LONG_PANELS = 4 };
#endif

typedef void (*Micro)(const Part*, int, int, int, int, real*, int);

/* m rows of columns of one panel, in groups of at most six rows of nearly equal size. */
static void panel_rows(const Micro* micro, const Part* part, int parts, int m, int col, int width, real* c, int ldc) {
  int row = 0;
  if (m <= 6) { /* no division */
    micro[m - 1](part, parts, 0, col, width, c, ldc);
    return;
  }
  for (int groups = (m + 5) / 6; groups > 0; groups--) {
    const int rows = (m - row + groups - 1) / groups;
    micro[rows - 1](part, parts, row, col, width, c, ldc);
    row += rows;
  }
}

/* Columns from..to, multiples of V, of C [m, PAD(n)] = sum over parts of A [m, k] B [k, n]. */
void product(const Part* part, int parts, int m, int n, real* c, int from, int to) {
  static const Micro micros[][6] = {
    {micro_1_1_1, micro_2_1_1, micro_3_1_1, micro_4_1_1, micro_5_1_1, micro_6_1_1},
    {micro_1_1_2, micro_2_1_2, micro_3_1_2, micro_4_1_2, micro_5_1_2, micro_6_1_2},
#if WIDE_PANEL
    {micro_1_1_3, micro_2_1_3, micro_3_1_3, micro_4_1_3, micro_5_1_3, micro_6_1_3},
    {micro_1_1_4, micro_2_1_4, micro_3_1_4, micro_4_1_4, micro_5_1_4, micro_6_1_4},
#endif
  };
  const int ldc = PAD(n);
  for (int col = from; col < to;) {
    if (m == 1 && to - col >= LONG_PANELS * PANEL && (col & (PANEL - 1)) == 0) {
      LONG(part, parts, 0, col, PANEL, c, ldc);
      col += LONG_PANELS * PANEL;
      continue;
    }
    const int panel = col & -PANEL, end = panel + PANEL < to ? panel + PANEL : to;
    const int width = ldc - panel < PANEL ? ldc - panel : PANEL;
    panel_rows(micros[(end - col) / V - 1], part, parts, m, col, width, c, ldc);
    col = end;
  }
}

/* One panel of M [k, n], with M[i][j] = from[i * down + j * right]. */
static void pack(const real* from, int64_t down, int64_t right, int64_t k, int64_t n, int64_t col, real* to) {
  const int64_t width = PAD(n) - col < PANEL ? PAD(n) - col : PANEL, wide = n - col < width ? n - col : width;
  if (down != 1) {
    for (int64_t i = 0; i < k; i++) for (int64_t j = 0; j < wide; j++) to[i * width + j] = from[i * down + (col + j) * right];
  } else { /* so that lines whose distance is a power of two do not push each other out of the cache */
    enum { SIDE = 16 };
    for (int64_t i = 0; i < k; i += SIDE) for (int64_t j = 0; j < wide; j += SIDE) {
      const real* square = from + i + (col + j) * right;
      real* copy = to + i * width + j;
      if (k - i >= SIDE && wide - j >= SIDE) {
        for (int q = 0; q < SIDE; q++) for (int p = 0; p < SIDE; p++) copy[q * width + p] = square[p * right + q];
      } else {
        for (int q = 0; q < SIDE && q < k - i; q++) for (int p = 0; p < SIDE && p < wide - j; p++) copy[q * width + p] = square[p * right + q];
      }
    }
  }
  for (int64_t i = 0; wide < width && i < k; i++) for (int64_t j = wide; j < width; j++) to[i * width + j] = 0;
}
/* Blocks of several matrices: of each, which matrix, its first entry, steps down and right, k, n, and where it goes. Of all
   their panels, one after the other, this is number `me` of every `members`. */
void pack_all(const int64_t* blocks, int64_t count, const real** matrices, real* to, int64_t me, int64_t members) {
  int64_t number = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t* b = blocks + 7 * i;
    for (int64_t col = 0; col < PAD(b[5]); col += PANEL, number++)
      if (number % members == me) pack(matrices[b[0]] + b[1], b[2], b[3], b[4], b[5], col, to + b[6] + col * b[4]);
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

/* The gradient of a matrix goes in blocks: LINES lines, OUTER_ROWS columns of A and PANEL columns of B, each copied to where it
   lies without gaps. Read in place, lines whose distance is a power of two would push each other out of the cache. */
enum { LINES = 256, GROUP = 6, GROUPS = 16, OUTER_ROWS = GROUP * GROUPS };

/* to [GROUP, N vectors] = A^T B for a copied A [lines, GROUP] and B [lines, N vectors], all sums in registers. */
#define OUTER(N) \
static void outer_##N(const real* a, const real* b, int64_t lines, real* to) { \
  vec sum[GROUP][N]; \
  for (int r = 0; r < GROUP; r++) for (int j = 0; j < N; j++) sum[r][j] = (vec){0}; \
  for (int64_t line = 0; line < lines; line++, a += GROUP, b += N * V) { \
    vec x[N]; \
    for (int j = 0; j < N; j++) x[j] = *(const vec*)(b + j * V); \
    for (int r = 0; r < GROUP; r++) { \
      const real s = a[r]; \
      for (int j = 0; j < N; j++) sum[r][j] += s * x[j]; \
    } \
  } \
  for (int r = 0; r < GROUP; r++) for (int j = 0; j < N; j++) *(vec*)(to + (r * N + j) * V) = sum[r][j]; \
}
OUTER(1)
OUTER(2)
#if WIDE_PANEL
OUTER(3)
OUTER(4)
#endif
typedef void (*Outer)(const real*, const real*, int64_t, real*);

/* Columns of A, in groups, padded with zeros. */
static void copy_groups(const real* a, int64_t lda, int64_t lines, int64_t columns, real* to) {
  for (int64_t i = 0; i < columns; i += GROUP) {
    const int64_t some = columns - i < GROUP ? columns - i : GROUP;
    for (int64_t line = 0; line < lines; line++, to += GROUP) {
      const real* from = a + line * lda + i;
      if (some == GROUP) for (int r = 0; r < GROUP; r++) to[r] = from[r];
      else for (int r = 0; r < GROUP; r++) to[r] = r < some ? from[r] : 0;
    }
  }
}

/* C [n, k] += scale * A^T B for A [lines, n] and B [lines, k]: the gradient of a matrix. What a block of lines adds up to is
   added in one go, which also keeps long sums exact. */
void outer(const real* a, int64_t lda, const real* b, int64_t ldb, int64_t lines, int64_t n, int64_t k, real* c, int64_t ldc, double scale) {
  static const Outer micro[] = {
    outer_1, outer_2,
#if WIDE_PANEL
    outer_3, outer_4,
#endif
  };
  _Alignas(64) real rows[OUTER_ROWS * LINES], columns[PANEL * LINES], sum[GROUP * PANEL];
  const real factor = scale;
  const int64_t blocks = (lines + LINES - 1) / LINES; /* of nearly equal size */
  for (int64_t block = 0; block < blocks; block++) {
    const int64_t line = lines * block / blocks, some = lines * (block + 1) / blocks - line;
    for (int64_t i0 = 0; i0 < n; i0 += OUTER_ROWS) {
      const int64_t i1 = n - i0 < OUTER_ROWS ? n : i0 + OUTER_ROWS;
      copy_groups(a + line * lda + i0, lda, some, i1 - i0, rows);
      for (int64_t j0 = 0; j0 < k; j0 += PANEL) {
        const int64_t wide = k - j0 < PANEL ? k - j0 : PANEL, width = PAD(wide);
        for (int64_t q = 0; q < some; q++) {
          memcpy(columns + q * width, b + (line + q) * ldb + j0, sizeof(real) * wide);
          for (int64_t j = wide; j < width; j++) columns[q * width + j] = 0;
        }
        for (int64_t i = i0; i < i1; i += GROUP) {
          micro[width / V - 1](rows + (i - i0) * some, columns, some, sum);
          for (int64_t r = 0; r < GROUP && i + r < i1; r++)
            for (int64_t j = 0; j < wide; j++) c[(i + r) * ldc + j0 + j] += factor * sum[r * width + j];
        }
      }
    }
  }
}
