/* Initialisation, devices, streams, events, errors. Everything executes when it is issued: there are no races here,
 * and order between streams is not modelled, except that a replayed graph waits for external events (capture.c). */
#include "cann.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_DEVICES 64
#define STREAM_MAGIC 0x57524d53u
#define EVENT_MAGIC 0x544e5645u

static __thread char recent_error[1024];
static __thread int32_t thread_device = -1;
static int32_t default_device = -1;
static int32_t contexts[MAX_DEVICES];

/* ---- errors and injection ---- */
aclError fail(aclError code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(recent_error, sizeof recent_error, format, arguments);
    va_end(arguments);
    if (getenv("FAKE_CANN_TRACE")) fprintf(stderr, "[fake CANN] error %d: %s\n", code, recent_error);
    return code;
}

EXPORT const char *aclGetRecentErrMsg(void) { return recent_error; }
EXPORT void fakecann_set_error(const char *text) { fail(0, "%s", text); }

/* Link-time symbols that nobody implemented end here (generated, see build.py). */
void fakecann_unlisted(const char *name) {
    fprintf(stderr, "[fake CANN] %s was called, which the emulated NPU does not list: implement it in tests/emulated_npu/cann\n", name);
    abort();
}

typedef struct {
    char name[64];
    uint64_t calls;
} Counter;
static Counter counters[512];
static struct {
    char name[64];
    uint64_t call;
    aclError code;
} injected[64];
static int injections;

static Counter *counter(const char *name) {
    size_t i = 0;
    while (counters[i].name[0] && strcmp(counters[i].name, name)) i++;
    if (!counters[i].name[0]) strncpy(counters[i].name, name, sizeof counters[i].name - 1);
    return &counters[i];
}

EXPORT uint64_t fakecann_calls(const char *name) { return counter(name)->calls; }

/* The call-th call from now on (1 = next) of the function returns code instead of doing anything. */
EXPORT void fakecann_inject(const char *name, uint64_t call, int32_t code) {
    strncpy(injected[injections].name, name, sizeof injected[0].name - 1);
    injected[injections].call = counter(name)->calls + call;
    injected[injections++].code = code;
}

EXPORT void fakecann_clear_injections(void) {
    memset(injected, 0, sizeof injected);
    injections = 0;
}

aclError fakecann_enter(const char *name) {
    uint64_t call = __atomic_add_fetch(&counter(name)->calls, 1, __ATOMIC_SEQ_CST);
    if (getenv("FAKE_CANN_TRACE")) fprintf(stderr, "[fake CANN] %s\n", name);
    for (int i = 0; i < injections; i++)
        if (injected[i].call == call && !strcmp(injected[i].name, name)) return fail(injected[i].code, "%s: injected error %d", name, injected[i].code);
    return ACL_SUCCESS;
}

/* ---- initialisation and versions ---- */
EXPORT aclError aclInit(const char *config_path) {
    ENTER(aclInit);
    FILE *file = config_path ? fopen(config_path, "r") : NULL;
    if (file) {
        char text[4096] = {0};
        size_t n = fread(text, 1, sizeof text - 1, file);
        fclose(file);
        /* From CANN 8.3 on torch_npu names a default device: what runs before aclrtSetDevice goes there. */
        char *field = n ? strstr(text, "\"default_device\"") : NULL;
        if (field && (field = strchr(field + 16, ':'))) {
            while (*field && (*field < '0' || *field > '9')) field++;
            default_device = atoi(field);
        }
    }
    return ACL_SUCCESS;
}
EXPORT aclError aclFinalize(void) { return ACL_SUCCESS; }

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}
EXPORT const char *aclrtGetSocName(void) { return setting("FAKE_NPU_SOC", "Ascend910B3"); }
EXPORT aclError aclsysGetVersionStr(char *package, char *version) {
    ENTER(aclsysGetVersionStr);
    (void)package;
    strcpy(version, setting("FAKE_CANN_VERSION", "9.2.0"));
    return ACL_SUCCESS;
}
EXPORT aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version) {
    ENTER(aclsysGetCANNVersion);
    (void)name;
    memset(version, 0, sizeof *version);
    strncpy(version->version, setting("FAKE_CANN_VERSION", "9.2.0"), sizeof version->version - 1);
    return ACL_SUCCESS;
}
EXPORT size_t aclGetCompileoptSize(aclCompileOpt option) { return (void)option, 256; }
EXPORT aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t size) {
    (void)option;
    if (size) strncpy(value, "disable", size);
    return ACL_SUCCESS;
}
EXPORT aclError aclSetCompileopt(aclCompileOpt option, const char *value) { return (void)option, (void)value, ACL_SUCCESS; }

