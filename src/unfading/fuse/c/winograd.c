/* Convolutions with kernels of 3 x 3 pixels that keep the size of their frames, by the minimal filtering of Winograd (Lavin and
   Gray 2016, F(2x2, 3x3)): 16 products per 2 x 2 pixels and pair of channels, where the sum that defines a convolution has 36.

       out = A^T (sum over channels of (B^T in B) * (G kernel G^T)) A         for every tile of 2 x 2 pixels
       B^T = [1 0 -1 0; 0 1 1 0; 0 -1 1 0; 0 1 0 -1]      A^T = [1 1 1 0; 0 1 -1 -1]

   A frame has a border of zeros, one pixel wide. The kernels come transformed, as 16 matrices (frames/convolver.py). Pixels lie in
   memory with their channels side by side: [B, height, width, channels]. Each of the 16 products of a block of tiles is a matrix
   product of `products.c`, in which several inputs with their own kernels are summed. The gradient of the kernels is a sum over
   all tiles of (A d A^T) (B^T in B), again 16 matrix products, transformed back once after the loop over time.
   Compiled after layout.h. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3") /* the arrays of a transform stay in registers only where every inner loop is unrolled */
#endif
#include <stdlib.h>
#include <string.h>

/* The distance of the 16 matrices: not a multiple of 4096 bytes, at which they would push each other out of the cache. */
#define DISTANCE(numbers) (PAD(numbers) + 64 / (int64_t)sizeof(real))

typedef void (*Product)(const Part* part, int parts, int m, int n, real* c, int from, int to);
typedef void (*Outer)(const real*, int64_t, const real*, int64_t, int64_t, int64_t, int64_t, real*, int64_t, double);

/* The pixels of frames, or of their gradient. */
typedef struct { const real* pixels; int64_t channels; real* matrices; int64_t size; /* of one of the 16 matrices */ } Source;
typedef struct {
  void* function; /* Product or Outer */
  int64_t B, height, width, channels; /* of the result, or of its gradient */
  real* pixels;
  int64_t block; /* tiles that are transformed together */
  int64_t add; /* whether the result is added to what is in pixels */
  int64_t sources;
  Source source[];
} Call;

/* Where a tile begins: its row of the batch and its first pixel. */
typedef struct { int64_t b, y, x; } Place;
static inline Place place(const Call* call, int64_t tile) {
  const int64_t across = (call->width + 1) / 2, down = (call->height + 1) / 2, row = tile / across;
  return (Place){row / down, row % down * 2, tile % across * 2};
}

/* B^T in B of one tile: `to` has 16 matrices at a distance. Pixels of the border are read from `zeros`. */
static void enter(const Call* call, const real* pixels, int64_t n, Place at, const real* zeros, real* to, int64_t distance) {
  const real* p[4][4];
  for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) {
    const int64_t y = at.y + i - 1, x = at.x + j - 1;
    const int inside = y >= 0 && y < call->height && x >= 0 && x < call->width;
    p[i][j] = inside ? pixels + ((at.b * call->height + y) * call->width + x) * n : zeros;
  }
#pragma omp simd
  for (int64_t c = 0; c < n; c++) {
    real r[4][4];
    for (int j = 0; j < 4; j++) {
      const real a = p[0][j][c], b = p[1][j][c], d = p[2][j][c], e = p[3][j][c];
      r[0][j] = a - d; r[1][j] = b + d; r[2][j] = d - b; r[3][j] = b - e;
    }
    for (int i = 0; i < 4; i++) {
      real* line = to + 4 * i * distance + c;
      line[0] = r[i][0] - r[i][2]; line[distance] = r[i][1] + r[i][2];
      line[2 * distance] = r[i][2] - r[i][1]; line[3 * distance] = r[i][1] - r[i][3];
    }
  }
}

/* The four pixels of a tile; `spare` for one outside the frame. */
static void pixels_of(const Call* call, Place at, real* spare, real* p[4]) {
  for (int i = 0; i < 2; i++) for (int j = 0; j < 2; j++) {
    const int inside = at.y + i < call->height && at.x + j < call->width;
    p[2 * i + j] = inside ? call->pixels + ((at.b * call->height + at.y + i) * call->width + at.x + j) * call->channels : spare;
  }
}

/* A^T m A of one tile. */
static void leave(const Call* call, Place at, const real* m, int64_t distance, real* spare) {
  real* p[4];
  pixels_of(call, at, spare, p);
  const int add = call->add;
#pragma omp simd
  for (int64_t c = 0; c < call->channels; c++) {
    real r[2][4];
    for (int j = 0; j < 4; j++) {
      const real *of = m + j * distance + c, b = of[4 * distance], d = of[8 * distance];
      r[0][j] = of[0] + b + d; r[1][j] = b - d - of[12 * distance];
    }
    const real a = r[0][0] + r[0][1] + r[0][2], b = r[0][1] - r[0][2] - r[0][3];
    const real d = r[1][0] + r[1][1] + r[1][2], e = r[1][1] - r[1][2] - r[1][3];
    p[0][c] = add ? p[0][c] + a : a; p[1][c] = add ? p[1][c] + b : b;
    p[2][c] = add ? p[2][c] + d : d; p[3][c] = add ? p[3][c] + e : e;
  }
}

