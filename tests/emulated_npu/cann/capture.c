/* Graph capture (aclmdlRI*). The tape itself is kept by the numerics (graphs.py): here are the handles, the states and
 * the documented refusals. */
#include "cann.h"
#include <stdlib.h>

struct Model {
    Stream *stream; /* NULL once the capture has ended */
    int32_t open_groups;
    Stream *joined[64];
    int32_t joined_count;
};
static __thread Model *captured;
static __thread void *updating;
Model *thread_capture(void) { return captured; }

/* torch_npu asks each stream whether it is captured, to give its tensors memory that the graph keeps. */
void join_capture(Stream *stream, Model *model) {
    if (!stream || stream->capturing || model != captured || model->joined_count == 64) return;
    stream->capturing = model;
    model->joined[model->joined_count++] = stream;
}

EXPORT aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
    ENTER(aclmdlRICaptureBegin);
    Stream *stream = handle;
    (void)mode;
    if (!stream) return fail(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, "the default stream cannot be captured");
    if (captured || stream->capturing) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is being captured already");
    captured = stream->capturing = calloc(1, sizeof(Model));
    captured->stream = stream;
    return call_hook(HOOK_CAPTURE_BEGIN, captured, NULL);
}

EXPORT aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI *model) {
    ENTER(aclmdlRICaptureEnd);
    Stream *stream = handle;
    if (!stream || !stream->capturing) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "the stream is not being captured");
    if (stream->capturing != captured) return fail(ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD, "the capture began in another thread");
    if (captured->stream != stream) return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture did not begin on this stream");
    *model = captured;
    for (int32_t i = 0; i < captured->joined_count; i++) captured->joined[i]->capturing = NULL;
    captured->stream = NULL;
    int32_t open = captured->open_groups;
    stream->capturing = captured = NULL;
    aclError error = call_hook(HOOK_CAPTURE_END, *model, NULL);
    return open ? fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group is still open") : error;
}

EXPORT aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus *status, aclmdlRI *model) {
    ENTER(aclmdlRICaptureGetInfo);
    Stream *stream = handle;
    *status = stream && stream->capturing ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (model) *model = stream ? stream->capturing : NULL;
    return ACL_SUCCESS;
}

EXPORT aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
    ENTER(aclmdlRICaptureThreadExchangeMode);
    static __thread aclmdlRICaptureMode current = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
    aclmdlRICaptureMode before = current;
    current = *mode;
    *mode = before;
    return ACL_SUCCESS;
}

EXPORT aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
    ENTER(aclmdlRIExecuteAsync);
    if (!model || ((Model *)model)->stream) return fail(ACL_ERROR_RT_MODEL_CAPTURED, "the graph is still being captured");
    return call_hook(HOOK_EXECUTE, model, stream);
}

EXPORT aclError aclmdlRIDestroy(aclmdlRI model) {
    ENTER(aclmdlRIDestroy);
    aclError error = call_hook(HOOK_DESTROY, model, NULL);
    free(model);
    return error;
}

EXPORT aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) {
    ENTER(aclmdlRICaptureTaskGrpBegin);
    (void)stream;
    if (!captured) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "a task group needs a capture");
    if (captured->open_groups) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "task groups do not nest");
    captured->open_groups = 1;
    return call_hook(HOOK_GROUP_BEGIN, captured, NULL);
}

EXPORT aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp *handle) {
    ENTER(aclmdlRICaptureTaskGrpEnd);
    (void)stream;
    if (!captured || !captured->open_groups) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no task group is open");
    captured->open_groups = 0;
    *handle = malloc(1); /* the address is the name of the group */
    return call_hook(HOOK_GROUP_END, *handle, NULL);
}

EXPORT aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle) {
    ENTER(aclmdlRICaptureTaskUpdateBegin);
    (void)stream;
    if (captured || updating) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "an update cannot begin inside a capture or another update");
    updating = handle;
    return call_hook(HOOK_UPDATE_BEGIN, handle, NULL);
}

EXPORT aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) {
    ENTER(aclmdlRICaptureTaskUpdateEnd);
    (void)stream;
    if (!updating) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no update is open");
    void *handle = updating;
    updating = NULL;
    return call_hook(HOOK_UPDATE_END, handle, NULL);
}
