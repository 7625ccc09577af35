/* A libnvidia-ml.so.1 without a GPU: the entry points of NVML that gpuflight, pynvml's callers and the like use,
   answered from a description of a machine (machine.h). Which symbols exist at all is decided when it is linked. */
#define _GNU_SOURCE
#include "abi.h"
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define API __attribute__((visibility("default")))
#define ENTER(device)                                                      \
    do {                                                                   \
        Result entered = (device) ? machine_enter(__func__, device) : NVML_INVALID_ARGUMENT; \
        if (entered) return entered;                                       \
    } while (0)
#define ENTER_SYSTEM()                                   \
    do {                                                 \
        Result entered = machine_enter(__func__, NULL);  \
        if (entered) return entered;                     \
    } while (0)
/* An entry point that gives one number of the description. */
#define NUMBER(function, type, key)               \
    API Result function(Device d, type *out) {    \
        double value;                             \
        ENTER(d);                                 \
        Result r = machine_number(d, key, &value); \
        if (!r) *out = (type)value;               \
        return r;                                 \
    }
#define TEXT(function, key)                                   \
    API Result function(Device d, char *out, unsigned size) { \
        ENTER(d);                                             \
        return copy_text(machine_text(d, key), out, size);    \
    }

static Result copy_text(const char *text, char *out, unsigned size) {
    if (!text) return NVML_NOT_SUPPORTED;
    if (*text == '!') return machine_error(text + 1);
    if (strlen(text) + 1 > size) return NVML_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return NVML_SUCCESS;
}

static Result two(Device d, const char *key, unsigned *first, unsigned *second) {
    double a, b;
    Result r = machine_field(d, key, 0, &a);
    if (!r) r = machine_field(d, key, 1, &b);
    if (r) return r;
    *first = (unsigned)a;
    *second = (unsigned)b;
    return NVML_SUCCESS;
}

/* ---- library and system ---- */
API Result nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    Result r;
    machine_initialise(&r);
    return r;
}
API Result nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API Result nvmlShutdown(void) { return machine_shutdown() ? NVML_SUCCESS : NVML_UNINITIALIZED; }
API const char *nvmlErrorString(int code) {
    switch (code) {
    case NVML_SUCCESS: return "Success";
    case NVML_UNINITIALIZED: return "Uninitialized";
    case NVML_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_NOT_SUPPORTED: return "Not Supported";
    case NVML_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_NOT_FOUND: return "Not Found";
    case NVML_INSUFFICIENT_SIZE: return "Insufficient Size";
    case NVML_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_GPU_IS_LOST: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    case 19: return "In use by another client";
    default: return "Unknown Error";
    }
}
static Result system_text(const char *function, const char *key, char *out, unsigned size) {
    Result r = machine_enter(function, NULL);
    return r ? r : copy_text(machine_text(NULL, key), out, size);
}
API Result nvmlSystemGetDriverVersion(char *out, unsigned size) { return system_text(__func__, "driver", out, size); }
API Result nvmlSystemGetNVMLVersion(char *out, unsigned size) { return system_text(__func__, "nvml", out, size); }
API Result nvmlSystemGetCudaDriverVersion_v2(int *out) {
    double value;
    ENTER_SYSTEM();
    Result r = machine_number(NULL, "cuda", &value);
    if (!r) *out = (int)value;
    return r;
}
API Result nvmlSystemGetCudaDriverVersion(int *out) { return nvmlSystemGetCudaDriverVersion_v2(out); }
API Result nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) {
    char path[64], name[256] = {0};
    ENTER_SYSTEM();
    snprintf(path, sizeof path, "/proc/%u/comm", pid);
    FILE *file = fopen(path, "re");
    if (!file) return NVML_NOT_FOUND;
    char *got = fgets(name, sizeof name, file);
    fclose(file);
    if (!got) return NVML_NOT_FOUND;
    name[strcspn(name, "\n")] = 0;
    return copy_text(name, out, size);
}

