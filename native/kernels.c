/* Conversions between number formats and Engram's hash and look-up, bit-identical on every processor (compiled with
   -ffp-contract=off). Plain C; the clear definitions are in quant/reference.py and ops/engram.py, and tests hold them
   together. */

#include "formats.h"
#include "vectors.h"

#define TARGET
#define NAME(function) function##_plain
#if defined(__aarch64__)
#define LOOKUP lookup_nibbles_neon
#define ANY or_nibbles_neon
#else
#define LOOKUP lookup_nibbles_plain
#define ANY or_nibbles_plain
#endif
#define SCALE_EXACTLY scale_exactly_plain
#include "kernels_body.h"
#undef TARGET
#undef NAME
#undef LOOKUP
#undef ANY
#undef SCALE_EXACTLY

#if defined(__x86_64__)
#define TARGET AVX2
#define NAME(function) function##_avx2
#define LOOKUP lookup_nibbles_avx2
#define ANY or_nibbles_avx2
#define SCALE_EXACTLY scale_exactly_avx2
#include "kernels_body.h"
static int plain_only; /* set by tests, so that both versions run on one machine */
#define CALL(function, ...) \
    (!plain_only && __builtin_cpu_supports("avx2") ? function##_avx2(__VA_ARGS__) : function##_plain(__VA_ARGS__))
#else
static int plain_only;
#define CALL(function, ...) function##_plain(__VA_ARGS__)
#endif

#define EXPORT __attribute__((visibility("default")))

EXPORT void dsv41_plain_only(int on) { plain_only = on; }

EXPORT int64_t dsv41_int8_from_mxfp4(const uint8_t *packed, const uint8_t *exponents, int64_t rows, int64_t columns,
                                     int8_t *codes, float *scales) {
    return CALL(int8_from_mxfp4, packed, exponents, rows, columns, codes, scales);
}

EXPORT int64_t dsv41_int8_from_fp8_tiles(const uint8_t *weight, const uint8_t *exponents, int64_t rows,
                                         int64_t columns, int8_t *codes, float *scales) {
    return CALL(int8_from_fp8_tiles, weight, exponents, rows, columns, codes, scales);
}

EXPORT int64_t dsv41_engram_int8_from_fp8(const uint8_t *rows, const uint8_t *exponents, int64_t groups,
                                          int8_t *codes, float *scales) {
    return CALL(engram_int8_from_fp8, rows, exponents, groups, codes, scales);
}

EXPORT int64_t dsv41_float_from_mxfp4(const uint8_t *packed, const uint8_t *exponents, int64_t rows, int64_t columns,
                                      float *values) {
    return CALL(float_from_mxfp4, packed, exponents, rows, columns, values);
}

EXPORT int64_t dsv41_float_from_fp8(const uint8_t *weight, const uint8_t *exponents, int64_t rows, int64_t columns,
                                    int64_t tile_rows, float *values) {
    return CALL(float_from_fp8, weight, exponents, rows, columns, tile_rows, values);
}

EXPORT int64_t dsv41_int8_from_float(const float *weight, int64_t rows, int64_t columns, int8_t *codes,
                                     float *scales) {
    return CALL(int8_from_float, weight, rows, columns, codes, scales);
}

EXPORT int64_t dsv41_hadamard(int64_t groups, float *values) { return CALL(hadamard, groups, values); }

EXPORT int64_t dsv41_bf16_from_float(const float *values, int64_t count, uint16_t *out) {
    return CALL(bf16_from_float, values, count, out);
}

EXPORT int64_t dsv41_float_from_bf16(const uint16_t *values, int64_t count, float *out) {
    return CALL(float_from_bf16, values, count, out);
}

EXPORT int64_t dsv41_engram_rows_bf16(const int64_t (*chunks)[2], const int64_t *ids, int64_t count, int64_t rows,
                                      int64_t chunk_rows, int64_t dim, int64_t groups, uint16_t *out) {
    return CALL(engram_rows_bf16, chunks, ids, count, rows, chunk_rows, dim, groups, out);
}

EXPORT int64_t dsv41_engram_rows_float(const int64_t (*chunks)[2], const int64_t *ids, int64_t count, int64_t rows,
                                       int64_t chunk_rows, int64_t dim, int64_t groups, float *out) {
    return CALL(engram_rows_float, chunks, ids, count, rows, chunk_rows, dim, groups, out);
}

EXPORT int64_t dsv41_hash_ngrams(const int64_t *ngrams, const int64_t *multipliers, const int64_t *primes,
                                 const int64_t *offsets, int64_t tokens, int64_t orders, int64_t layers, int64_t heads,
                                 int64_t pad, int64_t *out) {
    return CALL(hash_ngrams, ngrams, multipliers, primes, offsets, tokens, orders, layers, heads, pad, out);
}