/* ---- devices ---- */
static uint32_t device_count(void) { return (uint32_t)atoi(setting("FAKE_NPU_COUNT", "1")); }
int32_t current_device(void) { return thread_device >= 0 ? thread_device : default_device; }

EXPORT aclError aclrtGetDeviceCount(uint32_t *n) {
    ENTER(aclrtGetDeviceCount);
    *n = device_count();
    return ACL_SUCCESS;
}
EXPORT aclError aclrtSetDevice(int32_t device) {
    ENTER(aclrtSetDevice);
    if (device < 0 || (uint32_t)device >= device_count()) return fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtSetDevice(%d): there are %u devices", device, device_count());
    thread_device = device;
    return ACL_SUCCESS;
}
EXPORT aclError aclrtGetDevice(int32_t *device) {
    ENTER(aclrtGetDevice);
    if (current_device() < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "no device was set in this thread");
    *device = current_device();
    return ACL_SUCCESS;
}
EXPORT aclError aclrtResetDevice(int32_t device) {
    ENTER(aclrtResetDevice);
    if (thread_device == device) thread_device = -1;
    return ACL_SUCCESS;
}
EXPORT aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    ENTER(aclrtGetPrimaryCtxState);
    if (flags) *flags = 0;
    *active = thread_device == device;
    return ACL_SUCCESS;
}
EXPORT aclError aclrtGetCurrentContext(aclrtContext *context) {
    ENTER(aclrtGetCurrentContext);
    if (current_device() < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "no device was set in this thread");
    *context = &contexts[current_device()];
    return ACL_SUCCESS;
}
EXPORT aclError aclrtSetCurrentContext(aclrtContext context) {
    ENTER(aclrtSetCurrentContext);
    int32_t *slot = context;
    if (slot < contexts || slot >= contexts + MAX_DEVICES) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtSetCurrentContext: unknown context");
    thread_device = (int32_t)(slot - contexts);
    return ACL_SUCCESS;
}
EXPORT aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    ENTER(aclrtDeviceCanAccessPeer);
    (void)device, (void)peer;
    *can = 0;
    return ACL_SUCCESS;
}
EXPORT aclError aclrtDeviceGetBareTgid(int32_t *pid) {
    ENTER(aclrtDeviceGetBareTgid);
    *pid = 0;
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtDeviceGetBareTgid");
}

/* An Atlas A2 die (910B3): what schedulers of kernels ask for. */
EXPORT aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo what, int64_t *value) {
    ENTER(aclGetDeviceCapability);
    (void)device;
    switch (what) {
    case ACL_DEVICE_INFO_AI_CORE_NUM: *value = 20; return ACL_SUCCESS;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = 40; return ACL_SUCCESS;
    case ACL_DEVICE_INFO_L2_SIZE: *value = 192 << 20; return ACL_SUCCESS;
    default: return fail(ACL_ERROR_RT_PARAM_INVALID, "aclGetDeviceCapability: %d", (int)what);
    }
}

/* ---- streams ---- */
aclError call_hook(Hook hook, const void *first, const void *second) {
    return graph_hook ? graph_hook((int32_t)hook, (uint64_t)first, (uint64_t)second) : ACL_SUCCESS;
}
EXPORT void fakecann_set_graph_hook(HookFunction function) { graph_hook = function; }
HookFunction graph_hook;
EXPORT int32_t fakecann_waiting;

