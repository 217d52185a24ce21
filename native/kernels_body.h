/* Bodies of the kernels, included once per instruction set with
     TARGET          function attribute of the set,
     NAME(function)  the function's name in the set,
     LOOKUP, ANY, SCALE_EXACTLY   lookup_nibbles, or_nibbles and scale_exactly of the set.
   The conversions return -1, or the index of the first element (in row-major order of its group or tile) that is not
   finite. Two passes per row: the first finds the largest magnitude, the second writes; the row stays in the first-level cache. */

/* Magnitudes of E2M1, doubled: integers, so that the largest of a group is one bit scan away. */
static const uint8_t NAME(doubled)[8] = {0, 1, 2, 3, 4, 6, 8, 12};
static const uint8_t NAME(one_hot)[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};

/* The first group whose scale is NaN or whose values pass float's range; -1 if there is none. */
static int64_t NAME(bad_mxfp4_group)(const uint8_t *packed, const uint8_t *exponents, int64_t groups) {
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t any = ANY(NAME(one_hot), packed + group * (GROUP / 2));
        const float largest = 0.5f * NAME(doubled)[31 - __builtin_clz(any)] * e8m0(exponents[group]);
        if (exponents[group] == E8M0_NAN || largest > FLT_MAX) return group;
    }
    return -1;
}

TARGET static int64_t NAME(int8_from_mxfp4)(const uint8_t *packed, const uint8_t *exponents, int64_t rows,
                                            int64_t columns, int8_t *codes, float *scales) {
    const int64_t groups = columns / GROUP;
    int8_t table[256][16];  /* codes of the 16 FP4 values, for each scale that the row uses */
    int64_t table_row[256]; /* the row it was made for */
    float magnitude[256];   /* the largest of a group, from the set of magnitudes that occur in it */
    memset(table_row, 0xff, sizeof table_row);
    for (int set = 1; set < 256; set++) magnitude[set] = 0.5f * NAME(doubled)[31 - __builtin_clz(set)];
    for (int64_t row = 0; row < rows; row++, packed += columns / 2, exponents += groups, codes += columns) {
        float absmax = 0.0f;
        for (int64_t group = 0; group < groups; group++) {
            const uint8_t any = ANY(NAME(one_hot), packed + group * (GROUP / 2));
            absmax = larger(absmax, magnitude[any] * e8m0(exponents[group]));
        }
        if (absmax > FLT_MAX || memchr(exponents, E8M0_NAN, (size_t)groups))
            return row * columns + GROUP * NAME(bad_mxfp4_group)(packed, exponents, groups);
        const float scale = scales[row] = channel_scale(absmax), divisor = scale > 0.0f ? scale : 1.0f;
        for (int64_t group = 0; group < groups; group++) {
            const uint8_t exponent = exponents[group];
            if (table_row[exponent] != row) {
                table_row[exponent] = row;
                for (int code = 0; code < 8; code++) {
                    const float value = 0.5f * NAME(doubled)[code] * e8m0(exponent);
                    table[exponent][code] = value <= absmax ? int8_code(value, divisor) : 0; /* larger: not in the row */
                    table[exponent][code + 8] = (int8_t)-table[exponent][code];
                }
            }
            LOOKUP(table[exponent], packed + group * (GROUP / 2), codes + group * GROUP);
        }
    }
    return -1;
}