/* A d A^T of one tile, for the channels from..to. */
static void spread(const Call* call, Place at, real* zeros, int64_t from, int64_t n, real* to, int64_t distance) {
  real* p[4];
  pixels_of(call, at, zeros - from, p);
#pragma omp simd
  for (int64_t c = 0; c < n; c++) {
    real r[4][2];
    for (int j = 0; j < 2; j++) {
      const real a = p[j][from + c], b = p[2 + j][from + c];
      r[0][j] = a; r[1][j] = a + b; r[2][j] = a - b; r[3][j] = -b;
    }
    for (int i = 0; i < 4; i++) {
      real* line = to + 4 * i * distance + c;
      line[0] = r[i][0]; line[distance] = r[i][0] + r[i][1];
      line[2 * distance] = r[i][0] - r[i][1]; line[3 * distance] = -r[i][1];
    }
  }
}

static int64_t tiles_of(const Call* call) { return call->B * ((call->height + 1) / 2) * ((call->width + 1) / 2); }
static int64_t most_channels(const Call* call) {
  int64_t most = call->channels;
  for (int i = 0; i < call->sources; i++) if (call->source[i].channels > most) most = call->source[i].channels;
  return most;
}
static real* memory_for(int64_t numbers, int64_t zeros) {
  real* memory = aligned_alloc(64, (sizeof(real) * (numbers + zeros) + 127) / 64 * 64);
  if (memory) memset(memory, 0, sizeof(real) * zeros);
  return memory;
}

/* pixels = the sum over sources of their convolutions: every `members`-th block of tiles. */
int convolve(const Call* call, int me, int members) {
  const Product product = (Product)call->function;
  const int64_t tiles = tiles_of(call), n = PAD(call->channels), most = PAD(most_channels(call));
  int64_t width = n;
  for (int i = 0; i < call->sources; i++) width += PAD(call->source[i].channels);
  real* zeros = memory_for(16 * (call->block * width + (1 + call->sources) * DISTANCE(0)), 2 * most);
  if (!zeros) return 1;
  real *spare = zeros + most, *sums = zeros + 2 * most;
  const int64_t apart = DISTANCE(call->block * n);
  for (int64_t start = me * call->block; start < tiles; start += members * call->block) {
    const int64_t count = tiles - start < call->block ? tiles - start : call->block;
    Part part[call->sources];
    real* at = sums + 16 * apart;
    for (int i = 0; i < call->sources; i++) {
      const Source* source = call->source + i;
      const int64_t m = source->channels, distance = DISTANCE(call->block * m);
      for (int64_t k = 0; k < count; k++) enter(call, source->pixels, m, place(call, start + k), zeros, at + k * m, distance);
      part[i] = (Part){at, m, source->matrices, m};
      at += 16 * distance;
    }
    for (int q = 0; q < 16; q++) {
      product(part, call->sources, count, call->channels, sums + q * apart, 0, n);
      for (int i = 0; i < call->sources; i++) {
        part[i].a += DISTANCE(call->block * call->source[i].channels);
        part[i].b += call->source[i].size;
      }
    }
    for (int64_t k = 0; k < count; k++) leave(call, place(call, start + k), sums + k * n, apart, spare);
  }
  free(zeros);
  return 0;
}

/* matrices += the gradient of the transformed kernels of every source, where pixels is the gradient of the result: the rows of a
   member, which are those of some channels. */
int kernel_gradient(const Call* call, int me, int members) {
  const Outer outer = (Outer)call->function;
  const int64_t tiles = tiles_of(call), groups = (call->channels + V - 1) / V;
  const int64_t from = groups * me / members * V, end = groups * (me + 1) / members * V;
  const int64_t n = (end < call->channels ? end : call->channels) - from, most = PAD(most_channels(call));
  if (n <= 0) return 0;
  int64_t widest = 0;
  for (int i = 0; i < call->sources; i++) if (call->source[i].channels > widest) widest = call->source[i].channels;
  real* zeros = memory_for(16 * (DISTANCE(call->block * n) + DISTANCE(call->block * widest)), most);
  if (!zeros) return 1;
  const int64_t apart = DISTANCE(call->block * n);
  real *d = zeros + most, *in = d + 16 * apart;
  for (int64_t start = 0; start < tiles; start += call->block) {
    const int64_t count = tiles - start < call->block ? tiles - start : call->block;
    for (int64_t k = 0; k < count; k++) spread(call, place(call, start + k), zeros, from, n, d + k * n, apart);
    for (int i = 0; i < call->sources; i++) {
      const Source* source = call->source + i;
      const int64_t m = source->channels, distance = DISTANCE(call->block * m);
      for (int64_t k = 0; k < count; k++) enter(call, source->pixels, m, place(call, start + k), zeros, in + k * m, distance);
      for (int q = 0; q < 16; q++)
        outer(d + q * apart, n, in + q * distance, m, count, n, m, source->matrices + q * source->size + from * m, m, 1.0);
    }
  }
  free(zeros);
  return 0;
}
