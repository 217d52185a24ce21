/* Collectives between processes over POSIX shared memory. Every collective is one exchange: each rank publishes what
 * it sends, all ranks see everything, each computes its own result. The descriptors are compared first, so that ranks
 * that call different collectives, or the same with different counts, get an error instead of mixed data; a rank that
 * died is noticed instead of waited for. Point-to-point calls are not listed. */
#include "cann.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* The wheel's hccl_types.h compiles as C++ only: these are its values. */
typedef void *HcclComm;
enum { HCCL_SUCCESS, HCCL_E_PARA, HCCL_E_SYSCALL = 8, HCCL_E_TIMEOUT = 9, HCCL_E_REMOTE = 21 };
enum { HCCL_REDUCE_SUM, HCCL_REDUCE_PROD, HCCL_REDUCE_MAX, HCCL_REDUCE_MIN };
enum {
    HCCL_DATA_TYPE_INT8, HCCL_DATA_TYPE_INT16, HCCL_DATA_TYPE_INT32, HCCL_DATA_TYPE_FP16, HCCL_DATA_TYPE_FP32, HCCL_DATA_TYPE_INT64,
    HCCL_DATA_TYPE_UINT64, HCCL_DATA_TYPE_UINT8, HCCL_DATA_TYPE_UINT16, HCCL_DATA_TYPE_UINT32, HCCL_DATA_TYPE_FP64, HCCL_DATA_TYPE_BFP16,
};

#define SLOT (1ul << 20) /* bytes a rank publishes at a time */
#define MAX_RANKS 64

typedef struct {
    uint64_t kind, bytes, dtype, extra, count; /* extra: reduction or root; count: elements, where all ranks must agree */
} Descriptor;
typedef struct {
    uint32_t arrived, generation;
    pid_t pid[MAX_RANKS];
    Descriptor descriptor[MAX_RANKS];
} Header;
typedef struct Comm {
    uint32_t n, rank;
    Header *header; /* NULL for a communicator of one */
    char *slots;
    char name[64];
    struct Comm *next;
} Comm;
static Comm *comms; /* operators that communicate themselves name their communicator */
enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, OPERATOR, SCATTER, ALL_TO_ALL, BARRIER };
static const char *const kind_names[] = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast", "an operator", "Scatter", "AlltoAll", "Barrier"};

static int32_t broken(int32_t code, const char *text) {
    fail(ACL_ERROR_RT_INTERNAL_ERROR, "HCCL: %s", text);
    fprintf(stderr, "[fake CANN] HCCL: %s\n", text);
    return code;
}

static bool is_dead(pid_t pid) {
    if (!pid) return false; /* has not joined yet */
    if (kill(pid, 0) && errno == ESRCH) return true;
    char path[64], state = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return true;
    if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 0;
    fclose(file);
    return state == 'Z'; /* killed, and its parent has not looked yet */
}

static int32_t barrier(Comm *comm) {
    Header *h = comm->header;
    if (!h) return HCCL_SUCCESS;
    uint32_t generation = __atomic_load_n(&h->generation, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&h->arrived, 1, __ATOMIC_ACQ_REL) == comm->n) {
        __atomic_store_n(&h->arrived, 0, __ATOMIC_RELEASE);
        __atomic_store_n(&h->generation, generation + 1, __ATOMIC_RELEASE);
        return HCCL_SUCCESS;
    }
    const char *limit = getenv("FAKE_HCCL_TIMEOUT");
    time_t end = time(NULL) + (limit ? atoi(limit) : 300);
    for (uint64_t spin = 0; __atomic_load_n(&h->generation, __ATOMIC_ACQUIRE) == generation; spin++) {
        if (spin < 200) continue;
        nanosleep(&(struct timespec){0, spin < 2000 ? 20000 : 500000}, NULL);
        if (spin % 256) continue;
        for (uint32_t i = 0; i < comm->n; i++)
            if (is_dead(h->pid[i])) return broken(HCCL_E_REMOTE, "a rank of the communicator has died");
        if (time(NULL) > end) return broken(HCCL_E_TIMEOUT, "a rank of the communicator did not arrive");
    }
    return HCCL_SUCCESS;
}

/* ---- communicators ---- */
EXPORT int32_t HcclGetRootInfo(void *info) {
    static int serial;
    memset(info, 0, 4096);
    snprintf(info, 64, "/fake_hccl_%d_%d", getpid(), __atomic_add_fetch(&serial, 1, __ATOMIC_SEQ_CST));
    return HCCL_SUCCESS;
}
EXPORT uint32_t HcclGetCommConfigCapability(void) { return 0; }