/* ---- enumeration and identity ---- */
API Result nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER_SYSTEM();
    *count = (unsigned)machine_gpu_count();
    return NVML_SUCCESS;
}
API Result nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *out) {
    ENTER_SYSTEM();
    Device gpu = machine_gpu(index);
    if (!gpu) return NVML_INVALID_ARGUMENT;
    if (machine_lost(gpu)) return NVML_GPU_IS_LOST;
    *out = gpu;
    return NVML_SUCCESS;
}
static Result by_key(const char *key, const char *wanted, Device *out) {
    for (unsigned i = 0; machine_gpu(i); i++) {
        const char *text = machine_text(machine_gpu(i), key);
        /* NVML accepts eight digits of domain, the descriptions write four. */
        if (text && (!strcasecmp(text, wanted) || (strlen(wanted) > 4 && !strcasecmp(text, wanted + 4)))) {
            *out = machine_gpu(i);
            return machine_lost(*out) ? NVML_GPU_IS_LOST : NVML_SUCCESS;
        }
    }
    return NVML_NOT_FOUND;
}
API Result nvmlDeviceGetHandleByUUID(const char *uuid, Device *out) {
    ENTER_SYSTEM();
    return by_key("uuid", uuid, out);
}
API Result nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, Device *out) {
    ENTER_SYSTEM();
    return by_key("pci", bus_id, out);
}
API Result nvmlDeviceGetIndex(Device d, unsigned *index) {
    ENTER(d);
    *index = (unsigned)machine_index(d);
    return NVML_SUCCESS;
}
TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetSerial, "serial")
TEXT(nvmlDeviceGetVbiosVersion, "vbios")
TEXT(nvmlDeviceGetBoardPartNumber, "part_number")
NUMBER(nvmlDeviceGetMinorNumber, unsigned, "minor")
NUMBER(nvmlDeviceGetBrand, unsigned, "brand")
NUMBER(nvmlDeviceGetArchitecture, unsigned, "architecture")
NUMBER(nvmlDeviceGetNumGpuCores, unsigned, "cores")
NUMBER(nvmlDeviceGetMemoryBusWidth, unsigned, "memory_bus_width")
API Result nvmlDeviceGetCudaComputeCapability(Device d, int *major, int *minor) {
    ENTER(d);
    return two(d, "compute_capability", (unsigned *)major, (unsigned *)minor);
}
static Result fill_pci(const char *address, unsigned device_id, struct pci_info *out) {
    unsigned domain, bus, device, function;
    if (!address) return NVML_NOT_SUPPORTED;
    if (*address == '!') return machine_error(address + 1);
    if (sscanf(address, "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4) return NVML_UNKNOWN;
    memset(out, 0, sizeof *out);
    out->domain = domain;
    out->bus = bus;
    out->device = device;
    out->device_id = device_id;
    snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04X:%02X:%02X.0", domain & 0xffff, bus & 0xff, device & 0xff);
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", domain, bus & 0xff, device & 0xff);
    return NVML_SUCCESS;
}
API Result nvmlDeviceGetPciInfo_v3(Device d, struct pci_info *out) {
    double id = 0;
    ENTER(d);
    machine_number(d, "pci_device_id", &id);
    return fill_pci(machine_text(d, "pci"), (unsigned)id, out);
}
API Result nvmlDeviceGetPciInfo_v2(Device d, struct pci_info *out) { return nvmlDeviceGetPciInfo_v3(d, out); }

/* ---- memory ---- */
static Result memory(Device d, uint64_t *total, uint64_t *reserved, uint64_t *used) {
    double value;
    Result r = machine_number(d, "memory_total", &value);
    if (r) return r;
    *total = (uint64_t)value;
    *reserved = machine_number(d, "memory_reserved", &value) ? 0 : (uint64_t)value;
    /* Without a figure of its own, what the processes hold and the driver's contexts beside them. */
    if (machine_number(d, "memory_used", &value)) {
        struct process list[MAX_PROCESSES];
        int count = machine_processes(d, list);
        value = 0;
        machine_number(d, "memory_overhead", &value);
        for (int i = 0; i < count; i++)
            if (list[i].used_bytes != UINT64_MAX) value += (double)list[i].used_bytes;
    }
    *used = (uint64_t)value;
    return NVML_SUCCESS;
}
API Result nvmlDeviceGetMemoryInfo(Device d, struct memory_v1 *out) {
    uint64_t total, reserved, used;
    ENTER(d);
    Result r = memory(d, &total, &reserved, &used);
    if (!r) *out = (struct memory_v1){total, total - reserved - used, reserved + used};
    return r;
}
API Result nvmlDeviceGetMemoryInfo_v2(Device d, struct memory_v2 *out) {
    uint64_t total, reserved, used;
    ENTER(d);
    if (out->version != (2u << 24 | sizeof *out)) return NVML_ARGUMENT_VERSION_MISMATCH;
    Result r = memory(d, &total, &reserved, &used);
    if (!r) *out = (struct memory_v2){out->version, total, reserved, total - reserved - used, used};
    return r;
}
API Result nvmlDeviceGetBAR1MemoryInfo(Device d, struct memory_v1 *out) {
    double total, used;
    ENTER(d);
    Result r = machine_field(d, "bar1", 0, &total);
    if (!r) r = machine_field(d, "bar1", 1, &used);
    if (!r) *out = (struct memory_v1){(uint64_t)total, (uint64_t)(total - used), (uint64_t)used};
    return r;
}

/* ---- load, clocks, power, temperature ---- */
API Result nvmlDeviceGetUtilizationRates(Device d, struct utilization *out) {
    ENTER(d);
    return two(d, "utilization", &out->gpu, &out->memory);
}
API Result nvmlDeviceGetEncoderUtilization(Device d, unsigned *pct, unsigned *period_us) {
    ENTER(d);
    *period_us = 167000;
    unsigned unused;
    return two(d, "codec_utilization", pct, &unused);
}
API Result nvmlDeviceGetDecoderUtilization(Device d, unsigned *pct, unsigned *period_us) {
    ENTER(d);
    *period_us = 167000;
    unsigned unused;
    return two(d, "codec_utilization", &unused, pct);
}

/* ---- GPM: what two samples say is the description at the time of the second ---- */
struct gpm_sample { Device device; };
API Result nvmlGpmQueryDeviceSupport(Device d, struct gpm_support *out) {
    ENTER(d);
    if (out->version != 1) return NVML_ARGUMENT_VERSION_MISMATCH;
    out->supported = machine_text(d, "gpm.2") != NULL;
    return NVML_SUCCESS;
}
API Result nvmlGpmSampleAlloc(struct gpm_sample **out) {
    ENTER_SYSTEM();
    *out = calloc(1, sizeof **out);
    return *out ? NVML_SUCCESS : NVML_UNKNOWN;
}
API Result nvmlGpmSampleFree(struct gpm_sample *sample) {
    free(sample);
    return NVML_SUCCESS;
}
API Result nvmlGpmSampleGet(Device d, struct gpm_sample *sample) {
    ENTER(d);
    sample->device = d;
    return NVML_SUCCESS;
}
API Result nvmlGpmMigSampleGet(Device d, unsigned gpu_instance, struct gpm_sample *sample) {
    ENTER(d);
    for (unsigned i = 0; i < MAX_MIGS; i++) {
        double instance;
        Device mig = machine_mig(d, i);
        if (mig && !machine_number(mig, "gpu_instance", &instance) && (unsigned)instance == gpu_instance) {
            sample->device = mig;
            return NVML_SUCCESS;
        }
    }
    return NVML_NOT_FOUND;
}
API Result nvmlGpmMetricsGet(struct gpm_metrics *out) {
    ENTER_SYSTEM();
    if (out->version != 1) return NVML_ARGUMENT_VERSION_MISMATCH;
    if (!out->first->device || out->first->device != out->second->device) return NVML_INVALID_ARGUMENT;
    for (unsigned i = 0; i < out->count; i++) {
        char key[32];
        snprintf(key, sizeof key, "gpm.%u", out->metrics[i].id);
        out->metrics[i].result = machine_number(out->second->device, key, &out->metrics[i].value);
    }
    return NVML_SUCCESS;
}
static Result clock_mhz(Device d, const char *key, unsigned domain, unsigned *out) {
    double value; /* graphics, SM, memory, video: the order of nvmlClockType_t */
    if (domain > 3) return NVML_INVALID_ARGUMENT;
    Result r = machine_field(d, key, (int)domain, &value);
    if (!r) *out = (unsigned)value;
    return r;
}
API Result nvmlDeviceGetClockInfo(Device d, unsigned domain, unsigned *out) { ENTER(d); return clock_mhz(d, "clocks", domain, out); }
API Result nvmlDeviceGetMaxClockInfo(Device d, unsigned domain, unsigned *out) { ENTER(d); return clock_mhz(d, "clocks_max", domain, out); }
API Result nvmlDeviceGetApplicationsClock(Device d, unsigned domain, unsigned *out) { ENTER(d); return clock_mhz(d, "clocks_application", domain, out); }
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "clock_event_reasons")
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "clock_event_reasons")
NUMBER(nvmlDeviceGetPerformanceState, unsigned, "performance_state")
NUMBER(nvmlDeviceGetPowerState, unsigned, "performance_state")
NUMBER(nvmlDeviceGetPowerUsage, unsigned, "power_mw")
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, "power_limit_mw")
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, "power_limit_mw")
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, "power_default_limit_mw")
NUMBER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, "energy_mj")
NUMBER(nvmlDeviceGetFanSpeed, unsigned, "fan")
NUMBER(nvmlDeviceGetPersistenceMode, unsigned, "persistence")
NUMBER(nvmlDeviceGetComputeMode, unsigned, "compute_mode")
API Result nvmlDeviceGetTemperature(Device d, unsigned sensor, unsigned *out) {
    double value;
    ENTER(d);
    if (sensor) return NVML_INVALID_ARGUMENT;
    Result r = machine_number(d, "temperature", &value);
    if (!r) *out = (unsigned)value;
    return r;
}
API Result nvmlDeviceGetTemperatureV(Device d, struct temperature_v1 *out) {
    double value;
    ENTER(d);
    if (out->version != (1u << 24 | sizeof *out)) return NVML_ARGUMENT_VERSION_MISMATCH;
    Result r = machine_number(d, "temperature", &value);
    if (!r) out->celsius = (int)value;
    return r;
}
API Result nvmlDeviceGetTemperatureThreshold(Device d, unsigned which, unsigned *out) {
    double value; /* shutdown, slowdown, memory max, GPU max: the order of nvmlTemperatureThresholds_t */
    ENTER(d);
    if (which > 3) return NVML_NOT_SUPPORTED;
    Result r = machine_field(d, "temperature_thresholds", (int)which, &value);
    if (!r) *out = (unsigned)value;
    return r;
}
API Result nvmlDeviceGetViolationStatus(Device d, unsigned policy, struct violation *out) {
    double value;
    char key[32];
    ENTER(d);
    snprintf(key, sizeof key, "violation_ns.%u", policy);
    Result r = machine_number(d, key, &value);
    if (!r) *out = (struct violation){machine_wall_us(), (uint64_t)value};
    return r;
}

