/* A made-up libnvidia-ml.so.1: what the text file `fake-nvml.conf` beside it says, in the calls that nri-gpu makes.
 *
 * The file is read at nvmlInitWithFlags, so a test can change the machine between two refreshes. One thing a line:
 *
 *   driver 580.95.05                      cuda 13000
 *   gpu MINOR DOMAIN BUS MEMORY MAJOR MINOR NUMA MIG PENDING UUID NAME...   (NUMA, MIG -1: not supported)
 *   mig GPU INDEX GI CI START SLICES COMPUTE_SLICES MIB UUID NAME...   (a MIG device; INDEX may leave holes; START: the
 *                                     first of its memory slices, -1: not told)
 *   running GPU INDEX COMPUTE GRAPHICS    (processes on a MIG device; INDEX -1: on the GPU itself; -1: not supported)
 *   pids FIRST                            (of these processes; by default no machine has it)
 *   nvlink GPU LINK REMOTE                (REMOTE: a GPU's index, -1 for a switch)
 *   ancestor A B LEVEL
 *   health GPU REMAP_PENDING REMAP_FAILED CLOCK_REASONS RECOVERY_ACTION FABRIC_STATE
 *   facts GPU ARCHITECTURE COMPUTE_MODE PERSISTENCE ECC ECC_PENDING ADDRESSING   (-1: not supported)
 *   fabric GPU STATE STATUS CLIQUE HEALTH_MASK CLUSTER   (CLUSTER: 32 hex digits)
 *   act FUNCTION GPU DEED CODE            (GPU -1: any) with DEED one of
 *       fail: return CODE      hang, crash      say: print on stdout, then go on
 *       babble: write nonsense of sort CODE into every open file, then go on
 *       rubbish: nvmlDeviceGetName gives bytes that are no text
 *       deny: nvmlDeviceGetP2PStatus says that there is no way
 *
 * A function may be `dlopen`: what is done when the library is loaded.
 *
 * Events are lines `GPU TYPE DATA GI CI` of the file `fake-nvml.events`, each told to every process that waits for it: GPU -1
 * is an event that does not say whose it is. Lines from before the event set was made are of the past.
 *
 * What GPUs do is in the file `fake-nvml.usage`, read again in each call that tells of it, so that it changes under a process
 * that holds NVML started. PLACE: a MIG device's, -1 for the GPU itself; -1 of a number: not supported.
 *
 *   usage GPU PLACE USED TOTAL UTILIZATION MEMORY_RATE TEMPERATURE MILLIWATTS LIMIT SM_MHZ MEMORY_MHZ
 *   process GPU PLACE KIND PID BYTES UTILIZATION   (KIND c, g or m, for MPS; UTILIZATION -1: the driver tells of no process)
 *
 * Every call is noted in `fake-nvml.calls`, unless `fake-nvml.conf` has the line `quiet 1`; what /proc says of the process is in `fake-nvml.environ` and `.status`.
 * Struct layouts and symbol names are those of the public nvml.h. A versioned struct must say a version that is known
 * here; what can only be asked of a whole GPU refuses the handle of a MIG device.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    ARGUMENT_VERSION_MISMATCH = 25,
};
enum { GPUS = 16, LINKS = 18, ACTS = 32, MIGS = 32, MIGS_OF_A_GPU = 7 };
enum { DEVICE_TYPE_GPU = 0, DEVICE_TYPE_SWITCH = 2, P2P_OK = 0, P2P_NOT_SUPPORTED = 5 };
enum { LINK_DOWN = -2, LINK_SWITCH = -1 };

typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

/* Before _v3. */
typedef struct {
    char busId[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId, reserved0, reserved1, reserved2, reserved3;
} nvmlPciInfo_v2_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned int multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount,
        sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
    unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;

/* A GPU, or a MIG device: NVML has one kind of handle for both. */
typedef struct gpu {
    int minor, numa, mig, pending, brand, major_cc, minor_cc;
    unsigned int domain, bus;
    unsigned long long memory;
    char uuid[96], name[96];
    int remote[LINKS];
    int parent, place, gi, ci, start, slices, compute_slices;
    unsigned int engines[6]; /* in the order of nvmlDeviceAttributes_t */
    int compute, graphics;
    int remap_pending, remap_failed, clock_reasons, recovery_action, fabric_state;
    int architecture, compute_mode, persistence, ecc, ecc_pending, addressing;
    int fabric_status;
    unsigned int clique, health_mask;
    unsigned char cluster[16];
    unsigned long long registered;
} *nvmlDevice_t;

static struct gpu gpus[GPUS], migs[MIGS];
static int gpu_count, mig_count, ancestors[GPUS][GPUS], cuda, sessions;
static unsigned int first_pid;
static char driver[80];
static struct {
    char function[64], deed[16];
    int gpu, code;
} acts[ACTS];
static int act_count, quiet;

static int is_mig(nvmlDevice_t device) { return device >= migs && device < migs + MIGS; }

static struct gpu *mig_at(int parent, int place) {
    for (int i = 0; i < mig_count; i++)
        if (migs[i].parent == parent && migs[i].place == place)
            return &migs[i];
    return NULL;
}

/* A MIG device counts as its GPU here. */
static int index_of(nvmlDevice_t device) { return is_mig(device) ? device->parent : (int)(device - gpus); }

/* The file `name` beside this library. */
static const char *beside(const char *name) {
    static char path[4096];
    Dl_info self;
    dladdr((void *)beside, &self);
    snprintf(path, sizeof path, "%s", self.dli_fname);
    char *slash = strrchr(path, '/');
    snprintf(slash + 1, sizeof path - (size_t)(slash + 1 - path), "%s", name);
    return path;
}

static void read_gpu(const char *words) {
    struct gpu *gpu = &gpus[gpu_count++];
    memset(gpu, 0, sizeof *gpu);
    sscanf(words, "gpu %d %x %x %llu %d %d %d %d %d %d %95s %95[^\n]", &gpu->minor, &gpu->domain, &gpu->bus, &gpu->memory,
           &gpu->major_cc, &gpu->minor_cc, &gpu->numa, &gpu->mig, &gpu->pending, &gpu->brand, gpu->uuid,
           gpu->name);
    for (int link = 0; link < LINKS; link++)
        gpu->remote[link] = LINK_DOWN;
    gpu->architecture = gpu->compute_mode = gpu->persistence = gpu->ecc = gpu->addressing = -1;
}

static void read_facts(const char *words) {
    int index;
    if (sscanf(words, "facts %d", &index) != 1)
        return;
    struct gpu *gpu = &gpus[index];
    sscanf(words, "facts %*d %d %d %d %d %d %d", &gpu->architecture, &gpu->compute_mode, &gpu->persistence, &gpu->ecc,
           &gpu->ecc_pending, &gpu->addressing);
}

static void read_fabric(const char *words) {
    int index;
    char cluster[33];
    if (sscanf(words, "fabric %d", &index) != 1)
        return;
    struct gpu *gpu = &gpus[index];
    sscanf(words, "fabric %*d %d %d %u %i %32s", &gpu->fabric_state, &gpu->fabric_status, &gpu->clique,
           (int *)&gpu->health_mask, cluster);
    for (int i = 0; i < 16; i++)
        sscanf(cluster + 2 * i, "%2hhx", &gpu->cluster[i]);
}

static void read_mig(const char *words) {
    struct gpu *mig = &migs[mig_count++];
    mig->compute = mig->graphics = 0;
    sscanf(words, "mig %d %d %d %d %d %d %d %llu %u %u %u %u %u %u %95s %95[^\n]", &mig->parent, &mig->place, &mig->gi,
           &mig->ci, &mig->start, &mig->slices, &mig->compute_slices, &mig->memory, &mig->engines[0], &mig->engines[1],
           &mig->engines[2], &mig->engines[3], &mig->engines[4], &mig->engines[5], mig->uuid, mig->name);
}

static void read_running(const char *words) {
    int index, place, compute, graphics;
    if (sscanf(words, "running %d %d %d %d", &index, &place, &compute, &graphics) != 4)
        return;
    struct gpu *device = place < 0 ? &gpus[index] : mig_at(index, place);
    device->compute = compute;
    device->graphics = graphics;
}

static void read_line(const char *line) {
    int a, b, value;
    if (strncmp(line, "gpu ", 4) == 0)
        read_gpu(line);
    else if (strncmp(line, "mig ", 4) == 0)
        read_mig(line);
    else if (strncmp(line, "running ", 8) == 0)
        read_running(line);
    else if (sscanf(line, "pids %u", &first_pid) == 1)
        return;
    else if (sscanf(line, "quiet %d", &quiet) == 1)
        return;
    else if (strncmp(line, "facts ", 6) == 0)
        read_facts(line);
    else if (strncmp(line, "fabric ", 7) == 0)
        read_fabric(line);
    else if (sscanf(line, "nvlink %d %d %d", &a, &b, &value) == 3)
        gpus[a].remote[b] = value;
    else if (sscanf(line, "ancestor %d %d %d", &a, &b, &value) == 3)
        ancestors[a][b] = ancestors[b][a] = value;
    else if (sscanf(line, "health %d", &a) == 1)
        sscanf(line, "health %*d %d %d %i %d %d", &gpus[a].remap_pending, &gpus[a].remap_failed,
               &gpus[a].clock_reasons, &gpus[a].recovery_action, &gpus[a].fabric_state);
    else if (sscanf(line, "act %63s %d %15s %d", acts[act_count].function, &acts[act_count].gpu, acts[act_count].deed,
                    &acts[act_count].code) == 4)
        act_count++;
    else if (sscanf(line, "driver %79s", driver) != 1)
        sscanf(line, "cuda %d", &cuda);
}

static void read_conf(void) {
    char line[512];
    gpu_count = mig_count = act_count = cuda = quiet = 0;
    first_pid = 1u << 23; /* above PID_MAX_LIMIT */
    memset(ancestors, -1, sizeof ancestors);
    FILE *conf = fopen(beside("fake-nvml.conf"), "re");
    while (conf && fgets(line, sizeof line, conf))
        read_line(line);
    if (conf)
        fclose(conf);
}

static void keep(const char *from, const char *name) {
    char block[8192];
    int in = open(from, O_RDONLY | O_CLOEXEC), out = open(beside(name), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    for (ssize_t length; (length = read(in, block, sizeof block)) > 0;)
        if (write(out, block, (size_t)length) != length)
            abort();
    close(in);
    close(out);
}

static void note(const char *function) {
    if (quiet)
        return;
    FILE *calls = fopen(beside("fake-nvml.calls"), "ae");
    fprintf(calls, "%s\n", function);
    fclose(calls);
}

/* Whether the file has this deed in store for this call; `code` is the deed's. */
static int due(const char *deed, const char *function, int gpu, int *code) {
    for (int i = 0; i < act_count; i++) {
        *code = acts[i].code;
        if (strcmp(acts[i].deed, deed) == 0 && strcmp(acts[i].function, function) == 0 &&
            (acts[i].gpu == -1 || acts[i].gpu == gpu))
            return 1;
    }
    return 0;
}

/* What a library that has lost its mind writes into whatever the process has open. */
static void babble(int sort) {
    static const char *const sorts[] = {
        "nonsense\n", "[]\n", "{\n", "\n", "\xff\xfe\x00\n", "{\"call\": {\"a\": []}}\n{\"inventory\": null}\n",
        "{\"inventory\": {\"gpus\": [{}], \"faults\": 3}}\n", "{\"inventory\": {\"gpus\": Infinity}}\n",
        "{\"inventory\": 1e999}\n", "{}\n",
    };
    enum { SORTS = sizeof sorts / sizeof *sorts, LINE = 2 << 20 };
    char *line = NULL;
    size_t length;
    if (sort < SORTS) {
        length = strlen(sorts[sort]);
    } else { /* a line that nests too deep, then one without an end */
        line = memset(malloc(LINE), sort == SORTS ? '[' : 'x', LINE);
        length = LINE;
        if (sort == SORTS)
            line[length - 1] = '\n';
    }
    for (int fd = 3; fd < 64; fd++)
        if (fcntl(fd, F_GETFD) >= 0 && write(fd, line ? line : sorts[sort], length) < 0)
            continue;
    free(line);
}

/* Notes the call and does what comes before its answer. */
static int play(const char *function, int gpu) {
    int code;
    note(function);
    while (due("hang", function, gpu, &code))
        pause();
    if (due("crash", function, gpu, &code))
        raise(SIGSEGV);
    if (due("babble", function, gpu, &code))
        babble(code);
    if (due("say", function, gpu, &code)) {
        printf("{\"fault\": \"printed by the library\"}\n");
        fflush(stdout);
    }
    return due("fail", function, gpu, &code) ? code : SUCCESS;
}

#define PLAY(gpu)                                                                                                      \
    do {                                                                                                               \
        int code_ = sessions ? play(__func__, gpu) : UNINITIALIZED;                                                    \
        if (code_ != SUCCESS)                                                                                          \
            return code_;                                                                                              \
    } while (0)

static int known(nvmlDevice_t device) {
    return is_mig(device) || (device >= gpus && device < gpus + GPUS);
}

/* A call on a GPU or a MIG device. */
#define PLAY_ON(device)                                                                                                \
    do {                                                                                                               \
        if (!known(device))                                                                                            \
            return INVALID_ARGUMENT;                                                                                   \
        PLAY(index_of(device));                                                                                        \
    } while (0)

/* A call on a whole GPU. */
#define PLAY_GPU(device)                                                                                               \
    do {                                                                                                               \
        PLAY_ON(device);                                                                                               \
        if (is_mig(device))                                                                                            \
            return INVALID_ARGUMENT;                                                                                   \
    } while (0)

static int text(char *to, unsigned int size, const char *from) {
    if (strlen(from) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

static void pci(nvmlPciInfo_t *info, const struct gpu *gpu) {
    memset(info, 0, sizeof *info);
    info->domain = gpu->domain;
    info->bus = gpu->bus;
    info->pciDeviceId = 0x233010de;
    snprintf(info->busId, sizeof info->busId, "%08X:%02X:00.0", gpu->domain, gpu->bus);
    snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "%04X:%02X:00.0", gpu->domain & 0xffff, gpu->bus);
}

__attribute__((constructor)) static void loaded(void) {
    int code;
    read_conf();
    if (due("hang", "dlopen", -1, &code))
        play("dlopen", -1);
}

static void pci_v2(nvmlPciInfo_v2_t *info, const struct gpu *gpu) {
    memset(info, 0, sizeof *info);
    info->domain = gpu->domain;
    info->bus = gpu->bus;
    info->pciDeviceId = 0x233010de;
    snprintf(info->busId, sizeof info->busId, "%04X:%02X:00.0", gpu->domain & 0xffff, gpu->bus);
}

static int init(const char *function) {
    read_conf();
    keep("/proc/self/environ", "fake-nvml.environ");
    keep("/proc/self/status", "fake-nvml.status");
    int code = play(function, -1);
    sessions += code == SUCCESS;
    return code;
}

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    return init(__func__);
}

int nvmlInit_v2(void) { return init(__func__); }

int nvmlShutdown(void) {
    PLAY(-1);
    sessions--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    (void)code;
    return "an error of the fake";
}

int nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    PLAY(-1);
    return text(version, length, driver);
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    PLAY(-1);
    *version = cuda;
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion(int *version) {
    PLAY(-1);
    *version = cuda;
    return SUCCESS;
}

int nvmlDeviceGetCount(unsigned int *count) {
    PLAY(-1);
    *count = (unsigned int)gpu_count;
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    PLAY(-1);
    *count = (unsigned int)gpu_count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    PLAY((int)index);
    if (index >= (unsigned int)gpu_count)
        return INVALID_ARGUMENT;
    *device = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) {
    PLAY((int)index);
    if (index >= (unsigned int)gpu_count)
        return INVALID_ARGUMENT;
    *device = &gpus[index];
    return SUCCESS;
}

/* The next three: what NVIDIA's own tools ask, too. */
int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    for (int i = 0; i < gpu_count; i++)
        if (!strcmp(gpus[i].uuid, uuid)) {
            PLAY(i);
            *device = &gpus[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    PLAY_GPU(device);
    *index = (unsigned int)index_of(device);
    return SUCCESS;
}

int nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *mig) {
    PLAY_ON(device);
    *mig = (unsigned int)is_mig(device);
    return SUCCESS;
}

int nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    PLAY_ON(device);
    return text(uuid, length, device->uuid);
}

int nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    PLAY_ON(device);
    int code;
    return text(name, length, due("rubbish", __func__, index_of(device), &code) ? "\xff\xfe" : device->name);
}

int nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor) {
    PLAY_GPU(device);
    *minor = (unsigned int)device->minor;
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info) {
    PLAY_GPU(device);
    pci(info, device);
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_v2_t *info) {
    PLAY_GPU(device);
    pci_v2(info, device);
    return SUCCESS;
}

int nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_v2_t *info) {
    PLAY_GPU(device);
    pci_v2(info, device);
    return SUCCESS;
}

/* What GPUs do. */
enum { USES = 64, PROCESSES = 2048 };
static struct {
    int gpu, place;
    long long used, total, numbers[7];
} uses[USES];
static struct process {
    int gpu, place, utilization;
    char kind;
    unsigned int pid;
    unsigned long long bytes;
} running[PROCESSES];
static int use_count, running_count;

enum { UTILIZATION, MEMORY_RATE, TEMPERATURE, MILLIWATTS, LIMIT, SM_MHZ, MEMORY_MHZ };

static void read_usage(void) {
    static struct timespec read_at;
    static off_t size;
    struct stat now;
    char line[256];
    const char *path = beside("fake-nvml.usage");
    if (stat(path, &now) || (now.st_size == size && !memcmp(&now.st_mtim, &read_at, sizeof read_at)))
        return;
    FILE *file = fopen(path, "re");
    read_at = now.st_mtim;
    size = now.st_size;
    use_count = running_count = 0;
    while (file && fgets(line, sizeof line, file)) {
        long long *n = uses[use_count].numbers;
        struct process *p = &running[running_count];
        if (use_count < USES && sscanf(line, "usage %d %d %lld %lld %lld %lld %lld %lld %lld %lld %lld", &uses[use_count].gpu,
                                       &uses[use_count].place, &uses[use_count].used, &uses[use_count].total, n, n + 1, n + 2,
                                       n + 3, n + 4, n + 5, n + 6) == 11)
            use_count++;
        else if (running_count < PROCESSES && sscanf(line, "process %d %d %c %u %llu %d", &p->gpu, &p->place, &p->kind, &p->pid,
                                                     &p->bytes, &p->utilization) == 6)
            running_count++;
    }
    if (file)
        fclose(file);
}

