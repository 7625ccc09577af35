/* NVML's structures as its clients lay them out; sizes are checked, since they are what the fake stands for. */
#ifndef GPUFLIGHT_FAKE_ABI_H
#define GPUFLIGHT_FAKE_ABI_H

#include <stdint.h>

struct pci_info {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};
struct memory_v1 { uint64_t total, free, used; };
struct memory_v2 { unsigned version; uint64_t total, reserved, free, used; };
struct process_v1 { unsigned pid; uint64_t used; };
struct process_v2 { unsigned pid; uint64_t used; unsigned gpu_instance, compute_instance; };
/* The layout of some 535 drivers, under the symbol of v3: one field more than clients of v3 expect. */
struct process_535 { struct process_v2 v2; uint64_t protected_used; };
struct process_sample { unsigned pid; uint64_t time_us; unsigned sm, memory, encoder, decoder; };
struct utilization { unsigned gpu, memory; };
struct temperature_v1 { unsigned version, sensor; int celsius; };
struct violation { uint64_t reference_us, violation_ns; };
struct field_value {
    uint32_t field, scope;
    int64_t timestamp_us, latency_us;
    unsigned type;
    int result;
    union { double d; int si; unsigned ui; uint64_t ull; int64_t sll; } value;
};
struct attributes {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gpu_slices, compute_slices;
    uint64_t memory_mib;
};
struct event_data { void *device; uint64_t type, data; unsigned gpu_instance, compute_instance; };
struct gpm_metric {
    unsigned id;
    int result;
    double value;
    struct { const char *short_name, *long_name, *unit; } info;
};
struct gpm_metrics { unsigned version, count; struct gpm_sample *first, *second; struct gpm_metric metrics[]; };
struct gpm_support { unsigned version, supported; };
struct fabric_v1 { unsigned char cluster[16]; int status; uint32_t clique; unsigned char state; };
struct fabric_v2 { unsigned version; unsigned char cluster[16]; int status; uint32_t clique; unsigned char state; uint32_t health; };

_Static_assert(sizeof(struct pci_info) == 68, "nvmlPciInfo_t");
_Static_assert(sizeof(struct memory_v2) == 40, "nvmlMemory_v2_t");
_Static_assert(sizeof(struct process_v1) == 16, "nvmlProcessInfo_v1_t");
_Static_assert(sizeof(struct process_v2) == 24, "nvmlProcessInfo_v2_t");
_Static_assert(sizeof(struct process_535) == 32, "nvmlProcessInfo_t of driver 535");
_Static_assert(sizeof(struct field_value) == 40, "nvmlFieldValue_t");
_Static_assert(sizeof(struct gpm_metric) == 40, "nvmlGpmMetric_t");
_Static_assert(sizeof(struct gpm_metrics) == 24, "nvmlGpmMetricsGet_t");
_Static_assert(sizeof(struct fabric_v2) == 36, "nvmlGpuFabricInfo_v2_t");

#endif
