/* Reads and keeps the description of the machine; nothing here knows NVML's structures. */
#define _GNU_SOURCE
#include "machine.h"

#include <ctype.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>

enum { MAX_ENTRIES = 16384, KEY_SIZE = 96, VALUE_SIZE = 192, NO_GPU = -1, NO_MIG = -1 };

struct entry {
    int gpu, mig; /* NO_GPU: the system */
    char key[KEY_SIZE];
    char value[VALUE_SIZE];
};

static struct entry *entries;
static int entry_count;
static bool present[MAX_GPUS];
static struct device gpus[MAX_GPUS], migs[MAX_GPUS][MAX_MIGS];
static unsigned calls[MAX_GPUS]; /* since the description was last read */
static int initialised;
static char loaded_path[4096];
static struct stat loaded_stat;
static double started_s;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double monotonic_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

uint64_t machine_wall_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

static const struct {
    const char *name;
    int code;
} errors[] = {
    {"UNINITIALIZED", 1},     {"INVALID_ARGUMENT", 2},     {"NOT_SUPPORTED", 3},
    {"NO_PERMISSION", 4},     {"NOT_FOUND", 6},            {"INSUFFICIENT_SIZE", 7},
    {"DRIVER_NOT_LOADED", 9}, {"TIMEOUT", 10},             {"IRQ_ISSUE", 11},
    {"GPU_IS_LOST", 15},      {"RESET_REQUIRED", 16},      {"OPERATING_SYSTEM", 17},
    {"IN_USE", 19},           {"LIB_RM_VERSION_MISMATCH", 18}, {"MEMORY", 20},
    {"NO_DATA", 21},          {"NOT_READY", 27},           {"UNKNOWN", 999},
};

Result machine_error(const char *name) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (!strcmp(errors[i].name, name)) return (Result)errors[i].code;
    return NVML_UNKNOWN;
}

static char *trim(char *text) {
    while (isspace((unsigned char)*text)) text++;
    char *end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1])) *--end = 0;
    return text;
}

/* Copies value, with every {i} as the GPU's index in hexadecimal. */
static void expand_index(char *out, size_t size, const char *value, int index) {
    size_t used = 0;
    while (*value && used + 1 < size) {
        if (!strncmp(value, "{i}", 3)) {
            used += (size_t)snprintf(out + used, size - used, "%x", index < 0 ? 0 : index);
            value += 3;
        } else {
            out[used++] = *value++;
        }
    }
    out[used < size ? used : size - 1] = 0;
}

static bool is_list(const char *key) { return !strcmp(key, "process") || !strcmp(key, "event"); }

static void store(int gpu, int mig, const char *key, const char *value) {
    /* A later line replaces an earlier one, so that overrides can be appended; lists grow, and "none" empties them. */
    bool list = is_list(key);
    for (int i = 0; i < entry_count; i++) {
        struct entry *entry = &entries[i];
        if (entry->gpu != gpu || entry->mig != mig || strcmp(entry->key, key)) continue;
        if (!list) {
            expand_index(entry->value, VALUE_SIZE, value, gpu);
            return;
        }
        if (!strcmp(value, "none")) entry->key[0] = 0;
    }
    if (entry_count == MAX_ENTRIES || (list && !strcmp(value, "none"))) return;
    struct entry *entry = &entries[entry_count++];
    entry->gpu = gpu;
    entry->mig = mig;
    snprintf(entry->key, KEY_SIZE, "%s", key);
    expand_index(entry->value, VALUE_SIZE, value, gpu);
}

/* "link.0-3.remote_pci" stands for four keys. */
static void store_range(int gpu, int mig, const char *key, const char *value) {
    for (const char *dot = strchr(key, '.'); dot; dot = strchr(dot + 1, '.')) {
        int first, last, length = 0;
        if (sscanf(dot + 1, "%d-%d%n", &first, &last, &length) == 2 && length) {
            for (int n = first; n <= last; n++) {
                char one[KEY_SIZE];
                snprintf(one, sizeof one, "%.*s.%d%s", (int)(dot - key), key, n, dot + 1 + length);
                store(gpu, mig, one, value);
            }
            return;
        }
    }
    store(gpu, mig, key, value);
}

