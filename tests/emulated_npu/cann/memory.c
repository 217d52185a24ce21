/* Device memory, host registration, copies.
 *
 * A device address is a number in a reserved, inaccessible range; the bytes lie elsewhere. Host code that follows a
 * device pointer therefore faults, and device code that is given a host pointer is refused. Addresses are never used
 * twice, so an address of freed memory stays recognisable for ever. */
#include "cann.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096ul
#define GRANULE (2ul << 20) /* distance between allocations: an overrun ends in a hole, not in a neighbour */
#define ADDRESS_RANGE (4ul << 40)
#define MAX_SEGMENTS (1u << 20)
#define READ_ONLY 107017 /* seen on hardware; the headers do not name it */
#define POISON 0xFF /* NaN in every floating-point format, -1 in every integer */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Segment *segments; /* ascending: addresses are handed out in order */
static size_t count;
static uintptr_t next_address;
static size_t used[64];

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

static size_t capacity(void) {
    const char *text = getenv("FAKE_NPU_MEMORY_GIB");
    return (size_t)(text ? atof(text) * (1ul << 30) : 64.0 * (1ul << 30));
}

Segment *segment_reserve(SegmentKind kind, size_t size, char *host, int32_t device) {
    pthread_mutex_lock(&lock);
    if (!segments) {
        void *range = mmap(NULL, ADDRESS_RANGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        segments = range == MAP_FAILED ? NULL : mmap(NULL, MAX_SEGMENTS * sizeof(Segment), PROT_READ | PROT_WRITE,
                                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        next_address = round_up((uintptr_t)range, GRANULE);
    }
    Segment *segment = NULL;
    if (segments && segments != MAP_FAILED && count < MAX_SEGMENTS) {
        segment = &segments[count++];
        *segment = (Segment){next_address, size, host, device, kind, true, false};
        next_address += round_up(size + PAGE, GRANULE);
    }
    pthread_mutex_unlock(&lock);
    return segment;
}

Segment *segment_at(uintptr_t address) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (segments[middle].begin <= address) low = middle + 1;
        else high = middle;
    }
    if (!low || address >= segments[low - 1].begin + segments[low - 1].size) return NULL;
    return &segments[low - 1];
}

/* Counts what was freed. The numerics look at it before they use what they know of an allocation: a call from here into
 * Python could wait for ever, since torch_npu's allocator holds its lock. */
EXPORT int64_t fakecann_freed;

