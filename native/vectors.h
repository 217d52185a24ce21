/* The few vector operations that compilers do not find by themselves, in two instruction sets and in plain C. */
#ifndef DSV41_VECTORS_H
#define DSV41_VECTORS_H

#include "formats.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* One function per instruction set: GCC and Clang inline only between functions of equal target. */
#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
#endif

/* out[2 i] = table[low nibble of packed[i]], out[2 i + 1] = table[high nibble], for 16 packed bytes. */
static inline void lookup_nibbles_plain(const int8_t table[16], const uint8_t packed[16], int8_t out[32]) {
    for (int i = 0; i < 16; i++) {
        out[2 * i] = table[packed[i] & 15];
        out[2 * i + 1] = table[packed[i] >> 4];
    }
}

/* The bitwise or of table[...] over the 32 nibbles of 16 packed bytes. */
static inline uint8_t or_nibbles_plain(const uint8_t table[16], const uint8_t packed[16]) {
    uint8_t any = 0;
    for (int i = 0; i < 16; i++) any |= table[packed[i] & 15] | table[packed[i] >> 4];
    return any;
}

/* The upper halves of the 32 products, which are exact BF16 numbers. */
static inline void scale_exactly_plain(const int8_t codes[32], float scale, uint16_t out[32]) {
    for (int i = 0; i < 32; i++) out[i] = (uint16_t)(bits_of_float((float)codes[i] * scale) >> 16);
}

static inline uint8_t or_bytes(uint64_t low, uint64_t high) {
    low |= high;
    low |= low >> 32;
    low |= low >> 16;
    return (uint8_t)(low | low >> 8);
}

#if defined(__x86_64__)

AVX2 static inline void lookup_nibbles_avx2(const int8_t table[16], const uint8_t packed[16], int8_t out[32]) {
    const __m128i values = _mm_loadu_si128((const __m128i *)table), mask = _mm_set1_epi8(15);
    const __m128i bytes = _mm_loadu_si128((const __m128i *)packed);
    const __m128i low = _mm_shuffle_epi8(values, _mm_and_si128(bytes, mask));
    const __m128i high = _mm_shuffle_epi8(values, _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
    _mm_storeu_si128((__m128i *)out, _mm_unpacklo_epi8(low, high));
    _mm_storeu_si128((__m128i *)(out + 16), _mm_unpackhi_epi8(low, high));
}

AVX2 static inline uint8_t or_nibbles_avx2(const uint8_t table[16], const uint8_t packed[16]) {
    const __m128i values = _mm_loadu_si128((const __m128i *)table), mask = _mm_set1_epi8(15);
    const __m128i bytes = _mm_loadu_si128((const __m128i *)packed);
    const __m128i low = _mm_shuffle_epi8(values, _mm_and_si128(bytes, mask));
    const __m128i high = _mm_shuffle_epi8(values, _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
    const __m128i any = _mm_or_si128(low, high);
    return or_bytes((uint64_t)_mm_cvtsi128_si64(any), (uint64_t)_mm_extract_epi64(any, 1));
}

AVX2 static inline __m256i upper_halves_avx2(const int8_t codes[8], __m256 scale) {
    const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes));
    return _mm256_srli_epi32(_mm256_castps_si256(_mm256_mul_ps(_mm256_cvtepi32_ps(wide), scale)), 16);
}

AVX2 static inline void scale_exactly_avx2(const int8_t codes[32], float scale, uint16_t out[32]) {
    const __m256 factor = _mm256_set1_ps(scale);
    for (int i = 0; i < 32; i += 16) {
        const __m256i low = upper_halves_avx2(codes + i, factor), high = upper_halves_avx2(codes + i + 8, factor);
        const __m256i mixed = _mm256_packus_epi32(low, high); /* packs within each half of the register */
        _mm256_storeu_si256((__m256i *)(out + i), _mm256_permute4x64_epi64(mixed, 0xd8));
    }
}

#elif defined(__aarch64__)

static inline void lookup_nibbles_neon(const int8_t table[16], const uint8_t packed[16], int8_t out[32]) {
    const int8x16_t values = vld1q_s8(table);
    const uint8x16_t bytes = vld1q_u8(packed);
    int8x16x2_t pair;
    pair.val[0] = vqtbl1q_s8(values, vandq_u8(bytes, vdupq_n_u8(15)));
    pair.val[1] = vqtbl1q_s8(values, vshrq_n_u8(bytes, 4));
    vst2q_s8(out, pair);
}

static inline uint8_t or_nibbles_neon(const uint8_t table[16], const uint8_t packed[16]) {
    const uint8x16_t values = vld1q_u8(table), bytes = vld1q_u8(packed);
    const uint8x16_t low = vqtbl1q_u8(values, vandq_u8(bytes, vdupq_n_u8(15)));
    const uint64x2_t any = vreinterpretq_u64_u8(vorrq_u8(low, vqtbl1q_u8(values, vshrq_n_u8(bytes, 4))));
    return or_bytes(vgetq_lane_u64(any, 0), vgetq_lane_u64(any, 1));
}

#endif
#endif