EXPORT int32_t HcclCommInitRootInfo(uint32_t n, const void *info, uint32_t rank, HcclComm *out) {
    if (!n || n > MAX_RANKS || rank >= n) return broken(HCCL_E_PARA, "communicator: rank or size out of range");
    Comm *comm = calloc(1, sizeof *comm);
    comm->n = n;
    comm->rank = rank;
    strncpy(comm->name, info, sizeof comm->name - 1);
    if (n > 1) {
        size_t size = sizeof(Header) + n * SLOT;
        int fd = shm_open(comm->name, O_CREAT | O_RDWR, 0600);
        void *memory = fd < 0 || ftruncate(fd, (off_t)size) ? MAP_FAILED : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (fd >= 0) close(fd);
        if (memory == MAP_FAILED) return broken(HCCL_E_SYSCALL, "communicator: no shared memory");
        comm->header = memory;
        comm->slots = (char *)memory + sizeof(Header);
        comm->header->pid[rank] = getpid();
        int32_t error = barrier(comm);
        if (!rank) shm_unlink(comm->name);
        if (error) return error;
    }
    comm->next = comms;
    comms = comm;
    *out = comm;
    return HCCL_SUCCESS;
}
EXPORT int32_t HcclCommInitRootInfoConfig(uint32_t n, const void *info, uint32_t rank, const void *config, HcclComm *out) {
    (void)config;
    return HcclCommInitRootInfo(n, info, rank, out);
}
EXPORT int32_t HcclCommDestroy(HcclComm handle) {
    Comm *comm = handle;
    Comm **link = &comms;
    while (*link && *link != comm) link = &(*link)->next;
    if (*link) *link = comm->next;
    if (comm->header) munmap(comm->header, sizeof(Header) + comm->n * SLOT);
    free(comm);
    return HCCL_SUCCESS;
}
EXPORT int32_t HcclGetCommName(HcclComm comm, char *name) {
    strcpy(name, ((Comm *)comm)->name);
    return HCCL_SUCCESS;
}
EXPORT int32_t HcclGetRankSize(HcclComm comm, uint32_t *n) {
    *n = ((Comm *)comm)->n;
    return HCCL_SUCCESS;
}
EXPORT int32_t HcclGetRankId(HcclComm comm, uint32_t *rank) {
    *rank = ((Comm *)comm)->rank;
    return HCCL_SUCCESS;
}
EXPORT int32_t HcclGetCommAsyncError(HcclComm comm, int32_t *error) {
    (void)comm;
    *error = HCCL_SUCCESS;
    return HCCL_SUCCESS;
}
EXPORT const char *HcclGetErrorString(int32_t code) { return code == HCCL_E_REMOTE ? "a rank died" : code == HCCL_E_TIMEOUT ? "timeout" : "fake HCCL error"; }
EXPORT int32_t HcclSetConfig(int32_t config, uint64_t value) { return (void)config, (void)value, HCCL_SUCCESS; }

/* ---- the exchange ---- */
/* Returns n buffers, all[i] holding what rank i sent (the caller frees them), or NULL. */
static char **exchange(Comm *comm, Descriptor mine, const char *send, bool same_size) {
    char **all = calloc(comm->n, sizeof *all);
    if (!comm->header) {
        all[0] = malloc(mine.bytes + 1);
        if (mine.bytes) memcpy(all[0], send, mine.bytes);
        return all;
    }
    Header *h = comm->header;
    h->descriptor[comm->rank] = mine;
    if (barrier(comm)) return NULL;
    uint64_t most = 0;
    Descriptor of[MAX_RANKS];
    for (uint32_t i = 0; i < comm->n; i++) {
        of[i] = h->descriptor[i];
        if (of[i].bytes > most) most = of[i].bytes;
    }
    for (uint32_t i = 0; i < comm->n; i++)
        if (of[i].kind != mine.kind || of[i].dtype != mine.dtype || of[i].extra != mine.extra || of[i].count != mine.count || (same_size && of[i].bytes != mine.bytes)) {
            char text[256];
            snprintf(text, sizeof text, "mismatch: rank %u calls %s of %lu elements, rank %u calls %s of %lu elements (or dtype, reduction or root differ)", comm->rank,
                     kind_names[mine.kind], (unsigned long)mine.count, i, kind_names[of[i].kind % 8], (unsigned long)of[i].count);
            broken(HCCL_E_PARA, text);
            return NULL;
        }
    for (uint32_t i = 0; i < comm->n; i++) all[i] = malloc(of[i].bytes + 1);
    for (uint64_t at = 0; at < most || at == 0; at += SLOT) {
        if (at < mine.bytes) memcpy(comm->slots + comm->rank * SLOT, send + at, mine.bytes - at < SLOT ? mine.bytes - at : SLOT);
        if (barrier(comm)) return NULL;
        for (uint32_t i = 0; i < comm->n; i++)
            if (at < of[i].bytes) memcpy(all[i] + at, comm->slots + i * SLOT, of[i].bytes - at < SLOT ? of[i].bytes - at : SLOT);
        if (barrier(comm)) return NULL;
    }
    return all;
}
static void release(Comm *comm, char **all) {
    for (uint32_t i = 0; i < comm->n; i++) free(all[i]);
    free(all);
}