/* ---- PCIe ---- */
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, "pcie_gen")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, "pcie_gen_max")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "pcie_width")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "pcie_width_max")
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, "pcie_replays")
NUMBER(nvmlDeviceGetPcieSpeed, unsigned, "pcie_speed")
API Result nvmlDeviceGetPcieThroughput(Device d, unsigned counter, unsigned *out) {
    double value; /* transmit, receive: the order of nvmlPcieUtilCounter_t */
    ENTER(d);
    Result r = machine_field(d, "pcie_throughput_kb", (int)counter, &value);
    if (!r) *out = (unsigned)value;
    return r;
}

/* ---- memory errors ---- */
API Result nvmlDeviceGetEccMode(Device d, unsigned *current, unsigned *pending) { ENTER(d); return two(d, "ecc_mode", current, pending); }
API Result nvmlDeviceGetTotalEccErrors(Device d, unsigned type, unsigned counter, unsigned long long *out) {
    double value; /* corrected, uncorrected */
    ENTER(d);
    Result r = machine_field(d, counter ? "ecc_aggregate" : "ecc_volatile", (int)type, &value);
    if (!r) *out = (unsigned long long)value;
    return r;
}
API Result nvmlDeviceGetRemappedRows(Device d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    ENTER(d);
    double value[4];
    for (int i = 0; i < 4; i++) {
        Result r = machine_field(d, "remapped_rows", i, &value[i]);
        if (r) return r;
    }
    *corrected = (unsigned)value[0], *uncorrected = (unsigned)value[1];
    *pending = (unsigned)value[2], *failed = (unsigned)value[3];
    return NVML_SUCCESS;
}
API Result nvmlDeviceGetRetiredPages(Device d, unsigned cause, unsigned *count, unsigned long long *pages) {
    double value; /* single bit, double bit */
    ENTER(d);
    Result r = machine_field(d, "retired_pages", (int)cause, &value);
    if (r) return r;
    unsigned wanted = (unsigned)value, room = *count;
    *count = wanted;
    if (wanted > room || (wanted && !pages)) return NVML_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < wanted; i++) pages[i] = 0x1000ull * (i + 1);
    return NVML_SUCCESS;
}
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, "retired_pending")

