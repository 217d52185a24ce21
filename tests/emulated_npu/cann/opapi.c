/* aclnn: the objects that describe arguments, and the two phases of every operator.
 *
 * The entry points themselves are generated (build.py): each saves the argument registers and comes here. Which of
 * them are tensors, numbers or strings only the signature of the operator tells, and the signatures are kept beside
 * the numerics (aclnn/). */
#include "cann.h"
#include <stdlib.h>
#include <string.h>

typedef enum { TENSOR = 1, SCALAR, INTS, BOOLS, FLOATS, TENSORS, SCALARS } Kind;

/* One layout for all, read by Python (aclnn/arguments.py). */
typedef struct {
    int32_t kind, dtype, format, pad;
    uint64_t n;           /* dimensions of a tensor, elements of a list */
    uint64_t storage_n;
    int64_t offset;
    void *data;           /* device address of a tensor's storage */
    int64_t *values;      /* sizes of a tensor, elements of a list (doubles for FLOATS, handles for TENSORS) */
    int64_t *strides;
    int64_t *storage;
    uint8_t scalar[16];
} Object;

static Object *object(Kind kind, uint64_t n) {
    Object *o = calloc(1, sizeof *o);
    o->kind = kind;
    o->n = n;
    o->values = calloc(n ? n : 1, 8);
    return o;
}
static int64_t *copy_of(const int64_t *from, uint64_t n) {
    int64_t *to = calloc(n ? n : 1, 8);
    if (from) memcpy(to, from, n * 8);
    return to;
}

EXPORT void *aclCreateTensor(const int64_t *sizes, uint64_t n, aclDataType dtype, const int64_t *strides, int64_t offset,
                             aclFormat format, const int64_t *storage, uint64_t storage_n, void *data) {
    Object *o = object(TENSOR, n);
    memcpy(o->values, sizes, n * 8);
    o->dtype = dtype;
    o->format = format;
    o->offset = offset;
    o->data = data;
    o->strides = copy_of(strides, n);
    o->storage = copy_of(storage, storage_n);
    o->storage_n = storage_n;
    return o;
}
EXPORT void *aclCreateScalar(void *value, aclDataType dtype) {
    static const uint8_t size[] = {4, 2, 1, 4, 1, 0, 2, 2, 4, 8, 8, 8, 1}; /* by aclDataType, ACL_FLOAT to ACL_BOOL */
    Object *o = object(SCALAR, 0);
    o->dtype = dtype;
    memcpy(o->scalar, value, dtype == ACL_BF16 ? 2 : (size_t)dtype < sizeof size ? size[dtype] : 16);
    return o;
}
EXPORT void *aclCreateIntArray(const int64_t *values, uint64_t n) {
    Object *o = object(INTS, n);
    memcpy(o->values, values, n * 8);
    return o;
}
EXPORT void *aclCreateBoolArray(const bool *values, uint64_t n) {
    Object *o = object(BOOLS, n);
    for (uint64_t i = 0; i < n; i++) o->values[i] = values[i];
    return o;
}
EXPORT void *aclCreateFloatArray(const float *values, uint64_t n) {
    Object *o = object(FLOATS, n);
    for (uint64_t i = 0; i < n; i++) ((double *)o->values)[i] = values[i];
    return o;
}
static void *list(Kind kind, void *const *values, uint64_t n) {
    Object *o = object(kind, n);
    memcpy(o->values, values, n * 8);
    return o;
}
EXPORT void *aclCreateTensorList(void *const *values, uint64_t n) { return list(TENSORS, values, n); }
EXPORT void *aclCreateScalarList(void *const *values, uint64_t n) { return list(SCALARS, values, n); }

static int32_t destroy(Object *o) {
    if (!o) return 0;
    if (o->kind == TENSORS || o->kind == SCALARS)
        for (uint64_t i = 0; i < o->n; i++) destroy((Object *)o->values[i]);
    free(o->values);
    free(o->strides);
    free(o->storage);
    memset(o, 0, sizeof *o);
    free(o);
    return 0;
}
EXPORT int32_t aclDestroyTensor(void *o) { return destroy(o); }
EXPORT int32_t aclDestroyScalar(void *o) { return destroy(o); }
EXPORT int32_t aclDestroyIntArray(void *o) { return destroy(o); }
EXPORT int32_t aclDestroyBoolArray(void *o) { return destroy(o); }
EXPORT int32_t aclDestroyFloatArray(void *o) { return destroy(o); }
EXPORT int32_t aclDestroyTensorList(void *o) { return destroy(o); }
EXPORT int32_t aclDestroyScalarList(void *o) { return destroy(o); }
EXPORT int32_t aclDestroyAclOpExecutor(void *executor) { return (void)executor, 0; }

EXPORT aclError aclGetViewShape(const void *tensor, int64_t **sizes, uint64_t *n) {
    const Object *o = tensor;
    *n = o->n;
    *sizes = copy_of(o->values, o->n); /* the caller frees it */
    return ACL_SUCCESS;
}
EXPORT int32_t InitHugeMemThreadLocal(void *a, bool b) { return (void)a, (void)b, 0; }
EXPORT void UnInitHugeMemThreadLocal(void *a, bool b) { (void)a, (void)b; }
EXPORT void ReleaseHugeMem(void *a, bool b) { (void)a, (void)b; }

/* ---- the two phases ---- */
typedef int32_t (*OperatorFunction)(const char *name, int32_t phase, uint64_t *integers, double *doubles, uint64_t *stack);
static OperatorFunction operator_hook;
EXPORT void fakecann_set_operator_hook(OperatorFunction function) { operator_hook = function; }

int32_t fakecann_workspace(const char *name, uint64_t *integers, double *doubles, uint64_t *stack) {
    return operator_hook ? operator_hook(name, 0, integers, doubles, stack) : fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "%s: no numerics are installed", name);
}
int32_t fakecann_execute(const char *name, uint64_t *integers, double *doubles, uint64_t *stack) {
    if (fakecann_waiting) {
        aclError error = call_hook(HOOK_LAUNCH, (void *)integers[3], NULL);
        if (error) return error;
    }
    return operator_hook ? operator_hook(name, 1, integers, doubles, stack) : fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "%s: no numerics are installed", name);
}

/* FRACTAL_NZ: [.., M, N] is stored as [.., N/c0, M/16, 16, c0], c0 elements of 32 bytes. */
#define FORMAT_ND 2
#define FORMAT_NZ 29
EXPORT int32_t aclnnNpuFormatCastCalculateSizeAndFormat(const void *source, int32_t format, int32_t additional_dtype, int64_t **sizes, uint64_t *n, int32_t *actual) {
    const Object *o = source;
    (void)additional_dtype;
    int64_t *out = calloc(o->n + 2, 8);
    uint64_t k = 0;
    if (format == FORMAT_NZ && o->n >= 2) {
        int64_t c0 = o->dtype == ACL_INT8 || o->dtype == ACL_UINT8 ? 32 : o->dtype == ACL_FLOAT || o->dtype == ACL_INT32 ? 8 : 16;
        int64_t rows = o->values[o->n - 2], columns = o->values[o->n - 1];
        for (; k + 2 < o->n; k++) out[k] = o->values[k];
        out[k++] = (columns + c0 - 1) / c0;
        out[k++] = (rows + 15) / 16;
        out[k++] = 16;
        out[k++] = c0;
    } else {
        for (; k < o->n; k++) out[k] = o->values[k];
        if (format == FORMAT_NZ) format = FORMAT_ND;
    }
    *sizes = out;
    *n = k;
    *actual = format;
    return ACL_SUCCESS;
}
