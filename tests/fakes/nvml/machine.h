/* The description of a machine that the fake NVML library answers from; its format is in machines/README.md. */
#ifndef GPUFLIGHT_FAKE_MACHINE_H
#define GPUFLIGHT_FAKE_MACHINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MAX_GPUS = 32, MAX_MIGS = 8, MAX_PROCESSES = 256, MAX_LINKS = 36 };

/* Values of nvmlReturn_t that the fake gives; the numbers are NVML's ABI. */
typedef enum {
    NVML_SUCCESS = 0,
    NVML_UNINITIALIZED = 1,
    NVML_INVALID_ARGUMENT = 2,
    NVML_NOT_SUPPORTED = 3,
    NVML_NO_PERMISSION = 4,
    NVML_NOT_FOUND = 6,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_DRIVER_NOT_LOADED = 9,
    NVML_TIMEOUT = 10,
    NVML_GPU_IS_LOST = 15,
    NVML_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_UNKNOWN = 999,
} Result;

/* A device handle: a GPU, or one MIG device of it (mig >= 0). Handles stay valid when the description changes. */
struct device {
    int gpu;
    int mig;
};
typedef struct device *Device;

struct process {
    unsigned pid;
    uint64_t used_bytes; /* UINT64_MAX: the driver does not know */
    char type;           /* C compute, G graphics, M MPS client */
    unsigned gpu_instance, compute_instance;
    unsigned sm_pct, memory_pct; /* UINT32_MAX: no utilisation sample */
};

/* What every entry point does first: reads the description again if it changed, then hangs, fails or goes on as it says.
   device is NULL for calls that take no device. */
Result machine_enter(const char *function, Device device);

bool machine_initialise(Result *result); /* false: no usable description; result is what nvmlInit should answer */
bool machine_shutdown(void);
int machine_gpu_count(void);        /* GPUs that can be enumerated */
Device machine_gpu(unsigned index); /* by NVML index; NULL past the end */
Device machine_mig(Device gpu, unsigned index);
int machine_index(Device device); /* NVML index of a GPU */
bool machine_lost(Device device);

/* Looks a key up in the device's own section (MIG before GPU); device NULL means [system]. Returns NULL if it is absent. */
const char *machine_text(Device device, const char *key);
/* As text, as a number. Absent keys are NOT_SUPPORTED, "!NAME" gives that error. Units KiB MiB GiB; "5+2/s" grows. */
Result machine_number(Device device, const char *key, double *value);
/* The n-th blank-separated field (from 0) of a key's value. */
Result machine_field(Device device, const char *key, int n, double *value);

int machine_processes(Device device, struct process *processes); /* at most MAX_PROCESSES, of this GPU or MIG device */
/* The oldest event of a GPU that is newer than *serial and of one of the types in mask; moves *serial on. */
bool machine_event(Device gpu, uint64_t mask, unsigned *serial, uint64_t *type, uint64_t *data);
Result machine_error(const char *name);
uint64_t machine_wall_us(void);

#endif