/* ---- place ---- */
API Result nvmlDeviceGetTopologyCommonAncestor(Device a, Device b, unsigned *out) {
    double value;
    char key[32];
    ENTER(a);
    if (!b) return NVML_INVALID_ARGUMENT;
    snprintf(key, sizeof key, "topology.%d", b->gpu);
    if (!machine_text(a, key)) strcpy(key, "topology");
    Result r = machine_number(a, key, &value);
    if (!r) *out = a == b ? 0 : (unsigned)value;
    return r;
}
API Result nvmlDeviceGetTopologyNearestGpus(Device d, unsigned level, unsigned *count, Device *out) {
    unsigned found = 0, at;
    ENTER(d);
    for (unsigned i = 0; machine_gpu(i); i++) {
        Device other = machine_gpu(i);
        if (other == d || nvmlDeviceGetTopologyCommonAncestor(d, other, &at) || at != level) continue;
        if (out && found < *count) out[found] = other;
        found++;
    }
    *count = found;
    return NVML_SUCCESS;
}
API Result nvmlDeviceGetP2PStatus(Device a, Device b, unsigned capability, unsigned *out) {
    double value; /* read, write, nvlink, atomics: the order of nvmlGpuP2PCapsIndex_t */
    char key[32];
    ENTER(a);
    if (!b) return NVML_INVALID_ARGUMENT;
    snprintf(key, sizeof key, "p2p.%d", b->gpu);
    if (!machine_text(a, key)) strcpy(key, "p2p");
    Result r = machine_field(a, key, (int)capability, &value);
    if (!r) *out = (unsigned)value;
    return r;
}
/* "0-31,64-95" as a bit mask of unsigned longs */
static Result fill_mask(const char *list, unsigned longs, unsigned long *mask) {
    if (!list) return NVML_NOT_SUPPORTED;
    if (*list == '!') return machine_error(list + 1);
    memset(mask, 0, longs * sizeof *mask);
    for (const char *at = list; *at;) {
        char *end;
        unsigned long first = strtoul(at, &end, 10), last = first;
        if (*end == '-') last = strtoul(end + 1, &end, 10);
        for (; first <= last && first < longs * 64; first++) mask[first / 64] |= 1ul << first % 64;
        if (end == at) break;
        at = *end == ',' ? end + 1 : end;
    }
    return NVML_SUCCESS;
}
API Result nvmlDeviceGetCpuAffinity(Device d, unsigned longs, unsigned long *mask) { ENTER(d); return fill_mask(machine_text(d, "cpus"), longs, mask); }
API Result nvmlDeviceGetCpuAffinityWithinScope(Device d, unsigned longs, unsigned long *mask, unsigned scope) {
    (void)scope;
    ENTER(d);
    return fill_mask(machine_text(d, "cpus"), longs, mask);
}
API Result nvmlDeviceGetMemoryAffinity(Device d, unsigned longs, unsigned long *mask, unsigned scope) {
    (void)scope;
    ENTER(d);
    return fill_mask(machine_text(d, "numa_nodes"), longs, mask);
}
NUMBER(nvmlDeviceGetNumaNodeId, int, "numa_node_id")

