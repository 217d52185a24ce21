/* Shared by the parts of the fake CANN: errors, injection, address space, streams, and the hooks through which the
 * numerics (Python) learn what torch_npu asked for. Types come from the headers inside the installed torch_npu wheel. */
#pragma once
#define _GNU_SOURCE
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* Every exported function begins with ENTER: it counts the call, prints it when FAKE_CANN_TRACE is set, and returns
 * the error code that a test injected for exactly this call. */
#define ENTER(name)                                        \
    do {                                                   \
        aclError injected = fakecann_enter(#name);         \
        if (injected) return injected;                     \
    } while (0)
aclError fakecann_enter(const char *name);

/* Sets the text of aclGetRecentErrMsg and returns the code, so that callers write `return fail(code, "...")`. */
aclError fail(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- address space (memory.c) ------------------------------------------------------------------------------- */
typedef enum { SEGMENT_DEVICE, SEGMENT_REGISTERED } SegmentKind;
typedef struct {
    uintptr_t begin;  /* device address: never the host address, never dereferenced by the host */
    size_t size;
    char *host;       /* where the bytes really are */
    int32_t device;
    SegmentKind kind;
    bool live;
    bool busy;        /* a kernel used registered memory since the device was last synchronised */
} Segment;

Segment *segment_reserve(SegmentKind kind, size_t size, char *host, int32_t device);
Segment *segment_at(uintptr_t address); /* live or dead; NULL when no allocation ever covered it */
void segment_release(Segment *segment);
void segments_synchronised(int32_t device);
/* Host bytes of [address, address + size) or NULL with the recent error set. */
char *device_bytes(const void *address, size_t size);
bool is_host_address_registered(const void *begin, size_t size);

/* ---- current device and streams (runtime.c) ----------------------------------------------------------------- */
typedef struct Model Model;
typedef struct {
    uint32_t magic;
    int32_t device, id;
    Model *capturing; /* the graph that is being captured from this stream */
} Stream;
int32_t current_device(void); /* -1: none was set and there is no default */
Model *thread_capture(void);  /* the graph this thread captures, or NULL */
void join_capture(Stream *stream, Model *model); /* the stream waits for work of the capture: it is captured too */

/* ---- work that can be captured ------------------------------------------------------------------------------ */
typedef struct Task Task;
struct Task {
    aclError (*run)(Task *);
    uint64_t argument[8];
};
/* Runs the task now; while the thread captures a graph, the graph also keeps a copy that replay runs again. */
aclError launch(Task task, aclrtStream stream);

/* ---- hooks into Python -------------------------------------------------------------------------------------- */
typedef enum {
    HOOK_CAPTURE_BEGIN, /* model */
    HOOK_CAPTURE_END,   /* model */
    HOOK_EXECUTE,       /* model, stream */
    HOOK_DESTROY,       /* model */
    HOOK_GROUP_BEGIN,   /* handle */
    HOOK_GROUP_END,     /* handle */
    HOOK_UPDATE_BEGIN,  /* handle */
    HOOK_UPDATE_END,    /* handle */
    HOOK_EVENT_WAIT,    /* event: captured wait for an external event */
    HOOK_EVENT_RESET,   /* event: captured reset */
    HOOK_VALUE_WAIT,    /* device address, expected value: captured wait for a word of device memory */
    HOOK_RECORD,        /* something that a replay may wait for has changed */
    HOOK_TASK,          /* task: captured copy or fill or collective */
    HOOK_LAUNCH,        /* stream: a task starts while a replay waits */
    HOOK_SYNCHRONISE,   /* stream or NULL: the host waits while a replay waits too */
} Hook;
typedef aclError (*HookFunction)(int32_t hook, uint64_t first, uint64_t second);
extern HookFunction graph_hook;
extern int32_t fakecann_waiting; /* replays that wait for an event; written by Python */
aclError call_hook(Hook hook, const void *first, const void *second);