/* For operators that communicate (numerics in Python): every rank of the named communicator gets what each one sends.
 * tag: the same on all ranks, else an error. Returns the number of ranks, or -1; the buffers are freed by the caller. */
EXPORT int32_t fakecann_exchange(const char *name, uint64_t tag, const void *send, uint64_t bytes, uint64_t *sizes, void **buffers) {
    Comm *comm = comms;
    while (comm && strcmp(comm->name, name)) comm = comm->next;
    if (!comm) {
        broken(HCCL_E_PARA, "an operator names a communicator that does not exist");
        return -1;
    }
    char *packet = malloc(bytes + sizeof bytes);
    memcpy(packet, &bytes, sizeof bytes);
    memcpy(packet + sizeof bytes, send, bytes);
    char **all = exchange(comm, (Descriptor){OPERATOR, bytes + sizeof bytes, tag, 0, 0}, packet, false);
    free(packet);
    if (!all) return -1;
    for (uint32_t i = 0; i < comm->n; i++) {
        memcpy(&sizes[i], all[i], sizeof(uint64_t));
        buffers[i] = memmove(all[i], all[i] + sizeof(uint64_t), sizes[i]);
    }
    free(all);
    return (int32_t)comm->n;
}
EXPORT void fakecann_free(void *buffer) { free(buffer); }

/* ---- reductions ---- */
static size_t width(uint64_t dtype) {
    static const uint8_t bytes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};
    return dtype < sizeof bytes ? bytes[dtype] : 1;
}
static float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}
static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static double load(const char *p, uint64_t i, uint64_t dtype) {
    switch (dtype) {
    case HCCL_DATA_TYPE_FP16: return (double)((const _Float16 *)p)[i];
    case HCCL_DATA_TYPE_FP32: return ((const float *)p)[i];
    case HCCL_DATA_TYPE_FP64: return ((const double *)p)[i];
    default: return from_bf16(((const uint16_t *)p)[i]);
    }
}
static void store(char *p, uint64_t i, uint64_t dtype, double value) {
    switch (dtype) {
    case HCCL_DATA_TYPE_FP16: ((_Float16 *)p)[i] = (_Float16)value; break;
    case HCCL_DATA_TYPE_FP32: ((float *)p)[i] = (float)value; break;
    case HCCL_DATA_TYPE_FP64: ((double *)p)[i] = value; break;
    default: ((uint16_t *)p)[i] = to_bf16((float)value);
    }
}
static int64_t load_integer(const char *p, uint64_t i, uint64_t dtype) {
    switch (dtype) {
    case HCCL_DATA_TYPE_INT8: return ((const int8_t *)p)[i];
    case HCCL_DATA_TYPE_INT16: return ((const int16_t *)p)[i];
    case HCCL_DATA_TYPE_INT32: return ((const int32_t *)p)[i];
    case HCCL_DATA_TYPE_UINT8: return ((const uint8_t *)p)[i];
    default: return ((const int64_t *)p)[i];
    }
}
/* Integers wrap as two's complement does. */
static void reduce_integers(Comm *comm, char **all, uint64_t first, uint64_t n, uint64_t dtype, uint64_t operation, char *out) {
    size_t z = width(dtype);
    for (uint64_t i = 0; i < n; i++) {
        int64_t value = load_integer(all[0], first + i, dtype);
        for (uint32_t r = 1; r < comm->n; r++) {
            int64_t other = load_integer(all[r], first + i, dtype);
            value = operation == HCCL_REDUCE_SUM ? (int64_t)((uint64_t)value + (uint64_t)other)
                    : operation == HCCL_REDUCE_PROD ? (int64_t)((uint64_t)value * (uint64_t)other)
                    : operation == HCCL_REDUCE_MAX ? (value > other ? value : other) : (value < other ? value : other);
        }
        memcpy(out + i * z, &value, z); /* little-endian: the low bytes */
    }
}
/* In rank order with one rounding, so that all ranks get the same bits. NaN wins. */
static void reduce(Comm *comm, char **all, uint64_t first, uint64_t n, uint64_t dtype, uint64_t operation, char *out) {
    if (dtype != HCCL_DATA_TYPE_FP16 && dtype != HCCL_DATA_TYPE_FP32 && dtype != HCCL_DATA_TYPE_FP64 && dtype != HCCL_DATA_TYPE_BFP16) {
        reduce_integers(comm, all, first, n, dtype, operation, out);
        return;
    }
    for (uint64_t i = 0; i < n; i++) {
        double value = load(all[0], first + i, dtype);
        for (uint32_t r = 1; r < comm->n; r++) {
            double other = load(all[r], first + i, dtype);
            value = operation == HCCL_REDUCE_SUM ? value + other : operation == HCCL_REDUCE_PROD ? value * other
                    : value != value || other != other ? value + other
                    : operation == HCCL_REDUCE_MAX ? (value > other ? value : other) : (value < other ? value : other);
        }
        store(out, i, dtype, value);
    }
}