static int place_of(nvmlDevice_t device) { return is_mig(device) ? device->place : -1; }

/* The line of this GPU or MIG device, or -1. */
static int use_of(nvmlDevice_t device) {
    read_usage();
    for (int i = 0; i < use_count; i++)
        if (uses[i].gpu == index_of(device) && uses[i].place == place_of(device))
            return i;
    return -1;
}

/* A number of it. */
static int number_of(nvmlDevice_t device, int which, unsigned int *to) {
    int use = use_of(device);
    if (use < 0 || uses[use].numbers[which] < 0)
        return NOT_SUPPORTED;
    *to = (unsigned int)uses[use].numbers[which];
    return SUCCESS;
}

static int memory(nvmlDevice_t device, unsigned long long *total, unsigned long long *used) {
    int use = use_of(device);
    *total = is_mig(device) ? device->memory << 20 : device->memory;
    *used = 0;
    if (use >= 0) {
        if (uses[use].used < 0)
            return NOT_SUPPORTED;
        *total = (unsigned long long)uses[use].total;
        *used = (unsigned long long)uses[use].used;
    }
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *info) {
    PLAY_ON(device);
    int code = memory(device, &info->total, &info->used);
    info->free = info->total - info->used;
    return code;
}

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;
enum { MEMORY_V2 = 0x02000028 };