static aclError make_stream(aclrtStream *out) {
    static int32_t next_id;
    if (current_device() < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "stream created before aclrtSetDevice");
    Stream *stream = calloc(1, sizeof *stream);
    *stream = (Stream){STREAM_MAGIC, current_device(), __atomic_add_fetch(&next_id, 1, __ATOMIC_SEQ_CST), NULL};
    *out = stream;
    return ACL_SUCCESS;
}
EXPORT aclError aclrtCreateStream(aclrtStream *stream) {
    ENTER(aclrtCreateStream);
    return make_stream(stream);
}
EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag) {
    ENTER(aclrtCreateStreamWithConfig);
    (void)priority, (void)flag;
    return make_stream(stream);
}
EXPORT aclError aclrtDestroyStream(aclrtStream stream) {
    ENTER(aclrtDestroyStream);
    free(stream);
    return ACL_SUCCESS;
}
EXPORT aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
    ENTER(aclrtStreamGetId);
    *id = stream ? ((Stream *)stream)->id : 0;
    return ACL_SUCCESS;
}
EXPORT aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
    ENTER(aclrtStreamQuery);
    (void)stream;
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
EXPORT aclError aclrtSetStreamAttribute(aclrtStream stream, aclrtStreamAttr attribute, aclrtStreamAttrValue *value) {
    ENTER(aclrtSetStreamAttribute);
    return (void)stream, (void)attribute, (void)value, ACL_SUCCESS;
}
static aclError synchronise(const char *what, void *stream) {
    if (thread_capture()) return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "%s during graph capture", what);
    aclError error = fakecann_waiting ? call_hook(HOOK_SYNCHRONISE, stream, NULL) : ACL_SUCCESS;
    if (!error) segments_synchronised(current_device());
    return error;
}
EXPORT aclError aclrtSynchronizeStream(aclrtStream stream) {
    ENTER(aclrtSynchronizeStream);
    return synchronise("aclrtSynchronizeStream", stream);
}
EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
    ENTER(aclrtSynchronizeStreamWithTimeout);
    (void)timeout;
    return synchronise("aclrtSynchronizeStream", stream);
}
EXPORT aclError aclrtSynchronizeDevice(void) {
    ENTER(aclrtSynchronizeDevice);
    return synchronise("aclrtSynchronizeDevice", NULL);
}
EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
    ENTER(aclrtSynchronizeDeviceWithTimeout);
    (void)timeout;
    return synchronise("aclrtSynchronizeDevice", NULL);
}

aclError launch(Task task, aclrtStream stream) {
    if (fakecann_waiting) {
        aclError error = call_hook(HOOK_LAUNCH, stream, NULL);
        if (error) return error;
    }
    if (thread_capture()) {
        Task *kept = malloc(sizeof *kept);
        *kept = task;
        aclError error = call_hook(HOOK_TASK, kept, NULL);
        if (error) return error;
    }
    return task.run(&task);
}
EXPORT aclError fakecann_run_task(Task *task) { return task->run(task); }

/* ---- events ---- */
typedef struct {
    uint32_t magic, flags;
    bool recorded;
    Model *captured_by; /* recorded by a stream that was being captured */
    struct timespec at;
} Event;

static aclError make_event(aclrtEvent *out, uint32_t flags) {
    Event *event = calloc(1, sizeof *event);
    event->magic = EVENT_MAGIC;
    event->flags = flags;
    *out = event;
    return ACL_SUCCESS;
}
static Event *event_of(aclrtEvent handle) {
    Event *event = handle;
    return event && event->magic == EVENT_MAGIC ? event : NULL;
}
EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) {
    ENTER(aclrtCreateEventExWithFlag);
    return make_event(event, flag);
}
EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) {
    ENTER(aclrtCreateEventWithFlag);
    return make_event(event, flag);
}
EXPORT aclError aclrtDestroyEvent(aclrtEvent handle) {
    ENTER(aclrtDestroyEvent);
    Event *event = event_of(handle);
    if (!event) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtDestroyEvent: not an event");
    event->magic = 0;
    free(event);
    return ACL_SUCCESS;
}
EXPORT aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
    ENTER(aclrtRecordEvent);
    Event *event = event_of(handle);
    if (!event) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtRecordEvent: not an event");
    event->captured_by = stream ? ((Stream *)stream)->capturing : NULL;
    if (thread_capture()) return ACL_SUCCESS; /* order inside a graph is order of issue */
    event->recorded = true;
    clock_gettime(CLOCK_MONOTONIC, &event->at);
    return fakecann_waiting ? call_hook(HOOK_RECORD, NULL, NULL) : ACL_SUCCESS;
}
EXPORT aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream) {
    ENTER(aclrtResetEvent);
    Event *event = event_of(handle);
    (void)stream;
    if (!event) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtResetEvent: not an event");
    if (thread_capture()) return call_hook(HOOK_EVENT_RESET, event, NULL);
    event->recorded = false;
    return ACL_SUCCESS;
}
EXPORT aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
    ENTER(aclrtStreamWaitEvent);
    Event *event = event_of(handle);
    if (!event) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtStreamWaitEvent: not an event");
    if (event->captured_by) join_capture(stream, event->captured_by);
    if (thread_capture() && event->flags & ACL_EVENT_EXTERNAL) return call_hook(HOOK_EVENT_WAIT, event, NULL);
    return ACL_SUCCESS;
}