/* ---- collectives: arguments are send, receive, count, dtype, extra, communicator, kind ---- */
static aclError collective(Task *task) {
    uint64_t *a = task->argument, count = a[2], dtype = a[3], extra = a[4], kind = a[6];
    Comm *comm = (Comm *)a[5];
    size_t block = count * width(dtype);
    bool sends_blocks = kind == REDUCE_SCATTER || (kind == SCATTER && comm->rank == extra);
    size_t sent = block * (sends_blocks ? comm->n : kind == SCATTER ? 0 : 1);
    size_t received = block * (kind == ALL_GATHER ? comm->n : 1);
    if (kind == BROADCAST && comm->rank != extra) sent = 0;
    char *send = sent ? device_bytes((void *)a[0], sent) : NULL, *receive = received ? device_bytes((void *)a[1], received) : NULL;
    if ((sent && !send) || (received && !receive)) return HCCL_E_PARA;
    char **all = exchange(comm, (Descriptor){kind, sent, dtype, extra, count}, send, kind != BROADCAST && kind != SCATTER);
    if (!all) return HCCL_E_REMOTE;
    switch (kind) {
    case ALL_REDUCE: reduce(comm, all, 0, count, dtype, extra, receive); break;
    case REDUCE_SCATTER: reduce(comm, all, comm->rank * count, count, dtype, extra, receive); break;
    case ALL_GATHER:
        for (uint32_t i = 0; i < comm->n; i++) memcpy(receive + i * block, all[i], block);
        break;
    case BROADCAST: memcpy(receive, all[extra], block); break;
    case SCATTER: memcpy(receive, all[extra] + comm->rank * block, block); break;
    default: break;
    }
    release(comm, all);
    return HCCL_SUCCESS;
}
static int32_t start(uint64_t kind, const void *send, void *receive, uint64_t count, int dtype, uint64_t extra, HcclComm comm, aclrtStream stream) {
    return launch((Task){collective, {(uint64_t)send, (uint64_t)receive, count, (uint64_t)dtype, extra, (uint64_t)comm, kind}}, stream);
}
EXPORT int32_t HcclAllReduce(void *send, void *receive, uint64_t n, int dtype, int operation, HcclComm comm, aclrtStream stream) {
    ENTER(HcclAllReduce);
    return start(ALL_REDUCE, send, receive, n, dtype, (uint64_t)operation, comm, stream);
}
EXPORT int32_t HcclAllGather(void *send, void *receive, uint64_t n, int dtype, HcclComm comm, aclrtStream stream) {
    ENTER(HcclAllGather);
    return start(ALL_GATHER, send, receive, n, dtype, 0, comm, stream);
}
EXPORT int32_t HcclReduceScatter(void *send, void *receive, uint64_t n, int dtype, int operation, HcclComm comm, aclrtStream stream) {
    ENTER(HcclReduceScatter);
    return start(REDUCE_SCATTER, send, receive, n, dtype, (uint64_t)operation, comm, stream);
}
EXPORT int32_t HcclBroadcast(void *buffer, uint64_t n, int dtype, uint32_t root, HcclComm comm, aclrtStream stream) {
    ENTER(HcclBroadcast);
    return start(BROADCAST, buffer, buffer, n, dtype, root, comm, stream);
}
EXPORT int32_t HcclScatter(void *send, void *receive, uint64_t n, int dtype, uint32_t root, HcclComm comm, aclrtStream stream) {
    ENTER(HcclScatter);
    return start(SCATTER, send, receive, n, dtype, root, comm, stream);
}
EXPORT int32_t HcclBarrier(HcclComm comm, aclrtStream stream) {
    ENTER(HcclBarrier);
    return start(BARRIER, NULL, NULL, 0, HCCL_DATA_TYPE_INT8, 0, comm, stream);
}