int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *info) {
    PLAY_ON(device);
    if (info->version != MEMORY_V2)
        return ARGUMENT_VERSION_MISMATCH;
    int code = memory(device, &info->total, &info->used);
    info->reserved = 0;
    info->free = info->total - info->used;
    return code;
}

typedef struct {
    unsigned int gpu, memory;
} nvmlUtilization_t;

int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    PLAY_GPU(device);
    int code = number_of(device, UTILIZATION, &rates->gpu);
    return code == SUCCESS ? number_of(device, MEMORY_RATE, &rates->memory) : code;
}

int nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *temperature) {
    PLAY_GPU(device);
    return sensor ? INVALID_ARGUMENT : number_of(device, TEMPERATURE, temperature);
}

int nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    PLAY_GPU(device);
    return number_of(device, MILLIWATTS, milliwatts);
}

int nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *milliwatts) {
    PLAY_GPU(device);
    return number_of(device, LIMIT, milliwatts);
}

/* nvmlClockType_t: 1 is the streaming multiprocessors', 2 the memory's. */
int nvmlDeviceGetClockInfo(nvmlDevice_t device, int type, unsigned int *mhz) {
    PLAY_GPU(device);
    return type == 1 ? number_of(device, SM_MHZ, mhz) : type == 2 ? number_of(device, MEMORY_MHZ, mhz) : INVALID_ARGUMENT;
}