static bool load(const char *path) {
    FILE *file = fopen(path, "re");
    if (!file) return false;
    char line[1536];
    int first = NO_GPU, last = NO_GPU, mig = NO_MIG;
    bool system_section = true;
    while (fgets(line, sizeof line, file)) {
        char *text = trim(line);
        if (!*text || *text == '#') continue;
        if (*text == '[') {
            mig = NO_MIG;
            system_section = false;
            if (sscanf(text, "[gpu %d-%d]", &first, &last) == 2) {
            } else if (sscanf(text, "[mig %d %d]", &first, &mig) == 2) {
                last = first;
            } else if (sscanf(text, "[gpu %d]", &first) == 1) {
                last = first;
            } else {
                system_section = true;
            }
            for (int gpu = first; !system_section && gpu <= last && gpu < MAX_GPUS; gpu++) present[gpu] = true;
            continue;
        }
        char *equals = strchr(text, '=');
        if (!equals) continue;
        *equals = 0;
        char *key = trim(text), *value = trim(equals + 1);
        if (!strcmp(key, "include")) {
            char other[4096];
            const char *slash = strrchr(path, '/');
            int folder = slash && *value != '/' ? (int)(slash + 1 - path) : 0;
            snprintf(other, sizeof other, "%.*s%s", folder, path, value);
            load(other);
        } else if (system_section)
            store_range(NO_GPU, NO_MIG, key, value);
        else
            for (int gpu = first; gpu <= last && gpu < MAX_GPUS; gpu++) store_range(gpu, mig, key, value);
    }
    fclose(file);
    return true;
}

/* Called with the lock held. False if there is no description to read. */
static bool refresh(void) {
    const char *path = getenv("FAKE_NVML_MACHINE");
    struct stat now;
    if (!path || stat(path, &now)) return false;
    if (entries && !strcmp(path, loaded_path) && now.st_ino == loaded_stat.st_ino && now.st_size == loaded_stat.st_size &&
        now.st_mtim.tv_sec == loaded_stat.st_mtim.tv_sec && now.st_mtim.tv_nsec == loaded_stat.st_mtim.tv_nsec)
        return true;
    if (!entries) entries = calloc(MAX_ENTRIES, sizeof *entries);
    if (strcmp(path, loaded_path)) started_s = monotonic_s();
    entry_count = 0;
    memset(present, 0, sizeof present);
    memset(calls, 0, sizeof calls);
    if (!load(path)) return false;
    snprintf(loaded_path, sizeof loaded_path, "%s", path);
    loaded_stat = now;
    for (int gpu = 0; gpu < MAX_GPUS; gpu++) {
        gpus[gpu] = (struct device){gpu, NO_MIG};
        for (int mig = 0; mig < MAX_MIGS; mig++) migs[gpu][mig] = (struct device){gpu, mig};
    }
    return true;
}

static const char *find(int gpu, int mig, const char *key) {
    for (int i = entry_count - 1; i >= 0; i--)
        if (entries[i].gpu == gpu && entries[i].mig == mig && !strcmp(entries[i].key, key)) return entries[i].value;
    return NULL;
}

const char *machine_text(Device device, const char *key) {
    if (!device) return find(NO_GPU, NO_MIG, key);
    return find(device->gpu, device->mig, key);
}

static bool is_yes(const char *value) { return value && !strcmp(value, "yes"); }

static bool enumerated(int gpu) {
    const char *visible = find(gpu, NO_MIG, "visible");
    return present[gpu] && !(visible && !strcmp(visible, "no"));
}

int machine_gpu_count(void) {
    int count = 0;
    for (int gpu = 0; gpu < MAX_GPUS; gpu++) count += enumerated(gpu);
    return count;
}