/* The largest E4M3 magnitude byte; 0x7f, which is NaN, wins over all. */
TARGET static inline uint8_t NAME(largest_byte)(const uint8_t *bytes, int64_t count) {
    uint8_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint8_t magnitude = bytes[i] & 0x7f;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* Largest magnitude of a row of tiles, or the column of the first tile that is not finite in `bad`. */
TARGET static inline float NAME(row_absmax)(const uint8_t *weight, const uint8_t *exponents, int64_t columns,
                                            int64_t *bad) {
    float absmax = 0.0f;
    for (int64_t column = 0; column < columns; column += GROUP) {
        const uint8_t exponent = exponents[column / GROUP];
        const int64_t count = columns - column < GROUP ? columns - column : GROUP;
        const uint8_t byte = count == GROUP ? NAME(largest_byte)(weight + column, GROUP)
                                            : NAME(largest_byte)(weight + column, count);
        const float largest = e4m3_magnitude(byte) * e8m0(exponent);
        if (byte == FP8_NAN || exponent == E8M0_NAN || largest > FLT_MAX) {
            *bad = column;
            return largest;
        }
        absmax = larger(absmax, largest);
    }
    return absmax;
}

TARGET static int64_t NAME(int8_from_fp8_tiles)(const uint8_t *weight, const uint8_t *exponents, int64_t rows,
                                                int64_t columns, int8_t *codes, float *scales) {
    const int64_t tiles = (columns + GROUP - 1) / GROUP;
    for (int64_t row = 0; row < rows; row++, weight += columns, codes += columns) {
        const uint8_t *const row_exponents = exponents + row / GROUP * tiles;
        int64_t bad = -1;
        const float absmax = NAME(row_absmax)(weight, row_exponents, columns, &bad);
        if (bad >= 0) return row * columns + bad;
        const float scale = scales[row] = channel_scale(absmax), divisor = scale > 0.0f ? scale : 1.0f;
        for (int64_t tile = 0; tile < tiles; tile++) {
            const float factor = e8m0(row_exponents[tile]);
            const int64_t begin = tile * GROUP, end = begin + GROUP < columns ? begin + GROUP : columns;
            if (end - begin == GROUP)
                for (int i = 0; i < GROUP; i++)
                    codes[begin + i] = int8_code(e4m3(weight[begin + i]) * factor, divisor);
            else
                for (int64_t i = begin; i < end; i++) codes[i] = int8_code(e4m3(weight[i]) * factor, divisor);
        }
    }
    return -1;
}

TARGET static int64_t NAME(engram_int8_from_fp8)(const uint8_t *rows, const uint8_t *exponents, int64_t groups,
                                                 int8_t *codes, float *scales) {
    float inverse[128], step[128]; /* 1 / scale and scale of a group whose own scale is 1, by its largest byte */
    for (int byte = 0; byte < 128; byte++) {
        step[byte] = engram_scale(e4m3_magnitude((uint8_t)byte));
        inverse[byte] = 1.0f / step[byte];
    }
    for (int64_t group = 0; group < groups; group++, rows += GROUP, codes += GROUP) {
        const uint8_t byte = NAME(largest_byte)(rows, GROUP), exponent = exponents[group];
        if (byte == FP8_NAN || exponent == E8M0_NAN) return group * GROUP;
        if (exponent > 32 && exponent < 224) { /* every quantity is a normal number: the scale only shifts */
            const float factor = inverse[byte];
            scales[group] = byte ? step[byte] * e8m0(exponent) : 1.0f;
            for (int i = 0; i < GROUP; i++) codes[i] = (int8_t)nearest(e4m3(rows[i]) * factor);
            continue;
        }
        const float largest = e4m3_magnitude(byte) * e8m0(exponent);
        if (largest > FLT_MAX) return group * GROUP;
        const float scale = scales[group] = engram_scale(largest);
        for (int i = 0; i < GROUP; i++) codes[i] = int8_code(e4m3(rows[i]) * e8m0(exponent), scale);
    }
    return -1;
}

TARGET static int64_t NAME(float_from_mxfp4)(const uint8_t *packed, const uint8_t *exponents, int64_t rows,
                                             int64_t columns, float *values) {
    const int64_t groups = rows * columns / GROUP, bad = NAME(bad_mxfp4_group)(packed, exponents, groups);
    if (bad >= 0) return bad * GROUP;
    for (int64_t group = 0; group < groups; group++, packed += GROUP / 2, values += GROUP) {
        float table[16];
        for (int code = 0; code < 8; code++) {
            table[code] = 0.5f * NAME(doubled)[code] * e8m0(exponents[group]);
            table[code + 8] = -table[code];
        }
        for (int i = 0; i < GROUP / 2; i++) {
            values[2 * i] = table[packed[i] & 15];
            values[2 * i + 1] = table[packed[i] >> 4];
        }
    }
    return -1;
}

/* tile_rows: 32 for dense weights, 1 for Engram rows. */
TARGET static int64_t NAME(float_from_fp8)(const uint8_t *weight, const uint8_t *exponents, int64_t rows,
                                           int64_t columns, int64_t tile_rows, float *values) {
    const int64_t tiles = (columns + GROUP - 1) / GROUP;
    for (int64_t row = 0; row < rows; row++, weight += columns, values += columns) {
        const uint8_t *const row_exponents = exponents + row / tile_rows * tiles;
        int64_t bad = -1;
        NAME(row_absmax)(weight, row_exponents, columns, &bad);
        if (bad >= 0) return row * columns + bad;
        for (int64_t tile = 0; tile < tiles; tile++) {
            const float factor = e8m0(row_exponents[tile]);
            const int64_t begin = tile * GROUP, end = begin + GROUP < columns ? begin + GROUP : columns;
            for (int64_t i = begin; i < end; i++) values[i] = e4m3(weight[i]) * factor;
        }
    }
    return -1;
}

TARGET static int64_t NAME(int8_from_float)(const float *weight, int64_t rows, int64_t columns, int8_t *codes,
                                            float *scales) {
    for (int64_t row = 0; row < rows; row++, weight += columns, codes += columns) {
        float absmax = 0.0f;
        for (int64_t i = 0; i < columns; i++) {
            const float magnitude = fabsf(weight[i]);
            if (!(magnitude <= FLT_MAX)) return row * columns + i;
            absmax = larger(absmax, magnitude);
        }
        const float scale = scales[row] = channel_scale(absmax), divisor = scale > 0.0f ? scale : 1.0f;
        for (int64_t i = 0; i < columns; i++) codes[i] = int8_code(weight[i], divisor);
    }
    return -1;
}

/* Rounds of the Hadamard transform of 32 values, which compilers unroll and vectorise: one addition a value a round. */
TARGET static int64_t NAME(hadamard)(int64_t groups, float *values) {
    const float root = 5.65685424949238f; /* of 32 */
    for (int64_t group = 0; group < groups; group++, values += GROUP) {
        float from[GROUP], to[GROUP];
        memcpy(from, values, sizeof from);
        for (int half = 1; half < GROUP; half *= 2) {
            for (int i = 0; i < GROUP; i++) to[i] = i & half ? from[i ^ half] - from[i] : from[i] + from[i ^ half];
            memcpy(from, to, sizeof from);
        }
        for (int i = 0; i < GROUP; i++) values[i] = from[i] / root;
    }
    return -1;
}

TARGET static int64_t NAME(bf16_from_float)(const float *values, int64_t count, uint16_t *out) {
    for (int64_t i = 0; i < count; i++) {
        out[i] = bf16(values[i]);
        if (!(fabsf(values[i]) <= FLT_MAX) || (out[i] & 0x7f80) == 0x7f80) return i; /* or rounded up to infinity */
    }
    return -1;
}

TARGET static int64_t NAME(float_from_bf16)(const uint16_t *values, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) {
        if ((values[i] & 0x7f80) == 0x7f80) return i;
        out[i] = float_of_bits((uint32_t)values[i] << 16);
    }
    return -1;
}

