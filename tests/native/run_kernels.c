/* Runs the kernels on cases from standard input: how they are tried on processors that this machine only emulates.
   A case: int64 function, rows, columns, tile_rows; then its inputs. Answered by int64 place, then its outputs. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "../../native/kernels.c"

static void *taken(size_t size) {
    void *data = malloc(size + 1);
    if (!data || fread(data, 1, size, stdin) != size) exit(2);
    return data;
}

static void give(const void *data, size_t size) {
    if (fwrite(data, 1, size, stdout) != size) exit(3);
}

int main(void) {
    int64_t head[4];
    while (fread(head, sizeof head, 1, stdin) == 1) {
        const int64_t rows = head[1], columns = head[2], tile_rows = head[3];
        const size_t count = (size_t)(rows * columns), tiles = (size_t)((columns + GROUP - 1) / GROUP);
        const size_t scale_rows = (size_t)((rows + tile_rows - 1) / tile_rows);
        int8_t *codes = calloc(count + 1, 1);
        float *scales = calloc((size_t)rows * tiles + 1, sizeof(float)), *values = calloc(count + 1, sizeof(float));
        uint16_t *bits = calloc(count + 1, sizeof(uint16_t));
        void *first = NULL, *second = NULL;
        int64_t place = -1;
        switch (head[0]) {
        case 0: /* int8_from_mxfp4 */
            first = taken(count / 2), second = taken(count / GROUP);
            place = dsv41_int8_from_mxfp4(first, second, rows, columns, codes, scales);
            break;
        case 1: /* int8_from_fp8_tiles */
            first = taken(count), second = taken(scale_rows * tiles);
            place = dsv41_int8_from_fp8_tiles(first, second, rows, columns, codes, scales);
            break;
        case 2: /* engram_int8_from_fp8 */
            first = taken(count), second = taken(count / GROUP);
            place = dsv41_engram_int8_from_fp8(first, second, (int64_t)count / GROUP, codes, scales);
            break;
        case 3: /* float_from_mxfp4 */
            first = taken(count / 2), second = taken(count / GROUP);
            place = dsv41_float_from_mxfp4(first, second, rows, columns, values);
            break;
        case 4: /* float_from_fp8 */
            first = taken(count), second = taken(scale_rows * tiles);
            place = dsv41_float_from_fp8(first, second, rows, columns, tile_rows, values);
            break;
        case 5: /* int8_from_float */
            first = taken(count * sizeof(float));
            place = dsv41_int8_from_float(first, rows, columns, codes, scales);
            break;
        case 6: /* bf16_from_float */
            first = taken(count * sizeof(float));
            place = dsv41_bf16_from_float(first, (int64_t)count, bits);
            break;
        case 7: /* float_from_bf16 */
            first = taken(count * sizeof(uint16_t));
            place = dsv41_float_from_bf16(first, (int64_t)count, values);
            break;
        case 8: /* hadamard */
            first = taken(count * sizeof(float));
            memcpy(values, first, count * sizeof(float));
            place = dsv41_hadamard((int64_t)count / GROUP, values);
            break;
        case 9: /* engram_rows_bf16 and _float: tile_rows rows in chunks of 7, columns wide, looked up by rows ids */
        {
            const int64_t groups = columns / GROUP, chunk_count = (tile_rows + 6) / 7;
            int64_t (*chunks)[2] = malloc((size_t)chunk_count * sizeof *chunks);
            first = taken((size_t)(tile_rows * (columns + groups * 4))), second = taken((size_t)rows * sizeof(int64_t));
            for (int64_t chunk = 0; chunk < chunk_count; chunk++) {
                chunks[chunk][0] = (int64_t)(uintptr_t)((char *)first + chunk * 7 * columns);
                chunks[chunk][1] = (int64_t)(uintptr_t)((char *)first + tile_rows * columns + chunk * 7 * groups * 4);
            }
            place = dsv41_engram_rows_bf16((const int64_t (*)[2])chunks, second, rows, tile_rows, 7, columns, groups, bits);
            dsv41_engram_rows_float((const int64_t (*)[2])chunks, second, rows, tile_rows, 7, columns, groups, values);
            free(chunks);
            break;
        }
        case 10: /* hash_ngrams: rows tokens of 4 ids, columns (a multiple of 3) hashes each, into codes */
            first = taken((size_t)(rows * 4) * sizeof(int64_t)), second = taken((size_t)(4 + 2 * columns) * sizeof(int64_t));
            free(codes), codes = calloc(count * 8 + 1, 1);
            place = dsv41_hash_ngrams(first, second, (int64_t *)second + 4, (int64_t *)second + 4 + columns, rows, 4, 1,
                                      columns / 3, 2, (int64_t *)codes);
            memcpy(values, codes, count * sizeof(float)), memcpy(bits, codes, count * sizeof(uint16_t));
            break;
        default:
            return 4;
        }
        give(&place, sizeof place);
        give(codes, count), give(scales, (size_t)rows * tiles * sizeof(float));
        give(values, count * sizeof(float)), give(bits, count * sizeof(uint16_t));
        free(codes), free(scales), free(values), free(bits), free(first), free(second);
    }
    return 0;
}