Device machine_gpu(unsigned index) {
    for (int gpu = 0; gpu < MAX_GPUS; gpu++)
        if (enumerated(gpu) && index-- == 0) return &gpus[gpu];
    return NULL;
}

int machine_index(Device device) {
    int index = 0;
    for (int gpu = 0; gpu < device->gpu; gpu++) index += enumerated(gpu);
    return index;
}

Device machine_mig(Device gpu, unsigned index) {
    if (gpu->mig != NO_MIG || index >= MAX_MIGS || !find(gpu->gpu, (int)index, "uuid")) return NULL;
    return &migs[gpu->gpu][index];
}

bool machine_lost(Device device) {
    if (is_yes(find(device->gpu, NO_MIG, "lost"))) return true;
    const char *after = find(device->gpu, NO_MIG, "lost_after");
    return after && calls[device->gpu] > (unsigned)atoi(after);
}

/* The value of "<what>.<function>", of the device first, then of the system. */
static const char *directive(const char *what, const char *function, Device device) {
    char key[KEY_SIZE];
    snprintf(key, sizeof key, "%s.%s", what, function);
    const char *value = device ? find(device->gpu, NO_MIG, key) : NULL;
    return value ? value : find(NO_GPU, NO_MIG, key);
}

Result machine_enter(const char *function, Device device) {
    pthread_mutex_lock(&lock);
    bool described = refresh();
    /* A call hangs for as long as the description says so. */
    while (described && is_yes(directive("hang", function, device))) {
        pthread_mutex_unlock(&lock);
        nanosleep(&(struct timespec){0, 5000000}, NULL);
        pthread_mutex_lock(&lock);
        described = refresh();
    }
    Result result = NVML_SUCCESS;
    const char *failure = described ? directive("fail", function, device) : NULL;
    if (failure && !strcmp(failure, "no")) failure = NULL;
    if (!initialised)
        result = NVML_UNINITIALIZED;
    else if (!described)
        result = NVML_DRIVER_NOT_LOADED;
    else if (failure)
        result = machine_error(failure);
    else if (device) {
        calls[device->gpu]++;
        if (!enumerated(device->gpu) || machine_lost(device)) result = NVML_GPU_IS_LOST;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

bool machine_initialise(Result *result) {
    pthread_mutex_lock(&lock);
    bool described = refresh();
    while (described && is_yes(directive("hang", "nvmlInit", NULL))) {
        pthread_mutex_unlock(&lock);
        nanosleep(&(struct timespec){0, 5000000}, NULL);
        pthread_mutex_lock(&lock);
        described = refresh();
    }
    const char *failure = described ? directive("fail", "nvmlInit", NULL) : NULL;
    *result = !described ? NVML_DRIVER_NOT_LOADED : failure ? machine_error(failure) : NVML_SUCCESS;
    if (*result == NVML_SUCCESS) initialised++;
    pthread_mutex_unlock(&lock);
    return *result == NVML_SUCCESS;
}

bool machine_shutdown(void) {
    pthread_mutex_lock(&lock);
    bool was = initialised > 0;
    if (was) initialised--;
    pthread_mutex_unlock(&lock);
    return was;
}

static Result parse_number(const char *text, double *value) {
    if (*text == '!') return machine_error(text + 1);
    char *end;
    double number = text[0] == '0' && text[1] == 'x' ? (double)strtoull(text, &end, 16) : strtod(text, &end);
    if (!strncmp(end, "KiB", 3)) number *= 1024.0, end += 3;
    if (!strncmp(end, "MiB", 3)) number *= 1048576.0, end += 3;
    if (!strncmp(end, "GiB", 3)) number *= 1073741824.0, end += 3;
    double rate;
    if (*end == '+' && sscanf(end, "+%lf/s", &rate) == 1) number += rate * (monotonic_s() - started_s);
    *value = number;
    return NVML_SUCCESS;
}

Result machine_field(Device device, const char *key, int n, double *value) {
    const char *text = machine_text(device, key);
    if (!text) return NVML_NOT_SUPPORTED;
    if (*text == '!') return machine_error(text + 1);
    for (; n > 0; n--) {
        while (*text && !isspace((unsigned char)*text)) text++;
        while (isspace((unsigned char)*text)) text++;
    }
    return *text ? parse_number(text, value) : NVML_NOT_SUPPORTED;
}

Result machine_number(Device device, const char *key, double *value) { return machine_field(device, key, 0, value); }

static bool parse_process(const char *text, struct process *process) {
    /* pid:MiB[:type[:gpu instance:compute instance[:sm %:memory %]]]; MiB "?" is unknown */
    char copy[VALUE_SIZE], *rest = copy, *part[7] = {0};
    snprintf(copy, sizeof copy, "%s", text);
    int parts = 0;
    while (parts < 7 && (part[parts] = strsep(&rest, ":"))) parts++;
    if (parts < 2) return false;
    *process = (struct process){.type = 'C', .gpu_instance = UINT32_MAX, .compute_instance = UINT32_MAX,
                                .sm_pct = UINT32_MAX, .memory_pct = UINT32_MAX};
    process->pid = (unsigned)strtoul(part[0], NULL, 10);
    process->used_bytes = part[1][0] == '?' ? UINT64_MAX : strtoull(part[1], NULL, 10) << 20;
    if (parts > 2 && *part[2]) process->type = *part[2];
    if (parts > 4 && *part[3]) process->gpu_instance = (unsigned)atoi(part[3]);
    if (parts > 4 && *part[4]) process->compute_instance = (unsigned)atoi(part[4]);
    if (parts > 6) process->sm_pct = (unsigned)atoi(part[5]), process->memory_pct = (unsigned)atoi(part[6]);
    return true;
}

static bool of_device(Device device, const struct process *process) {
    if (device->mig == NO_MIG) return true;
    double gpu_instance = -1, compute_instance = -1;
    machine_number(device, "gpu_instance", &gpu_instance);
    machine_number(device, "compute_instance", &compute_instance);
    return process->gpu_instance == (unsigned)gpu_instance && process->compute_instance == (unsigned)compute_instance;
}

int machine_processes(Device device, struct process *processes) {
    int count = 0;
    for (int i = 0; i < entry_count && count < MAX_PROCESSES; i++) {
        if (entries[i].gpu != device->gpu || strcmp(entries[i].key, "process")) continue;
        if (parse_process(entries[i].value, &processes[count]) && of_device(device, &processes[count])) count++;
    }
    /* FAKE_NVML_PROCESSES=gpu:pid:MiB,… adds some without a description of its own. */
    const char *more = getenv("FAKE_NVML_PROCESSES");
    char *copy = more ? strdup(more) : NULL, *rest = copy, *one;
    while (copy && (one = strsep(&rest, ",")) && count < MAX_PROCESSES) {
        char *colon = strchr(one, ':');
        if (colon && atoi(one) == device->gpu && parse_process(colon + 1, &processes[count]) &&
            of_device(device, &processes[count]))
            count++;
    }
    free(copy);
    return count;
}

bool machine_event(Device gpu, uint64_t mask, unsigned *serial, uint64_t *type, uint64_t *data) {
    /* event = serial type data */
    bool found = false;
    unsigned best = UINT32_MAX;
    for (int i = 0; i < entry_count; i++) {
        unsigned number;
        unsigned long long kind, value;
        if (entries[i].gpu != gpu->gpu || strcmp(entries[i].key, "event")) continue;
        if (sscanf(entries[i].value, "%u %llu %llu", &number, &kind, &value) != 3) continue;
        if (number <= *serial || number >= best || !(kind & mask)) continue;
        best = number;
        *type = kind;
        *data = value;
        found = true;
    }
    if (found) *serial = best;
    return found;
}
