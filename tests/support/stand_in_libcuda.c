/* A stand-in for the GPU driver's library: the same functions, on this machine's memory.

A reserved range has no access rights; what is mapped there is a file in memory, as large as was asked for, which is
lost when its handle is released and it is mapped nowhere. `stand_in_set_capacity` is the size of the "GPU", and
`stand_in_fail` makes one function answer with a code from now on. */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define STEP ((size_t)2 << 20)
#define MOST 64

typedef struct {
    int file;
    size_t size;
} allocation;

typedef struct {
    int type, id;
} location;

typedef struct {
    int type, handle_types;
    location where;
    void *windows;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} kind;

typedef struct {
    location where;
    int flags;
} access_right;

static allocation made[MOST];
static size_t capacity = (size_t)64 << 20, used = 0;
static int depth = 0, num_waits = 0, can_map = 1, failing_code = 0;
static char failing[64] = "";

#define CHECK(name)                                                                                                    \
    if (failing_code && strcmp(failing, name) == 0)                                                                    \
    return failing_code

void stand_in_set_capacity(size_t bytes) { capacity = bytes; }
void stand_in_set_maps(int yes) { can_map = yes; }
size_t stand_in_used(void) { return used; }
int stand_in_depth(void) { return depth; }
int stand_in_waits(void) { return num_waits; }
void stand_in_fail(const char *name, int code) {
    strncpy(failing, name, sizeof failing - 1);
    failing_code = code;
}

int cuGetErrorName(int code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 1 ? "CUDA_ERROR_INVALID_VALUE" : 0;
    return *name ? 0 : 1;
}
int cuInit(unsigned flags) {
    CHECK("cuInit");
    return flags ? 1 : 0;
}
int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 ? 0 : 101;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 102 && device == 0 ? can_map : 0;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &made[device];
    return 0;
}
int cuCtxPushCurrent_v2(void *context) {
    depth++;
    return context ? 0 : 201;
}
int cuCtxPopCurrent_v2(void **context) {
    *context = &made[0];
    return --depth < 0 ? 201 : 0;
}
int cuCtxSynchronize(void) {
    CHECK("cuCtxSynchronize");
    num_waits++;
    return depth ? 0 : 201;
}
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *free = capacity > used ? capacity - used : 0;
    *total = capacity;
    return depth ? 0 : 201;
}
int cuMemGetAllocationGranularity(size_t *step, const kind *what, int option) {
    *step = STEP;
    return what->type == 1 && what->where.type == 1 && option == 0 ? 0 : 1;
}
int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t hint, unsigned long long flags) {
    CHECK("cuMemAddressReserve");
    if (size == 0 || size % STEP || alignment || hint || flags)
        return 1;
    void *found = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = (uint64_t)found;
    return found == MAP_FAILED ? 2 : 0;
}
int cuMemAddressFree(uint64_t address, size_t size) { return munmap((void *)address, size) ? 1 : 0; }
int cuMemCreate(unsigned long long *handle, size_t size, const kind *what, unsigned long long flags) {
    CHECK("cuMemCreate");
    if (size % STEP || what->type != 1 || what->where.type != 1 || what->where.id != 0 || flags)
        return 1;
    if (used + size > capacity)
        return 2;
    for (int place = 1; place < MOST; place++)
        if (!made[place].size) {
            int file = memfd_create("stand_in", 0);
            if (file < 0 || ftruncate(file, (off_t)size))
                return 2;
            made[place] = (allocation){file, size};
            used += size;
            *handle = (unsigned long long)place;
            return 0;
        }
    return 2;
}
int cuMemRelease(unsigned long long handle) {
    CHECK("cuMemRelease");
    if (handle == 0 || handle >= MOST || !made[handle].size)
        return 1;
    used -= made[handle].size;
    close(made[handle].file);
    made[handle] = (allocation){0, 0};
    return 0;
}
int cuMemMap(uint64_t address, size_t size, size_t offset, unsigned long long handle, unsigned long long flags) {
    CHECK("cuMemMap");
    if (offset || flags || handle == 0 || handle >= MOST || made[handle].size != size)
        return 1;
    void *found = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, made[handle].file, 0);
    return found == MAP_FAILED ? 1 : 0;
}
int cuMemSetAccess(uint64_t address, size_t size, const access_right *right, size_t count) {
    CHECK("cuMemSetAccess");
    if (count != 1 || right->where.type != 1 || right->flags != 3)
        return 1;
    return mprotect((void *)address, size, PROT_READ | PROT_WRITE) ? 1 : 0;
}
int cuMemUnmap(uint64_t address, size_t size) {
    CHECK("cuMemUnmap");
    void *found = mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? 1 : 0;
}