/* ---- NVLink and fabric ---- */
/* "link.<n>.<what>" before "link.<what>"; links past "links" are invalid, as in NVML */
static Result link_text(Device d, unsigned link, const char *what, const char **out) {
    double links;
    char key[48];
    if (machine_number(d, "links", &links)) return NVML_NOT_SUPPORTED;
    if (link >= (unsigned)links) return NVML_INVALID_ARGUMENT;
    snprintf(key, sizeof key, "link.%u.%s", link, what);
    *out = machine_text(d, key);
    if (!*out) {
        snprintf(key, sizeof key, "link.%s", what);
        *out = machine_text(d, key);
    }
    if (!*out) return NVML_NOT_SUPPORTED;
    return **out == '!' ? machine_error(*out + 1) : NVML_SUCCESS;
}
static Result link_number(Device d, unsigned link, const char *what, int n, double *out) {
    const char *text;
    Result r = link_text(d, link, what, &text);
    if (r) return r;
    char key[48];
    snprintf(key, sizeof key, "link.%u.%s", link, what);
    if (!machine_text(d, key)) snprintf(key, sizeof key, "link.%s", what);
    return machine_field(d, key, n, out);
}
#define LINK(function, what)                                  \
    API Result function(Device d, unsigned link, unsigned *out) { \
        double value;                                         \
        ENTER(d);                                             \
        Result r = link_number(d, link, what, 0, &value);     \
        if (!r) *out = (unsigned)value;                       \
        return r;                                             \
    }