/* A code times a power of two has seven significant bits at most: BF16 holds it as it is. Of other products one is NaN
   only where the scale is not finite, which is asked once for all of a group. */
TARGET static ALWAYS_INLINE void NAME(bf16_of_codes)(const int8_t *restrict codes, float scale, int64_t count,
                                              uint16_t *restrict out) {
    const uint32_t bits = bits_of_float(scale);
    if (count == GROUP && !(bits & 0x7fffffu) && (bits >> 23) - 1 < 254u)
        SCALE_EXACTLY(codes, scale, out);
    else if (fabsf(scale) <= FLT_MAX)
        for (int64_t i = 0; i < count; i++) out[i] = bf16((float)codes[i] * scale);
    else
        for (int64_t i = 0; i < count; i++) out[i] = bf16_or_nan((float)codes[i] * scale);
}

TARGET static ALWAYS_INLINE void NAME(float_of_codes)(const int8_t *restrict codes, float scale, int64_t count,
                                               float *restrict out) {
    if (count == GROUP)
        for (int i = 0; i < GROUP; i++) out[i] = (float)codes[i] * scale;
    else
        for (int64_t i = 0; i < count; i++) out[i] = (float)codes[i] * scale;
}

/* Copies rows of a batch to the first-level cache, so that the processor waits for several at once, and fetches later
   ones. (GCC 12 takes a function of nothing but prefetches for one without effect and leaves its calls out.) */
