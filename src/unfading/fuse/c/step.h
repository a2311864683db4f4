/* What the loops of every kernel stand on: exp, tanh and sigmoid without branches or calls, which the compiler can compute for
   whole vectors, and in float also expm1, log, log1p and erf. Compiled after layout.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* A product of `products.c`: columns from..to of C [m, PAD(n)] = sum over parts of A [m, k] B [k, n]. */
typedef void (*Product)(const Part* part, int parts, int m, int n, real* c, int from, int to);

/* a * b + c with one rounding where the processor has it. The compiler itself joins no product with a sum (compiler.py). */
#ifdef __FP_FAST_FMAF
#define FMA_F(a, b, c) __builtin_fmaf(a, b, c)
#define TANH_LIMIT 7.99881172180175781f /* from here on tanh_f is 1, in this rounding */
#else
#define FMA_F(a, b, c) ((a) * (b) + (c))
#define TANH_LIMIT 7.90531110763549805f
#endif
#ifdef __FP_FAST_FMA
#define FMA_D(a, b, c) __builtin_fma(a, b, c)
#else
#define FMA_D(a, b, c) ((a) * (b) + (c))
#endif

/* exp(x) / 2^n - 1 for n the whole number nearest to x / log(2). */
INLINE float expm1_rest(float x, float n) {
  const float r = FMA_F(n, 2.12194440e-4f, FMA_F(n, -0.693359375f, x));
  float p = FMA_F(1.9875691500e-4f, r, 1.3981999507e-3f);
  p = FMA_F(p, r, 8.3334519073e-3f); p = FMA_F(p, r, 4.1665795894e-2f);
  p = FMA_F(p, r, 1.6666665459e-1f); p = FMA_F(p, r, 5.0000001201e-1f);
  return FMA_F(p * r, r, r);
}
INLINE float exp_rest(float x, float n) { return expm1_rest(x, n) + 1.f; }
/* 2^n in two factors, so that results below the normal range come out as they should. */
INLINE float exp_f(float x) {
  const float at = x > 89.f ? 89.f : (x >= -104.f ? x : -104.f);
  const float n = __builtin_rintf(at * 1.44269504f), p = exp_rest(at, n);
  const int32_t whole = (int32_t)n, half = whole >> 1;
  union { int32_t i; float f; } a, b;
  a.i = (half + 127) << 23; b.i = (whole - half + 127) << 23;
  return x != x ? x : p * a.f * b.f;
}
/* exp(x) - 1: with n as above, 2^n (exp(x) / 2^n - 1) + (2^n - 1), here in halves, which do not overflow too early. */
INLINE float expm1_f(float x) {
  const float at = x > 89.f ? 89.f : (x >= -18.f ? x : -18.f), n = __builtin_rintf(at * 1.44269504f);
  union { int32_t i; float f; } half;
  half.i = ((int32_t)n + 126) << 23;
  /* x itself near zero, where a zero keeps its sign and no product of a denormal number is rounded */
  return x != x || (x > -1e-8f && x < 1e-8f) ? x : 2.f * FMA_F(expm1_rest(at, n), half.f, half.f - 0.5f);
}
INLINE double exp_d(double x) {
  const double at = x > 710. ? 710. : (x >= -746. ? x : -746.);
  const double n = __builtin_rint(at * 1.4426950408889634074);
  const double r = FMA_D(n, -1.42860682030941723212e-6, FMA_D(n, -6.93145751953125e-1, at)), q = r * r;
  const double px = r * FMA_D(FMA_D(1.26177193074810590878e-4, q, 3.02994407707441961300e-2), q, 9.99999999999999999910e-1);
  const double qx = FMA_D(FMA_D(FMA_D(3.00198505138664455042e-6, q, 2.52448340349684104192e-3), q, 2.27265548208155028766e-1), q, 2.);
  const int32_t whole = (int32_t)n;  /* AVX2 converts to 32 bits only */
  const int64_t half = whole >> 1;
  union { int64_t i; double f; } a, b;
  a.i = (half + 1023) << 52; b.i = (whole - half + 1023) << 52;
  return x != x ? x : FMA_D(2., px / (qx - px), 1.) * a.f * b.f;
}
/* log(1 + f) - f + k log(2) + c for f in [sqrt(1/2) - 1, sqrt(2) - 1]: a series in s = f / (2 + f), since
   log(1 + f) = 2 artanh(s) = f - s (f - 2/3 s^2 - 2/5 s^4 - ...), ordered so that the large terms are added last. */