LINK(nvmlDeviceGetNvLinkState, "state")
LINK(nvmlDeviceGetNvLinkVersion, "version")
LINK(nvmlDeviceGetNvLinkRemoteDeviceType, "remote_type")
API Result nvmlDeviceGetNvLinkCapability(Device d, unsigned link, unsigned capability, unsigned *out) {
    const char *text;
    (void)capability;
    ENTER(d);
    Result r = link_text(d, link, "version", &text);
    if (!r) *out = 1;
    return r;
}
API Result nvmlDeviceGetNvLinkRemotePciInfo_v2(Device d, unsigned link, struct pci_info *out) {
    const char *text;
    ENTER(d);
    Result r = link_text(d, link, "remote_pci", &text);
    return r ? r : fill_pci(text, 0, out);
}
API Result nvmlDeviceGetNvLinkErrorCounter(Device d, unsigned link, unsigned counter, unsigned long long *out) {
    double value; /* replay, recovery, CRC flit, CRC data: the order of nvmlNvLinkErrorCounter_t */
    ENTER(d);
    Result r = link_number(d, link, "errors", (int)counter, &value);
    if (!r) *out = (unsigned long long)value;
    return r;
}
static Result fabric(Device d, unsigned char cluster[16], int *status, uint32_t *clique, unsigned char *state) {
    double value[3]; /* state, status, clique */
    for (int i = 0; i < 3; i++) {
        Result r = machine_field(d, "fabric", i, &value[i]);
        if (r) return r;
    }
    memset(cluster, 0xab, 16);
    *state = (unsigned char)value[0];
    *status = (int)value[1];
    *clique = (uint32_t)value[2];
    return NVML_SUCCESS;
}
API Result nvmlDeviceGetGpuFabricInfo(Device d, struct fabric_v1 *out) {
    ENTER(d);
    return fabric(d, out->cluster, &out->status, &out->clique, &out->state);
}
API Result nvmlDeviceGetGpuFabricInfoV(Device d, struct fabric_v2 *out) {
    double health = 0;
    ENTER(d);
    if (out->version != (2u << 24 | sizeof *out)) return NVML_ARGUMENT_VERSION_MISMATCH;
    machine_number(d, "fabric_health", &health);
    out->health = (uint32_t)health;
    return fabric(d, out->cluster, &out->status, &out->clique, &out->state);
}

