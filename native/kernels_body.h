/* Bodies of the kernels, included once per instruction set with
     TARGET          function attribute of the set,
     NAME(function)  the function's name in the set,
     LOOKUP, ANY     lookup_nibbles and or_nibbles of the set.
   All return -1, or the index of the first element (in row-major order of its group or tile) that is not finite.
   Two passes per row: the first finds the largest magnitude, the second writes; the row stays in the first-level cache. */

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