typedef struct {
    unsigned int pid;
    unsigned long long timeStamp;
    unsigned int smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;

/* As of now, each time. */
int nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned int *room,
                                    unsigned long long since) {
    PLAY_GPU(device);
    struct timespec now;
    unsigned int had = *room, found = 0;
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned long long now_us = (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
    use_of(device);
    for (int i = 0; i < running_count; i++) {
        if (running[i].gpu != index_of(device) || now_us <= since)
            continue;
        if (running[i].utilization < 0)
            return NOT_SUPPORTED;
        if (samples && found < had)
            samples[found] = (nvmlProcessUtilizationSample_t){running[i].pid, now_us, (unsigned int)running[i].utilization, 0, 0, 0};
        found++;
    }
    *room = found;
    return !found ? NOT_FOUND : samples && found <= had ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    PLAY_ON(device);
    *major = gpus[index_of(device)].major_cc;
    *minor = gpus[index_of(device)].minor_cc;
    return SUCCESS;
}

int nvmlDeviceGetBrand(nvmlDevice_t device, int *brand) {
    PLAY_ON(device);
    *brand = gpus[index_of(device)].brand;
    if (*brand < 0)
        return NOT_SUPPORTED;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    PLAY_GPU(device);
    if (device->mig < 0)
        return NOT_SUPPORTED;
    *current = (unsigned int)device->mig;
    *pending = (unsigned int)device->pending;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) {
    PLAY_GPU(device);
    *count = device->mig == 1 ? MIGS_OF_A_GPU : 0; /* "zero if MIG is not supported or enabled" (nvml.h) */
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int place, nvmlDevice_t *mig) {
    PLAY_GPU(device);
    if (device->mig != 1)
        return NOT_SUPPORTED;
    if ((*mig = mig_at(index_of(device), (int)place)))
        return SUCCESS;
    return place < MIGS_OF_A_GPU ? NOT_FOUND : INVALID_ARGUMENT;
}

/* Version 2 and 3 of the struct are alike. */
typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

/* Those of `fake-nvml.usage`, or SUCCESS and none. */
static int used_by(nvmlDevice_t device, char kind, unsigned int *room, nvmlProcessInfo_t *infos) {
    unsigned int had = *room, found = 0;
    use_of(device);
    for (int i = 0; i < running_count; i++)
        if (running[i].gpu == index_of(device) && running[i].place == place_of(device) && running[i].kind == kind) {
            if (infos && found < had)
                infos[found] = (nvmlProcessInfo_t){running[i].pid, running[i].bytes, -1U, -1U};
            found++;
        }
    *room = found;
    return found > had ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *room, nvmlProcessInfo_t *infos) {
    PLAY_ON(device);
    return used_by(device, 'm', room, infos);
}

static int processes(int count, unsigned int *room, nvmlProcessInfo_t *infos) {
    if (count < 0)
        return NOT_SUPPORTED;
    unsigned int had = *room;
    *room = (unsigned int)count;
    if (had < *room)
        return INSUFFICIENT_SIZE;
    for (int i = 0; i < count; i++)
        infos[i] = (nvmlProcessInfo_t){.pid = first_pid + (unsigned int)i, .gpuInstanceId = -1U, .computeInstanceId = -1U};
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *room, nvmlProcessInfo_t *infos) {
    PLAY_ON(device);
    unsigned int had = *room;
    int code = used_by(device, 'c', room, infos);
    if (*room)
        return code;
    *room = had;
    return processes(device->compute, room, infos);
}

int nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *room, nvmlProcessInfo_t *infos) {
    PLAY_ON(device);
    return processes(device->compute, room, infos);
}

/* The first of them computes as well. */
int nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *room, nvmlProcessInfo_t *infos) {
    PLAY_ON(device);
    unsigned int had = *room;
    int code = used_by(device, 'g', room, infos);
    if (*room)
        return code;
    *room = had;
    return processes(device->graphics, room, infos);
}

int nvmlDeviceGetGraphicsRunningProcesses_v2(nvmlDevice_t device, unsigned int *room, nvmlProcessInfo_t *infos) {
    PLAY_ON(device);
    return processes(device->graphics, room, infos);
}

/* Before MIG. */
typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;

static int processes_v1(int running, unsigned int *room, nvmlProcessInfo_v1_t *infos) {
    if (running < 0)
        return NOT_SUPPORTED;
    unsigned int had = *room;
    *room = (unsigned int)running;
    if (had < *room)
        return INSUFFICIENT_SIZE;
    for (int i = 0; i < running; i++)
        infos[i] = (nvmlProcessInfo_v1_t){.pid = first_pid + (unsigned int)i};
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *room, nvmlProcessInfo_v1_t *infos) {
    PLAY_ON(device);
    return processes_v1(device->compute, room, infos);
}