/* ---- field values ---- */
API Result nvmlDeviceGetFieldValues(Device d, int count, struct field_value *values) {
    ENTER(d);
    for (int i = 0; i < count; i++) {
        struct field_value *v = &values[i];
        char key[32];
        double value = 0;
        v->timestamp_us = (int64_t)machine_wall_us();
        v->latency_us = 5;
        v->type = 3;
        v->result = NVML_NOT_SUPPORTED;
        snprintf(key, sizeof key, "field.%u", v->field);
        if (machine_text(d, key))
            v->result = (int)machine_number(d, key, &value);
        else if (v->field == 91)
            v->result = (int)machine_number(d, "links", &value);
        else if (v->field == 165)
            v->result = (int)link_number(d, v->scope, "state", 0, &value);
        else if (v->field >= 161 && v->field <= 163)
            v->result = (int)link_number(d, v->scope, "errors", (int)v->field - 161, &value);
        if (!v->result) v->value.ull = (uint64_t)value;
    }
    return NVML_SUCCESS;
}

/* ---- MIG ---- */
API Result nvmlDeviceGetMigMode(Device d, unsigned *current, unsigned *pending) { ENTER(d); return two(d, "mig_mode", current, pending); }
NUMBER(nvmlDeviceGetMaxMigDeviceCount, unsigned, "mig_devices_max")
NUMBER(nvmlDeviceGetGpuInstanceId, unsigned, "gpu_instance")
NUMBER(nvmlDeviceGetComputeInstanceId, unsigned, "compute_instance")
API Result nvmlDeviceIsMigDeviceHandle(Device d, unsigned *out) {
    ENTER(d);
    *out = d->mig >= 0;
    return NVML_SUCCESS;
}
API Result nvmlDeviceGetMigDeviceHandleByIndex(Device d, unsigned index, Device *out) {
    ENTER(d);
    *out = machine_mig(d, index);
    return *out ? NVML_SUCCESS : NVML_NOT_FOUND;
}
API Result nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device d, Device *out) {
    ENTER(d);
    for (unsigned i = 0; machine_gpu(i); i++)
        if (machine_gpu(i)->gpu == d->gpu) *out = machine_gpu(i);
    return NVML_SUCCESS;
}
API Result nvmlDeviceGetAttributes_v2(Device d, struct attributes *out) {
    double value[3]; /* multiprocessors, GPU instance slices, compute instance slices */
    uint64_t total, reserved, used;
    ENTER(d);
    if (d->mig < 0) return NVML_NOT_SUPPORTED;
    for (int i = 0; i < 3; i++) {
        Result r = machine_field(d, "slices", i, &value[i]);
        if (r) return r;
    }
    Result r = memory(d, &total, &reserved, &used);
    if (r) return r;
    *out = (struct attributes){.multiprocessors = (unsigned)value[0], .gpu_slices = (unsigned)value[1],
                               .compute_slices = (unsigned)value[2], .memory_mib = total >> 20};
    return NVML_SUCCESS;
}

