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