int nvmlDeviceGetGraphicsRunningProcesses(nvmlDevice_t device, unsigned int *room, nvmlProcessInfo_v1_t *infos) {
    PLAY_ON(device);
    return processes_v1(device->graphics, room, infos);
}

int nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id) {
    PLAY_ON(device);
    if (!is_mig(device))
        return INVALID_ARGUMENT;
    *id = (unsigned int)device->gi;
    return SUCCESS;
}

int nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id) {
    PLAY_ON(device);
    if (!is_mig(device))
        return INVALID_ARGUMENT;
    *id = (unsigned int)device->ci;
    return SUCCESS;
}

int nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) {
    PLAY_ON(device);
    if (!is_mig(device))
        return NOT_SUPPORTED;
    *attributes = (nvmlDeviceAttributes_t){
        .multiprocessorCount = device->engines[0],
        .sharedCopyEngineCount = device->engines[1],
        .sharedDecoderCount = device->engines[2],
        .sharedEncoderCount = device->engines[3],
        .sharedJpegCount = device->engines[4],
        .sharedOfaCount = device->engines[5],
        .gpuInstanceSliceCount = (unsigned int)device->slices,
        .computeInstanceSliceCount = (unsigned int)device->compute_slices,
        .memorySizeMB = device->memory,
    };
    return SUCCESS;
}

/* What NVIDIA's DRA driver walks: profiles, and the instances of a GPU. There is a profile for each size that some MIG
 * device of the GPU has; the handle of an instance is that of its MIG device.
 */
enum { INSTANCE_PROFILES = 5 };
static const struct {
    int slices;
    unsigned int id;
} instance_profiles[INSTANCE_PROFILES] = {{1, 19}, {2, 14}, {3, 9}, {4, 5}, {7, 0}}; /* NVML_GPU_INSTANCE_PROFILE_... */

typedef struct {
    unsigned int id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, copyEngineCount, decoderCount,
        encoderCount, jpegCount, ofaCount;
    unsigned long long memorySizeMB;
} nvmlGpuInstanceProfileInfo_t;

typedef struct {
    unsigned int start, size;
} nvmlPlacement_t; /* of either kind of instance */

typedef struct {
    nvmlDevice_t device;
    unsigned int id, profileId;
    nvmlPlacement_t placement;
} nvmlGpuInstanceInfo_t;

typedef struct {
    unsigned int id, sliceCount, instanceCount, multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount,
        sharedEncoderCount, sharedJpegCount, sharedOfaCount;
} nvmlComputeInstanceProfileInfo_t;

typedef struct {
    nvmlDevice_t device, gpuInstance;
    unsigned int id, profileId;
    nvmlPlacement_t placement;
} nvmlComputeInstanceInfo_t;

static unsigned int profile_of(int slices) {
    unsigned int profile = 0;
    while (profile < INSTANCE_PROFILES && instance_profiles[profile].slices != slices)
        profile++;
    return profile;
}

/* The first MIG device of the GPU of that profile, or NULL. */
static struct gpu *of_profile(nvmlDevice_t device, unsigned int profile) {
    for (int i = 0; i < mig_count; i++)
        if (migs[i].parent == index_of(device) && profile_of(migs[i].slices) == profile)
            return &migs[i];
    return NULL;
}

int nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int profile, nvmlGpuInstanceProfileInfo_t *info) {
    PLAY_GPU(device);
    struct gpu *mig = profile < INSTANCE_PROFILES ? of_profile(device, profile) : NULL;
    if (!mig)
        return NOT_SUPPORTED;
    *info = (nvmlGpuInstanceProfileInfo_t){
        .id = instance_profiles[profile].id,
        .sliceCount = (unsigned int)mig->slices,
        .instanceCount = MIGS_OF_A_GPU,
        .multiprocessorCount = mig->engines[0],
        .copyEngineCount = mig->engines[1],
        .decoderCount = mig->engines[2],
        .encoderCount = mig->engines[3],
        .jpegCount = mig->engines[4],
        .ofaCount = mig->engines[5],
        .memorySizeMB = mig->memory,
    };
    return SUCCESS;
}

int nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned int id, nvmlPlacement_t *placements,
                                                  unsigned int *count) {
    PLAY_GPU(device);
    *count = 0;
    for (int i = 0; i < mig_count; i++)
        if (migs[i].parent == index_of(device) && instance_profiles[profile_of(migs[i].slices)].id == id) {
            if (placements)
                placements[*count] = (nvmlPlacement_t){(unsigned int)migs[i].start, (unsigned int)migs[i].slices};
            ++*count;
        }
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlDevice_t *instance) {
    PLAY_GPU(device);
    for (int i = 0; i < mig_count; i++)
        if (migs[i].parent == index_of(device) && migs[i].gi == (int)id) {
            *instance = &migs[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlGpuInstanceGetInfo(nvmlDevice_t instance, nvmlGpuInstanceInfo_t *info) {
    PLAY_ON(instance);
    if (instance->start < 0)
        return NOT_SUPPORTED;
    *info = (nvmlGpuInstanceInfo_t){
        .device = &gpus[index_of(instance)],
        .id = (unsigned int)instance->gi,
        .profileId = instance_profiles[profile_of(instance->slices)].id,
        .placement = {(unsigned int)instance->start, (unsigned int)instance->slices},
    };
    return SUCCESS;
}

int nvmlGpuInstanceGetComputeInstanceById(nvmlDevice_t instance, unsigned int id, nvmlDevice_t *found) {
    PLAY_ON(instance);
    for (int i = 0; i < mig_count; i++)
        if (migs[i].parent == instance->parent && migs[i].gi == instance->gi && migs[i].ci == (int)id) {
            *found = &migs[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlDevice_t instance, unsigned int profile, unsigned int engines,
                                                 nvmlComputeInstanceProfileInfo_t *info) {
    PLAY_ON(instance);
    if (engines || profile != profile_of(instance->compute_slices))
        return NOT_SUPPORTED;
    *info = (nvmlComputeInstanceProfileInfo_t){.id = profile, .sliceCount = (unsigned int)instance->compute_slices};
    return SUCCESS;
}

int nvmlComputeInstanceGetInfo_v2(nvmlDevice_t instance, nvmlComputeInstanceInfo_t *info) {
    PLAY_ON(instance);
    *info = (nvmlComputeInstanceInfo_t){
        .device = &gpus[index_of(instance)],
        .gpuInstance = instance,
        .id = (unsigned int)instance->ci,
        .profileId = profile_of(instance->compute_slices),
        .placement = {0, (unsigned int)instance->compute_slices},
    };
    return SUCCESS;
}

int nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int size, unsigned long *nodes, unsigned int scope) {
    (void)scope;
    PLAY_GPU(device);
    if (device->numa < 0)
        return NOT_SUPPORTED;
    memset(nodes, 0, size * sizeof *nodes);
    nodes[0] = 1UL << device->numa;
    return SUCCESS;
}

int nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, int *level) {
    PLAY_GPU(a);
    *level = ancestors[index_of(a)][index_of(b)];
    return *level < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, unsigned int *active) {
    PLAY_GPU(device);
    if (link >= LINKS)
        return INVALID_ARGUMENT;
    *active = device->remote[link] != LINK_DOWN;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *info) {
    PLAY_GPU(device);
    struct gpu nvswitch = {.bus = 0xf0 + link % 4};
    pci(info, device->remote[link] == LINK_SWITCH ? &nvswitch : &gpus[device->remote[link]]);
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned int link, nvmlPciInfo_v2_t *info) {
    PLAY_GPU(device);
    struct gpu nvswitch = {.bus = 0xf0 + link % 4};
    pci_v2(info, device->remote[link] == LINK_SWITCH ? &nvswitch : &gpus[device->remote[link]]);
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, int *type) {
    PLAY_GPU(device);
    *type = device->remote[link] == LINK_SWITCH ? DEVICE_TYPE_SWITCH : DEVICE_TYPE_GPU;
    return SUCCESS;
}

int nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, int index, int *status) {
    int code;
    (void)b;
    (void)index;
    PLAY_GPU(a);
    *status = due("deny", __func__, index_of(a), &code) ? P2P_NOT_SUPPORTED : P2P_OK;
    return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device) {
    unsigned int domain, bus;
    if (sscanf(bus_id, "%x:%x:", &domain, &bus) != 2)
        return INVALID_ARGUMENT;
    for (int i = 0; i < gpu_count; i++)
        if (gpus[i].domain == domain && gpus[i].bus == bus) {
            PLAY(i);
            *device = &gpus[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device) {
    unsigned int domain, bus;
    if (sscanf(bus_id, "%x:%x:", &domain, &bus) != 2)
        return INVALID_ARGUMENT;
    for (int i = 0; i < gpu_count; i++)
        if (gpus[i].domain == domain && gpus[i].bus == bus) {
            PLAY(i);
            *device = &gpus[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                              unsigned int *pending, unsigned int *failed) {
    PLAY_GPU(device);
    for (int i = 0; i < mig_count; i++)
        if (migs[i].parent == index_of(device))
            return NOT_SUPPORTED; /* while it has instances */
    if (device->remap_pending < 0)
        return NOT_SUPPORTED; /* before Ampere */
    *corrected = *uncorrected = 0;
    *pending = (unsigned int)device->remap_pending;
    *failed = (unsigned int)device->remap_failed;
    return SUCCESS;
}

static int clock_reasons(nvmlDevice_t device, unsigned long long *reasons) {
    *reasons = (unsigned long long)device->clock_reasons;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons) {
    PLAY_GPU(device);
    return clock_reasons(device, reasons);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) {
    PLAY_GPU(device);
    return clock_reasons(device, reasons);
}

typedef struct {
    unsigned int fieldId, scopeId;
    long long timestamp, latencyUsec;
    int valueType, nvmlReturn;
    union {
        double dVal;
        unsigned int uiVal;
        unsigned long long ullVal;
    } value;
} nvmlFieldValue_t;

int nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    PLAY_GPU(device);
    for (int i = 0; i < count; i++) {
        int known = values[i].fieldId == 230 && device->recovery_action >= 0;
        values[i].nvmlReturn = known ? SUCCESS : NOT_SUPPORTED;
        values[i].value.uiVal = known ? (unsigned int)device->recovery_action : 0;
    }
    return SUCCESS;
}

/* Version 3 is version 2 with a summary behind it. */
typedef struct {
    unsigned int version;
    unsigned char clusterUuid[16];
    int status;
    unsigned int cliqueId;
    unsigned char state;
    unsigned int healthMask;
    unsigned char healthSummary;
} nvmlGpuFabricInfo_v3_t;
enum { FABRIC_INFO_V2 = 0x02000024, FABRIC_INFO_V3 = 0x03000028 };

int nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v3_t *info) {
    PLAY_GPU(device);
    if (info->version != FABRIC_INFO_V2 && info->version != FABRIC_INFO_V3)
        return ARGUMENT_VERSION_MISMATCH;
    memcpy(info->clusterUuid, device->cluster, sizeof device->cluster);
    info->status = device->fabric_status;
    info->cliqueId = device->clique;
    info->state = (unsigned char)device->fabric_state;
    info->healthMask = device->health_mask;
    if (info->version == FABRIC_INFO_V3)
        info->healthSummary = 0;
    return SUCCESS;
}

/* Of drivers before R550; it has no version. */
typedef struct {
    unsigned char clusterUuid[16];
    int status;
    unsigned int cliqueId;
    unsigned char state;
} nvmlGpuFabricInfo_t;

int nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info) {
    PLAY_GPU(device);
    memcpy(info->clusterUuid, device->cluster, sizeof device->cluster);
    info->status = device->fabric_status;
    info->cliqueId = device->clique;
    info->state = (unsigned char)device->fabric_state;
    return SUCCESS;
}

static int told(int value, unsigned int *to) {
    if (value < 0)
        return NOT_SUPPORTED;
    *to = (unsigned int)value;
    return SUCCESS;
}

int nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned int *architecture) {
    PLAY_GPU(device);
    return told(device->architecture, architecture);
}

int nvmlDeviceGetComputeMode(nvmlDevice_t device, unsigned int *mode) {
    PLAY_GPU(device);
    return told(device->compute_mode, mode);
}

int nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned int *mode) {
    PLAY_GPU(device);
    return told(device->persistence, mode);
}

int nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    PLAY_GPU(device);
    return told(device->ecc, current) == SUCCESS ? told(device->ecc_pending, pending) : NOT_SUPPORTED;
}