/* ---- processes ---- */
static Result list_processes(Device d, char type, unsigned size, unsigned *count, void *out) {
    struct process all[MAX_PROCESSES];
    int found = 0, total = machine_processes(d, all);
    for (int i = 0; i < total; i++)
        if (all[i].type == type) all[found++] = all[i];
    unsigned room = *count;
    *count = (unsigned)found;
    if ((unsigned)found > room || (found && !out)) return NVML_INSUFFICIENT_SIZE;
    for (int i = 0; i < found; i++) {
        const struct process *p = &all[i];
        struct process_535 entry = {{p->pid, p->used_bytes, p->gpu_instance, p->compute_instance}, 0};
        memcpy((char *)out + (size_t)i * size, &entry, size); /* each older layout is a head of the newest */
    }
    return NVML_SUCCESS;
}
static unsigned v3_size(void) {
    double size;
    return machine_number(NULL, "process_struct_bytes", &size) ? sizeof(struct process_v2) : (unsigned)size;
}
#define PROCESSES(name, type)                                                            \
    API Result name(Device d, unsigned *count, void *out) {                              \
        ENTER(d);                                                                        \
        return list_processes(d, type, sizeof(struct process_v1), count, out);           \
    }                                                                                    \
    API Result name##_v2(Device d, unsigned *count, void *out) {                         \
        ENTER(d);                                                                        \
        return list_processes(d, type, sizeof(struct process_v2), count, out);           \
    }                                                                                    \
    API Result name##_v3(Device d, unsigned *count, void *out) {                         \
        ENTER(d);                                                                        \
        return list_processes(d, type, v3_size(), count, out);                           \
    }
PROCESSES(nvmlDeviceGetComputeRunningProcesses, 'C')
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, 'G')
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, 'M')
API Result nvmlDeviceGetProcessUtilization(Device d, struct process_sample *out, unsigned *count, unsigned long long since) {
    struct process all[MAX_PROCESSES];
    uint64_t now = machine_wall_us();
    ENTER(d);
    int found = 0, total = machine_processes(d, all);
    for (int i = 0; i < total; i++)
        if (all[i].sm_pct != UINT32_MAX) all[found++] = all[i];
    if (!found || since >= now) return NVML_NOT_FOUND;
    unsigned room = *count;
    *count = (unsigned)found;
    if (!out || room < (unsigned)found) return NVML_INSUFFICIENT_SIZE;
    for (int i = 0; i < found; i++) out[i] = (struct process_sample){all[i].pid, now, all[i].sm_pct, all[i].memory_pct, 0, 0};
    return NVML_SUCCESS;
}

/* ---- events ---- */
struct event_set {
    uint64_t mask[MAX_GPUS];
    unsigned serial[MAX_GPUS];
    Device gpu[MAX_GPUS];
};
API Result nvmlEventSetCreate(struct event_set **out) {
    ENTER_SYSTEM();
    *out = calloc(1, sizeof **out);
    return *out ? NVML_SUCCESS : NVML_UNKNOWN;
}
API Result nvmlEventSetFree(struct event_set *set) {
    free(set);
    return NVML_SUCCESS;
}
NUMBER(nvmlDeviceGetSupportedEventTypes, unsigned long long, "event_types")
API Result nvmlDeviceRegisterEvents(Device d, unsigned long long types, struct event_set *set) {
    double supported;
    uint64_t type, data;
    ENTER(d);
    Result r = machine_number(d, "event_types", &supported);
    if (r) return r;
    if (types & ~(unsigned long long)supported) return NVML_NOT_SUPPORTED;
    set->mask[d->gpu] = types;
    set->gpu[d->gpu] = d;
    /* What happened before the registration is never reported. */
    while (machine_event(d, types, &set->serial[d->gpu], &type, &data)) {}
    return NVML_SUCCESS;
}
API Result nvmlEventSetWait_v2(struct event_set *set, struct event_data *out, unsigned timeout_ms) {
    (void)timeout_ms;
    ENTER_SYSTEM();
    for (int i = 0; i < MAX_GPUS; i++) {
        uint64_t type, data;
        if (!set->gpu[i] || !machine_event(set->gpu[i], set->mask[i], &set->serial[i], &type, &data)) continue;
        *out = (struct event_data){set->gpu[i], type, data, UINT32_MAX, UINT32_MAX};
        return NVML_SUCCESS;
    }
    for (int i = 0; i < MAX_GPUS; i++)
        if (set->gpu[i] && machine_lost(set->gpu[i])) return NVML_GPU_IS_LOST;
    return NVML_TIMEOUT;
}