INLINE float log_rest(float f, float k, float c) {
  const float s = f / (2.f + f), z = s * s, half = 0.5f * f * f;
  float p = FMA_F(2.f / 11.f, z, 2.f / 9.f);
  p = FMA_F(p, z, 2.f / 7.f); p = FMA_F(p, z, 2.f / 5.f); p = FMA_F(p, z, 2.f / 3.f);
  return FMA_F(s, FMA_F(p, z, half), FMA_F(k, 9.0580006145e-6f, c)) - half;
}
/* x = 2^k (1 + f) for a normal number x > 0; returns f. */
INLINE float log_parts(float x, float* k) {
  union { float f; uint32_t i; } a, m;
  a.f = x;
  const uint32_t from = a.i - 0x3f3504f3; /* sqrt(1/2) */
  *k = (float)((int32_t)from >> 23);
  m.i = (from & 0x7fffff) + 0x3f3504f3;
  return m.f - 1.f;
}
#define LOG_2 6.9313812256e-1f /* log(2) less 9.06e-6, with so few bits that its product with k is exact */
INLINE float log_f(float x) {
  float k;
  const int small = x < 1.17549435e-38f;
  const float f = log_parts(small ? x * 33554432.f : x, &k), powers = small ? k - 25.f : k;
  const float y = powers * LOG_2 + (f + log_rest(f, powers, 0.f));
  return x > 0.f && x < INFINITY ? y : (x == 0.f ? -INFINITY : (x < 0.f ? NAN : x));
}
/* log(u) + c / u for u = 1 + x in float, and c what that sum has lost. */
INLINE float log1p_f(float x) {
  float k;
  const float u = 1.f + x, c = (u < 2.f ? x - (u - 1.f) : 1.f - (u - x)) / u, f = log_parts(u, &k);
  const float y = k * LOG_2 + (f + log_rest(f, k, c));
  const int zero = x > -1e-8f && x < 1e-8f; /* x itself, where a zero keeps its sign */
  return zero ? x : (x > -1.f && x < INFINITY ? y : (x == -1.f ? -INFINITY : (x < -1.f ? NAN : x)));
}
/* x P(x^2) up to 1, then 1 - exp(-Q(x)), which is 1 from 4 on. P and Q are Chebyshev fits, Q of -log(1 - erf(x)). */
INLINE float erf_f(float x) {
  const float size = __builtin_fabsf(x), at = size < 4.f ? size : 4.f, z = x * x;
  float p = FMA_F(7.882497107e-05f, z, -8.018854991e-04f);
  p = FMA_F(p, z, 5.189311942e-03f); p = FMA_F(p, z, -2.685432880e-02f); p = FMA_F(p, z, 1.128359746e-01f);
  p = FMA_F(p, z, -3.761262690e-01f); p = FMA_F(p, z, 1.283791666e-01f); /* 2 / sqrt(pi) - 1 */
  float q = FMA_F(-1.610240416e-06f, at, 4.551277294e-05f);
  q = FMA_F(q, at, -5.920927580e-04f); q = FMA_F(q, at, 4.736950622e-03f); q = FMA_F(q, at, -2.635512078e-02f);
  q = FMA_F(q, at, 1.099607994e-01f); q = FMA_F(q, at, 6.319562414e-01f); q = FMA_F(q, at, 1.130155102e+00f);
  q = FMA_F(q, at, -3.002688220e-04f);
  const float far = 1.f - exp_f(-q);
  return size < 1.f || x != x ? FMA_F(p, x, x) : (x < 0.f ? -far : far);
}
INLINE float tanh_f(float x) {
  const float limit = TANH_LIMIT, at = x < -limit ? -limit : (x > limit ? limit : x), q = at * at;
  float p = FMA_F(-2.76076847742355e-16f, q, 2.00018790482477e-13f);
  p = FMA_F(p, q, -8.60467152213735e-11f); p = FMA_F(p, q, 5.12229709037114e-08f);
  p = FMA_F(p, q, 1.48572235717979e-05f); p = FMA_F(p, q, 6.37261928875436e-04f); p = FMA_F(p, q, 4.89352455891786e-03f);
  float d = FMA_F(1.19825839466702e-06f, q, 1.18534705686654e-04f);
  d = FMA_F(d, q, 2.26843463243900e-03f); d = FMA_F(d, q, 4.89352518554385e-03f);
  return at * p / d;
}
INLINE double tanh_d(double x) {
  const double q = x * x;
  const double p = FMA_D(FMA_D(-9.64399179425052238628e-1, q, -9.92877231001918586564e1), q, -1.61468768441708447952e3);
  const double d = FMA_D(FMA_D(q + 1.12811678491632931402e2, q, 2.23548839060100448583e3), q, 4.84406305325125486048e3);
  const double size = x < 0 ? -x : x, far = 1. - 2. / (1. + exp_d(2. * size));
  const double near = x == 0. ? x : FMA_D(x * q, p / d, x); /* zero keeps its sign */
  return size < 0.625 ? near : (x < 0 ? -far : far);
}
/* 1 / (1 + exp(-x)). Where 1 is added, the factors 2 and 2^(n - 1) suffice. NaN stays NaN in the rest of the exponential. */
INLINE float sigmoid_f(float x) {
  const float at = x > 87.f ? -87.f : (x < -89.f ? 89.f : -x), n = __builtin_rintf(at * 1.44269504f);
  union { int32_t i; float f; } a;
  a.i = ((int32_t)n + 126) << 23;
  return 1.f / (1.f + 2.f * exp_rest(at, n) * a.f);
}
INLINE double sigmoid_d(double x) { return 1. / (1. + exp_d(-x)); }