TARGET static ALWAYS_INLINE void NAME(copy_rows)(const int64_t (*chunks)[2], const int64_t *ids, int64_t count,
                                                 int64_t known, int64_t rows, int64_t chunk_rows, int64_t dim,
                                                 int64_t groups, int8_t *restrict codes, float *restrict scales) {
    const int shift = chunk_rows & (chunk_rows - 1) ? -1 : __builtin_ctzll((uint64_t)chunk_rows);
    for (int64_t k = 0; k < count; k++) {
        const int64_t later = k + AHEAD < known ? ids[k + AHEAD] : -1, id = ids[k];
        if ((uint64_t)later < (uint64_t)rows) {
            const int64_t chunk = shift < 0 ? later / chunk_rows : later >> shift, row = later - chunk * chunk_rows;
            const char *const place = (const char *)(uintptr_t)chunks[chunk][0] + row * dim;
            for (int64_t i = 0; i < dim; i += CACHE_LINE) __builtin_prefetch(place + i);
            __builtin_prefetch((const float *)(uintptr_t)chunks[chunk][1] + row * groups);
        }
        if ((uint64_t)id >= (uint64_t)rows) continue;
        const int64_t chunk = shift < 0 ? id / chunk_rows : id >> shift, row = id - chunk * chunk_rows;
        memcpy(codes + k * dim, (const int8_t *)(uintptr_t)chunks[chunk][0] + row * dim, (size_t)dim);
        memcpy(scales + k * groups, (const float *)(uintptr_t)chunks[chunk][1] + row * groups,
               (size_t)groups * sizeof *scales);
    }
}

/* Compiled twice: for the rows of the released model, whose sizes unroll, and for any. */
#define ENGRAM_ROWS(function, type, convert)                                                                           \
    TARGET static ALWAYS_INLINE void NAME(function##_of)(const int64_t(*chunks)[2], const int64_t *ids, int64_t count, \
                                                         int64_t rows, int64_t chunk_rows, int64_t dim, int64_t groups,\
                                                         type *out) {                                                  \
        int8_t codes[LOOKUP_BYTES];                                                                                    \
        float scales[LOOKUP_BYTES];                                                                                    \
        const int64_t size = dim / groups, batch = LOOKUP_BYTES / dim;                                                 \
        for (; count > 0; count -= batch, ids += batch) {                                                              \
            const int64_t now = count < batch ? count : batch;                                                         \
            NAME(copy_rows)(chunks, ids, now, count, rows, chunk_rows, dim, groups, codes, scales);                    \
            for (int64_t k = 0; k < now; k++, out += dim)                                                              \
                if ((uint64_t)ids[k] >= (uint64_t)rows)                                                                \
                    memset(out, 0, (size_t)dim * sizeof *out);                                                         \
                else                                                                                                   \
                    for (int64_t g = 0; g < groups; g++)                                                               \
                        NAME(convert)(codes + k * dim + g * size, scales[k * groups + g], size, out + g * size);       \
        }                                                                                                              \
    }                                                                                                                  \
    TARGET static int64_t NAME(function)(const int64_t(*chunks)[2], const int64_t *ids, int64_t count, int64_t rows,   \
                                         int64_t chunk_rows, int64_t dim, int64_t groups, type *out) {                 \
        if (dim == RELEASED_DIM && groups == RELEASED_DIM / GROUP)                                                     \
            NAME(function##_of)(chunks, ids, count, rows, chunk_rows, RELEASED_DIM, RELEASED_DIM / GROUP, out);        \
        else                                                                                                           \
            NAME(function##_of)(chunks, ids, count, rows, chunk_rows, dim, groups, out);                               \
        return -1;                                                                                                     \
    }

ENGRAM_ROWS(engram_rows_bf16, uint16_t, bf16_of_codes)
ENGRAM_ROWS(engram_rows_float, float, float_of_codes)
#undef ENGRAM_ROWS

/* Rolling exclusive or of wrapping products, reduced by the prime of each head: remainders are never negative. */
TARGET static int64_t NAME(hash_ngrams)(const int64_t *ngrams, const int64_t *multipliers, const int64_t *primes,
                                        const int64_t *offsets, int64_t tokens, int64_t orders, int64_t layers,
                                        int64_t heads, int64_t pad, int64_t *out) {
    const int64_t columns = (orders - 1) * heads;
    for (int64_t layer = 0; layer < layers; layer++) {
        const int64_t *const multiplier = multipliers + layer * orders, *const offset = offsets + layer * columns;
        const int64_t *const prime = primes + layer * columns;
        for (int64_t token = 0; token < tokens; token++, out += columns) {
            const int64_t *const ids = ngrams + token * orders;
            int dead = ids[0] < 0;
            uint64_t rolling = (uint64_t)(dead ? pad : ids[0]) * (uint64_t)multiplier[0];
            for (int64_t back = 1; back < orders; back++) {
                dead |= ids[back] < 0;
                rolling ^= (uint64_t)(dead ? pad : ids[back]) * (uint64_t)multiplier[back];
                for (int64_t column = (back - 1) * heads; column < back * heads; column++) {
                    const int64_t rest = (int64_t)rolling % prime[column];
                    out[column] = rest + (rest < 0 ? prime[column] : 0) + offset[column];
                }
            }
        }
    }
    return -1;
}