void segment_release(Segment *segment) {
    segment->live = false;
    __atomic_add_fetch(&fakecann_freed, 1, __ATOMIC_SEQ_CST);
    if (segment->kind == SEGMENT_DEVICE) {
        __atomic_fetch_sub(&used[segment->device], segment->size, __ATOMIC_SEQ_CST);
        /* The range stays reserved: a stale host alias faults instead of reading somebody else's bytes. */
        mmap(segment->host, round_up(segment->size, PAGE), PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    }
}

void segments_synchronised(int32_t device) {
    for (size_t i = 0; i < count; i++)
        if (segments[i].device == device) segments[i].busy = false;
}

char *device_bytes(const void *address, size_t size) {
    Segment *segment = segment_at((uintptr_t)address);
    if (!segment) {
        fail(ACL_ERROR_RT_PARAM_INVALID, "%p is not a device address (a host pointer was given to the device?)", address);
        return NULL;
    }
    if (!segment->live) {
        fail(ACL_ERROR_RT_PARAM_INVALID, "use after free: device address %p", address);
        return NULL;
    }
    size_t offset = (uintptr_t)address - segment->begin;
    if (size > segment->size - offset) {
        fail(ACL_ERROR_RT_PARAM_INVALID, "out of bounds: %zu bytes at %p, whose allocation has %zu left", size, address,
             segment->size - offset);
        return NULL;
    }
    return segment->host + offset;
}

/* For kernels (called from Python): host address of each device address, or 0 where the kernel must not go. A kernel
 * reads its own device's memory and host memory registered for that device, nothing else. */
EXPORT int64_t fakecann_translate(const uint64_t *address, uint64_t *host, size_t n, size_t bytes, int32_t device) {
    Segment *segment = NULL;
    for (size_t i = 0; i < n; i++) {
        if (!segment || address[i] < segment->begin || address[i] + bytes > segment->begin + segment->size) {
            if (!device_bytes((void *)address[i], bytes)) return (int64_t)i;
            segment = segment_at(address[i]);
            if (segment->device != device) {
                fail(ACL_ERROR_RT_PARAM_INVALID, "a kernel on device %d used memory of device %d (registered before aclrtSetDevice?)",
                     device, segment->device);
                return (int64_t)i;
            }
            if (segment->kind == SEGMENT_REGISTERED) segment->busy = true;
        }
        host[i] = (uint64_t)(segment->host + (address[i] - segment->begin));
    }
    return -1;
}

/* For the numerics: the allocation around an address. */
EXPORT int32_t fakecann_is_live(uint64_t address) {
    Segment *segment = segment_at(address);
    return segment && segment->live;
}

/* A kernel uses registered host memory: it must be synchronised before it is unregistered. */
EXPORT void fakecann_touch(uint64_t address) { segment_at(address)->busy = true; }

EXPORT int fakecann_segment(uint64_t address, uint64_t *begin, uint64_t *size, uint64_t *host, int32_t *device, int32_t *kind) {
    if (!device_bytes((void *)address, 0)) return 1;
    Segment *segment = segment_at(address);
    *begin = segment->begin;
    *size = segment->size;
    *host = (uint64_t)segment->host;
    *device = segment->device;
    *kind = segment->kind;
    return 0;
}

EXPORT uint64_t fakecann_live_segments(int32_t kind) {
    uint64_t live = 0;
    for (size_t i = 0; i < count; i++) live += segments[i].live && (int32_t)segments[i].kind == kind;
    return live;
}

/* ---- device memory ---- */
EXPORT aclError aclrtMalloc(void **address, size_t size, aclrtMemMallocPolicy policy) {
    ENTER(aclrtMalloc);
    (void)policy;
    int32_t device = current_device();
    if (!address || !size) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMalloc: null pointer or size 0");
    if (device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtMalloc before aclrtSetDevice");
    if (used[device] + size > capacity())
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "device %d: %zu of %zu bytes in use, %zu more asked for", device,
                    used[device], capacity(), size);
    char *host = mmap(NULL, round_up(size, PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (host == MAP_FAILED) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "host memory behind the device is exhausted");
    /* A caching allocator takes large blocks; poisoning all of each would touch memory that nobody uses. The numerics
     * poison every tensor that torch.empty hands out (aten.py), so here the first pages suffice. */
    memset(host, POISON, size < (1ul << 20) ? size : (1ul << 20));
    Segment *segment = segment_reserve(SEGMENT_DEVICE, size, host, device);
    if (!segment) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the fake device ran out of addresses");
    __atomic_fetch_add(&used[device], size, __ATOMIC_SEQ_CST);
    *address = (void *)segment->begin;
    return ACL_SUCCESS;
}

EXPORT aclError aclrtMallocAlign32(void **address, size_t size, aclrtMemMallocPolicy policy) {
    ENTER(aclrtMallocAlign32);
    return aclrtMalloc(address, size, policy);
}

EXPORT aclError aclrtFree(void *address) {
    ENTER(aclrtFree);
    Segment *segment = segment_at((uintptr_t)address);
    if (!segment || segment->kind != SEGMENT_DEVICE || segment->begin != (uintptr_t)address)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree: %p was not allocated by aclrtMalloc", address);
    if (!segment->live) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree: %p was already freed", address);
    segment_release(segment);
    return ACL_SUCCESS;
}

EXPORT aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *available, size_t *total) {
    ENTER(aclrtGetMemInfo);
    (void)attribute;
    int32_t device = current_device();
    if (device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtGetMemInfo before aclrtSetDevice");
    *total = capacity();
    *available = capacity() - used[device];
    return ACL_SUCCESS;
}

/* ---- host memory ---- */
typedef struct HostBlock {
    char *begin;
    size_t size;
    struct HostBlock *next;
} HostBlock;
static HostBlock *host_blocks;

EXPORT aclError aclrtMallocHost(void **pointer, size_t size) {
    ENTER(aclrtMallocHost);
    if (!pointer || !size) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMallocHost: null pointer or size 0");
    char *begin = mmap(NULL, round_up(size, PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMallocHost: %zu bytes", size);
    HostBlock *block = malloc(sizeof *block);
    pthread_mutex_lock(&lock);
    *block = (HostBlock){begin, size, host_blocks};
    host_blocks = block;
    pthread_mutex_unlock(&lock);
    *pointer = begin;
    return ACL_SUCCESS;
}

EXPORT aclError aclrtFreeHost(void *pointer) {
    ENTER(aclrtFreeHost);
    pthread_mutex_lock(&lock);
    HostBlock **link = &host_blocks;
    while (*link && (*link)->begin != pointer) link = &(*link)->next;
    HostBlock *block = *link;
    bool registered = block && is_host_address_registered(block->begin, block->size);
    if (block && !registered) *link = block->next;
    pthread_mutex_unlock(&lock);
    if (!block) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreeHost: %p was not allocated by aclrtMallocHost", pointer);
    if (registered) return fail(ACL_ERROR_RT_MEMORY_FREE, "aclrtFreeHost: %p is still registered for a device", pointer);
    munmap(block->begin, round_up(block->size, PAGE));
    free(block);
    return ACL_SUCCESS;
}

EXPORT uint64_t fakecann_host_blocks(void) {
    uint64_t n = 0;
    for (HostBlock *block = host_blocks; block; block = block->next) n++;
    return n;
}

bool is_host_address_registered(const void *begin, size_t size) {
    for (size_t i = 0; i < count; i++)
        if (segments[i].live && segments[i].kind == SEGMENT_REGISTERED && segments[i].host < (char *)begin + size &&
            (char *)begin < segments[i].host + segments[i].size)
            return true;
    return false;
}

static bool from_malloc_host(const char *pointer) {
    for (HostBlock *block = host_blocks; block; block = block->next)
        if (pointer >= block->begin && pointer < block->begin + block->size) return true;
    return false;
}

/* What the driver finds when it pins a range that aclrtMallocHost did not give out. */
static aclError mapping_error(const char *begin, size_t size) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[4400], permissions[8], path[4096];
    unsigned long first, last;
    aclError error = ACL_SUCCESS;
    while (!error && maps && fgets(line, sizeof line, maps)) {
        path[0] = 0;
        if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %4095s", &first, &last, permissions, path) < 3) continue;
        if (first >= (unsigned long)begin + size || last <= (unsigned long)begin) continue;
        bool shared_memory = !strncmp(path, "/dev/shm/", 9) || !strncmp(path, "/memfd:", 7) || !strncmp(path, "/dev/zero", 9);
        if (permissions[1] != 'w') error = fail(READ_ONLY, "host registration: %p is mapped read-only", begin);
        else if (path[0] == '/' && !shared_memory) error = fail(ACL_ERROR_RT_DRV_INTERNAL_ERROR, "host registration: %p is mapped from %s, a file", begin, path);
    }
    if (maps) fclose(maps);
    return error;
}

/* ---- registration: rules of the runtime documentation (api_ref, aclrtHostRegister and V2) ---- */
static aclError register_host(void *pointer, uint64_t size, uint32_t flag, Segment **registered) {
    int32_t device = current_device();
    if (!pointer || !size) return fail(ACL_ERROR_RT_PARAM_INVALID, "host registration: null pointer or size 0");
    if (device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "host registration before aclrtSetDevice");
    if ((uintptr_t)pointer % PAGE) return fail(ACL_ERROR_RT_PARAM_INVALID, "host registration: %p is not 4 KiB aligned", pointer);
    if (!flag || flag & ~(uint32_t)(ACL_HOST_REG_MAPPED | ACL_HOST_REG_IOMEMORY | ACL_HOST_REG_READONLY | ACL_HOST_REG_PINNED))
        return fail(ACL_ERROR_RT_PARAM_INVALID, "host registration: flag 0x%x", flag);
    if (flag & (ACL_HOST_REG_IOMEMORY | ACL_HOST_REG_READONLY))
        return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "host registration: IOMEMORY and READONLY are reserved");
    /* The documentation reserves PINNED for memory that is not pinned yet; vllm-ascend 0.30.0rc2 sets it on
     * aclrtMallocHost memory all the same, so refusing it is a choice of the test. */
    if (flag & ACL_HOST_REG_PINNED && from_malloc_host(pointer) && getenv("FAKE_CANN_STRICT_PINNED"))
        return fail(ACL_ERROR_RT_PARAM_INVALID, "host registration: PINNED on memory that aclrtMallocHost pinned already");
    unsigned char *pages = malloc(size / PAGE + 2);
    bool absent = segment_at((uintptr_t)pointer) || mincore(pointer, round_up(size, PAGE), pages);
    free(pages);
    if (absent) return fail(ACL_ERROR_RT_DRV_INTERNAL_ERROR, "host registration: %p has no %lu bytes of host memory", pointer, (unsigned long)size);
    if (!from_malloc_host(pointer)) {
        if (getenv("FAKE_CANN_OLD_KERNEL")) return fail(ACL_ERROR_RT_DRV_INTERNAL_ERROR, "host registration: before Linux 5.11 only memory of aclrtMallocHost");
        aclError error = mapping_error(pointer, size);
        if (error) return error;
    }
    if (is_host_address_registered(pointer, size))
        return fail(ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "host registration: %p overlaps a registered range", pointer);
    *registered = segment_reserve(SEGMENT_REGISTERED, size, pointer, device);
    return *registered ? ACL_SUCCESS : fail(ACL_ERROR_RT_DRV_INTERNAL_ERROR, "the fake device ran out of addresses");
}

EXPORT aclError aclrtHostRegister(void *pointer, uint64_t size, aclrtHostRegisterType type, void **address) {
    ENTER(aclrtHostRegister);
    if (type != ACL_HOST_REGISTER_MAPPED) return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtHostRegister: type %d", type);
    Segment *segment;
    aclError error = register_host(pointer, size, ACL_HOST_REG_MAPPED, &segment);
    if (!error && address) *address = (void *)segment->begin;
    return error;
}

EXPORT aclError aclrtHostRegisterV2(void *pointer, uint64_t size, uint32_t flag) {
    ENTER(aclrtHostRegisterV2);
    Segment *segment;
    return register_host(pointer, size, flag, &segment);
}

static Segment *registration_of(const char *pointer) {
    for (size_t i = 0; i < count; i++)
        if (segments[i].live && segments[i].kind == SEGMENT_REGISTERED && pointer >= segments[i].host &&
            pointer < segments[i].host + segments[i].size)
            return &segments[i];
    return NULL;
}

EXPORT aclError aclrtHostGetDevicePointer(void *pointer, void **address, uint32_t flag) {
    ENTER(aclrtHostGetDevicePointer);
    Segment *segment = registration_of(pointer);
    if (flag || !address || !segment)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtHostGetDevicePointer: %p is not registered, or flag %u is not 0", pointer, flag);
    *address = (void *)(segment->begin + (uintptr_t)((char *)pointer - segment->host));
    return ACL_SUCCESS;
}

EXPORT aclError aclrtHostUnregister(void *pointer) {
    ENTER(aclrtHostUnregister);
    Segment *segment = registration_of(pointer);
    if (!segment || segment->host != pointer)
        return fail(ACL_ERROR_HOST_MEMORY_NOT_REGISTERED, "aclrtHostUnregister: %p is not registered", pointer);
    if (segment->busy)
        return fail(ACL_ERROR_RT_DRV_INTERNAL_ERROR, "aclrtHostUnregister: kernels used %p since the device was last synchronised", pointer);
    segment_release(segment);
    return ACL_SUCCESS;
}

EXPORT aclError aclrtHostMemMapCapabilities(uint32_t device, aclrtHacType type, aclrtHostMemMapCapability *capability) {
    ENTER(aclrtHostMemMapCapabilities);
    (void)device, (void)type;
    *capability = ACL_RT_HOST_MEM_MAP_SUPPORTED;
    return ACL_SUCCESS;
}

/* ---- copies ---- */
static aclError copy(Task *task) {
    void *to = (void *)task->argument[0];
    const void *from = (void *)task->argument[1];
    size_t size = task->argument[2];
    aclrtMemcpyKind kind = (aclrtMemcpyKind)task->argument[3];
    Segment *a = segment_at((uintptr_t)to), *b = segment_at((uintptr_t)from);
    if (kind == ACL_MEMCPY_DEFAULT)
        kind = a ? b ? ACL_MEMCPY_DEVICE_TO_DEVICE : ACL_MEMCPY_HOST_TO_DEVICE : b ? ACL_MEMCPY_DEVICE_TO_HOST : ACL_MEMCPY_HOST_TO_HOST;
    bool to_device = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
    bool from_device = kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
    if ((a != NULL) != to_device || (b != NULL) != from_device)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "copy of kind %d from %p (%s) to %p (%s)", kind, from, b ? "device" : "host", to, a ? "device" : "host");
    if ((a && a->kind == SEGMENT_REGISTERED) || (b && b->kind == SEGMENT_REGISTERED))
        return fail(ACL_ERROR_RT_PARAM_INVALID, "the device address of registered host memory is for kernels only, not for copies");
    char *destination = to_device ? device_bytes(to, size) : to;
    const char *source = from_device ? device_bytes(from, size) : from;
    if (!destination || !source) return ACL_ERROR_RT_PARAM_INVALID;
    memmove(destination, source, size);
    return ACL_SUCCESS;
}

static aclError fill(Task *task) {
    char *to = device_bytes((void *)task->argument[0], task->argument[2]);
    if (!to) return ACL_ERROR_RT_PARAM_INVALID;
    memset(to, (int)task->argument[1], task->argument[2]);
    return ACL_SUCCESS;
}

EXPORT aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind, aclrtStream stream) {
    ENTER(aclrtMemcpyAsync);
    if (size > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "copy of %zu bytes into %zu", size, room);
    return launch((Task){copy, {(uint64_t)to, (uint64_t)from, size, kind}}, stream);
}

EXPORT aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind) {
    ENTER(aclrtMemcpy);
    if (size > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "copy of %zu bytes into %zu", size, room);
    if (thread_capture()) return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "synchronous copy during graph capture");
    aclError error = fakecann_waiting ? call_hook(HOOK_SYNCHRONISE, NULL, NULL) : ACL_SUCCESS;
    Task task = {copy, {(uint64_t)to, (uint64_t)from, size, kind}};
    return error ? error : copy(&task);
}

EXPORT aclError aclrtMemset(void *to, size_t room, int32_t value, size_t size) {
    ENTER(aclrtMemset);
    if (size > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "fill of %zu bytes into %zu", size, room);
    /* Allowed while a graph is captured (it is not part of the graph): torch_npu itself clears external events so. */
    Task task = {fill, {(uint64_t)to, (uint64_t)(int64_t)value, size}};
    return fill(&task);
}

EXPORT aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, aclrtStream stream) {
    ENTER(aclrtMemsetAsync);
    if (size > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "fill of %zu bytes into %zu", size, room);
    return launch((Task){fill, {(uint64_t)to, (uint64_t)(int64_t)value, size}}, stream);
}