/* All-to-all with counts: the counts are host arrays, kept for replay. */
typedef struct {
    const void *send;
    void *receive;
    uint64_t dtype;
    Comm *comm;
    uint64_t send_count[MAX_RANKS], send_at[MAX_RANKS], receive_count[MAX_RANKS], receive_at[MAX_RANKS];
} Exchange;
static aclError all_to_all(Task *task) {
    Exchange *e = (Exchange *)task->argument[0];
    Comm *comm = e->comm;
    size_t z = width(e->dtype), sent = 0, received = 0;
    for (uint32_t i = 0; i < comm->n; i++) {
        size_t a = e->send_count[i] ? (e->send_at[i] + e->send_count[i]) * z : 0, b = e->receive_count[i] ? (e->receive_at[i] + e->receive_count[i]) * z : 0;
        sent = a > sent ? a : sent;
        received = b > received ? b : received;
    }
    char *send = sent ? device_bytes(e->send, sent) : NULL, *receive = received ? device_bytes(e->receive, received) : NULL;
    if ((sent && !send) || (received && !receive)) return HCCL_E_PARA;
    /* One packet: the table of where each rank's part begins and how long it is, then the bytes. */
    size_t table = 2 * comm->n * sizeof(uint64_t);
    char *packet = malloc(table + sent);
    memcpy(packet, e->send_at, table / 2);
    memcpy(packet + table / 2, e->send_count, table / 2);
    if (sent) memcpy(packet + table, send, sent);
    char **all = exchange(comm, (Descriptor){ALL_TO_ALL, table + sent, e->dtype, 0, 0}, packet, false);
    free(packet);
    if (!all) return HCCL_E_REMOTE;
    int32_t error = HCCL_SUCCESS;
    for (uint32_t i = 0; i < comm->n; i++) {
        uint64_t at = ((uint64_t *)all[i])[comm->rank], n = ((uint64_t *)all[i])[comm->n + comm->rank];
        if (n != e->receive_count[i]) error = broken(HCCL_E_PARA, "AlltoAllV: a rank sends another number of elements than this rank expects");
        else if (n) memcpy(receive + e->receive_at[i] * z, all[i] + table + at * z, n * z);
    }
    release(comm, all);
    return error;
}
EXPORT int32_t HcclAlltoAllV(const void *send, const void *send_counts, const void *send_at, int dtype, const void *receive,
                             const void *receive_counts, const void *receive_at, int receive_dtype, HcclComm handle, aclrtStream stream) {
    ENTER(HcclAlltoAllV);
    if (dtype != receive_dtype) return broken(HCCL_E_PARA, "AlltoAllV: two dtypes");
    Comm *comm = handle;
    Exchange *e = calloc(1, sizeof *e);
    *e = (Exchange){.send = send, .receive = (void *)receive, .dtype = (uint64_t)dtype, .comm = comm};
    size_t bytes = comm->n * sizeof(uint64_t);
    memcpy(e->send_count, send_counts, bytes);
    memcpy(e->send_at, send_at, bytes);
    memcpy(e->receive_count, receive_counts, bytes);
    memcpy(e->receive_at, receive_at, bytes);
    return launch((Task){all_to_all, {(uint64_t)e}}, stream);
}
EXPORT int32_t HcclAlltoAll(const void *send, uint64_t n, int dtype, const void *receive, uint64_t receive_n, int receive_dtype, HcclComm handle, aclrtStream stream) {
    ENTER(HcclAlltoAll);
    uint64_t counts[MAX_RANKS], at[MAX_RANKS];
    if (n != receive_n) return broken(HCCL_E_PARA, "AlltoAll: two counts");
    for (uint32_t i = 0; i < ((Comm *)handle)->n; i++) {
        counts[i] = n;
        at[i] = i * n;
    }
    return HcclAlltoAllV(send, counts, at, dtype, receive, counts, at, receive_dtype, handle, stream);
}