typedef struct {
    unsigned int version, value;
} nvmlDeviceAddressingMode_t;
enum { ADDRESSING_MODE_V1 = 0x01000008 };

int nvmlDeviceGetAddressingMode(nvmlDevice_t device, nvmlDeviceAddressingMode_t *mode) {
    PLAY_GPU(device);
    if (mode->version != ADDRESSING_MODE_V1)
        return ARGUMENT_VERSION_MISMATCH;
    return told(device->addressing, &mode->value);
}

/* One event set at a time is enough for whoever asks. */
static struct {
    long read;
} event_set;

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

int nvmlEventSetCreate(void **set) {
    PLAY(-1);
    FILE *events = fopen(beside("fake-nvml.events"), "re");
    event_set.read = 0;
    if (events) {
        fseek(events, 0, SEEK_END);
        event_set.read = ftell(events);
        fclose(events);
    }
    for (int i = 0; i < gpu_count; i++)
        gpus[i].registered = 0;
    *set = &event_set;
    return SUCCESS;
}

int nvmlEventSetFree(void *set) {
    (void)set;
    PLAY(-1);
    return SUCCESS;
}

int nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    PLAY_GPU(device);
    *types = 0xff9f;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, void *set) {
    (void)set;
    PLAY_GPU(device);
    device->registered |= types;
    return SUCCESS;
}

/* The next event that somebody registered for, if there is one. */
static int next_event(nvmlEventData_t *data) {
    int gpu, found = 0;
    char line[128];
    FILE *events = fopen(beside("fake-nvml.events"), "re");
    if (!events)
        return 0;
    fseek(events, event_set.read, SEEK_SET);
    while (!found && fgets(line, sizeof line, events)) {
        if (!strchr(line, '\n')) /* still being written */
            break;
        event_set.read += (long)strlen(line);
        if (sscanf(line, "%d %llu %llu %u %u", &gpu, &data->eventType, &data->eventData, &data->gpuInstanceId,
                   &data->computeInstanceId) != 5)
            continue;
        data->device = gpu < 0 ? NULL : &gpus[gpu];
        found = gpu < 0 || (gpus[gpu].registered & data->eventType);
    }
    fclose(events);
    return found;
}

/* Before MIG. */
typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
} nvmlEventData_v1_t;

int nvmlEventSetWait(void *set, nvmlEventData_v1_t *data, unsigned int timeout_ms) {
    (void)set;
    PLAY(-1);
    for (unsigned int waited = 0; waited <= timeout_ms; waited += 10) {
        nvmlEventData_t newer;
        if (next_event(&newer)) {
            *data = (nvmlEventData_v1_t){newer.device, newer.eventType, newer.eventData};
            return SUCCESS;
        }
        nanosleep(&(struct timespec){.tv_nsec = 10 * 1000 * 1000}, NULL);
    }
    return TIMEOUT;
}

int nvmlEventSetWait_v2(void *set, nvmlEventData_t *data, unsigned int timeout_ms) {
    (void)set;
    PLAY(-1);
    for (unsigned int waited = 0; waited <= timeout_ms; waited += 10) {
        if (next_event(data))
            return SUCCESS;
        nanosleep(&(struct timespec){.tv_nsec = 10 * 1000 * 1000}, NULL);
    }
    return TIMEOUT;
}
