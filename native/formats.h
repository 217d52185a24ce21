/* Scalar values of the formats: FP8 E4M3, FP4 E2M1, E8M0 scales, BF16. */
#ifndef DSV41_FORMATS_H
#define DSV41_FORMATS_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { GROUP = 32, INT8_LIMIT = 127, FP8_NAN = 0x7f, E8M0_NAN = 255, BF16_NAN = 0x7fc0 };
enum { CACHE_LINE = 64, AHEAD = 16 /* rows fetched before their turn */, LOOKUP_BYTES = 8192 /* of codes in a batch */ };
enum { RELEASED_DIM = 256 /* of the released model's Engram rows */ };
#define ALWAYS_INLINE inline __attribute__((always_inline))

static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* b if it is larger, and NaN never is: compiles to one instruction, unlike fmaxf. */
static inline float larger(float a, float b) { return b > a ? b : a; }

/* 2 ** (code - 127); code 0 is subnormal in float, code 255 must have been refused. */
static inline float e8m0(uint8_t code) { return float_of_bits(code ? (uint32_t)code << 23 : 1u << 22); }

/* |value| of an E4M3 byte, without subnormal operands, which cost hundreds of cycles on some processors:
   exponent 0 is built as 2 ** -6 (1 + m / 8) and the 2 ** -6 taken away again. */
static inline float e4m3_magnitude(uint8_t byte) {
    const uint32_t bits = (uint32_t)(byte & 0x7f) << 20;
    const float normal = float_of_bits(bits + (120u << 23)), low = float_of_bits(bits + (121u << 23)) - 0x1p-6f;
    return bits < 1u << 23 ? low : normal;
}

static inline float e4m3(uint8_t byte) {
    return float_of_bits(bits_of_float(e4m3_magnitude(byte)) | (uint32_t)(byte & 0x80) << 24);
}

/* Nearest integer, ties to even, for |value| < 2 ** 22: one addition that vectorises, unlike lrintf. */
static inline int32_t nearest(float value) { return (int32_t)(bits_of_float(value + 0x1.8p23f) - 0x4b400000u); }

static inline int8_t int8_code(float value, float scale) {
    const int32_t code = nearest(value / scale);
    return (int8_t)(code > INT8_LIMIT ? INT8_LIMIT : code < -INT8_LIMIT ? -INT8_LIMIT : code);
}

/* The smallest BF16 number that is not below absmax / 127, 0 for absmax 0. */
static inline float channel_scale(float absmax) {
    if (absmax == 0.0f) return 0.0f;
    uint32_t bits = (bits_of_float(absmax / 127.0f) + 0xffffu) & 0xffff0000u;
    /* the quotient may have been rounded down onto a BF16 number; the product is exact in double */
    if ((double)float_of_bits(bits) * 127.0 < (double)absmax) bits += 0x10000u;
    return float_of_bits(bits);
}

/* 2 ** ceil(log2(absmax / 127)), 1 for absmax 0. */
static inline float engram_scale(float absmax) {
    if (absmax == 0.0f) return 1.0f;
    int exponent;
    const float mantissa = frexpf(absmax / 127.0f, &exponent);
    return ldexpf(1.0f, exponent - (mantissa == 0.5f));
}

/* Of a finite value. */
static inline uint16_t bf16(float value) {
    const uint32_t bits = bits_of_float(value);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* Of any value: NaN must not round into a number. */
static inline uint16_t bf16_or_nan(float value) { return value == value ? bf16(value) : BF16_NAN; }

#endif