/* torch_npu 2.13 makes its external events of these: a word of device memory that one stream writes and a graph awaits. */
static aclError write_value(Task *task) {
    char *word = device_bytes((void *)task->argument[0], sizeof(uint64_t));
    if (!word) return ACL_ERROR_RT_PARAM_INVALID;
    memcpy(word, &task->argument[1], sizeof(uint64_t));
    return ACL_SUCCESS;
}
EXPORT aclError aclrtValueWrite(void *address, uint64_t value, uint32_t flag, aclrtStream stream) {
    ENTER(aclrtValueWrite);
    if (flag) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtValueWrite: flag %u", flag);
    Task task = {write_value, {(uint64_t)address, value}};
    if (thread_capture()) return launch(task, stream);
    aclError error = write_value(&task);
    return error || !fakecann_waiting ? error : call_hook(HOOK_RECORD, NULL, NULL);
}
EXPORT aclError aclrtValueWait(void *address, uint64_t value, uint32_t flag, aclrtStream stream) {
    ENTER(aclrtValueWait);
    (void)stream;
    if (flag > ACL_STREAM_WAIT_VALUE_EQ) return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtValueWait: mode %u is not listed", flag);
    if (!device_bytes(address, sizeof(uint64_t))) return ACL_ERROR_RT_PARAM_INVALID;
    return thread_capture() ? call_hook(HOOK_VALUE_WAIT, address, (void *)value) : ACL_SUCCESS;
}

EXPORT int32_t fakecann_event_recorded(Event *event) { return event->recorded; }
EXPORT void fakecann_event_reset(Event *event) { event->recorded = false; }

EXPORT aclError aclrtSynchronizeEvent(aclrtEvent event) {
    ENTER(aclrtSynchronizeEvent);
    (void)event;
    return synchronise("aclrtSynchronizeEvent", NULL);
}
EXPORT aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
    ENTER(aclrtQueryEventStatus);
    Event *event = event_of(handle);
    if (!event) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtQueryEventStatus: not an event");
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
EXPORT aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    ENTER(aclrtQueryEventWaitStatus);
    (void)event;
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
EXPORT aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent first, aclrtEvent last) {
    ENTER(aclrtEventElapsedTime);
    Event *a = event_of(first), *b = event_of(last);
    if (!a || !b) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtEventElapsedTime: not an event");
    *milliseconds = (float)((double)(b->at.tv_sec - a->at.tv_sec) * 1e3 + (double)(b->at.tv_nsec - a->at.tv_nsec) / 1e6);
    return ACL_SUCCESS;
}

/* ---- settings without a counterpart here: accepted, since nothing they tune exists ---- */
EXPORT aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) { return (void)mode, ACL_SUCCESS; }
EXPORT aclError aclrtSetOpWaitTimeout(uint32_t seconds) { return (void)seconds, ACL_SUCCESS; }
EXPORT aclError aclrtSetOpExecuteTimeOut(uint32_t seconds) { return (void)seconds, ACL_SUCCESS; }
static int64_t parameters[16];
EXPORT aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    ENTER(aclrtSetSysParamOpt);
    parameters[(unsigned)option % 16] = value;
    return ACL_SUCCESS;
}
EXPORT aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    ENTER(aclrtGetSysParamOpt);
    *value = parameters[(unsigned)option % 16];
    return ACL_SUCCESS;
}
EXPORT aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
EXPORT void aclAppLog(aclLogLevel level, const char *function, const char *file, uint32_t line, const char *format, ...) {
    (void)level, (void)function, (void)file, (void)line, (void)format;
}
