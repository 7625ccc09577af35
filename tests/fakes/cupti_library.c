/* libcupti.so.13 as far as the recorder uses it, for the real cupti-python: records that a test hands in are delivered
 * as CUPTI does it, in buffers that it asks for, from a thread of its own, which gives the buffer back afterwards. */
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef void (*requested_fn)(uint8_t **, size_t *, size_t *);
typedef void (*completed_fn)(void *, uint32_t, uint8_t *, size_t, size_t);

static requested_fn requested;
static completed_fn completed;
static size_t sizes[64];
static uint8_t enabled[64];
static uint8_t waiting[1 << 20];
static size_t waiting_size;
static size_t dropped;
static int subscribers, other_subscriber;

/* for the test */
void fake_size(uint32_t kind, size_t size) { sizes[kind] = size; }
int fake_enabled(uint32_t kind) { return enabled[kind]; }
void fake_drop(size_t count) { dropped = count; }
void fake_other(int there) { other_subscriber = there; }
int fake_subscribers(void) { return subscribers; }
void fake_emit(const void *records, size_t size) {
    memcpy(waiting + waiting_size, records, size);
    waiting_size += size;
}

static void *deliver(void *unused) {
    uint8_t *buffer = 0;
    size_t size = 0, most = 0;
    requested(&buffer, &size, &most);
    if (buffer && size >= waiting_size) {
        memcpy(buffer, waiting, waiting_size);
        completed(0, 0, buffer, size, waiting_size);
    }
    waiting_size = 0;
    return unused;
}

int cuptiActivityRegisterCallbacks(requested_fn r, completed_fn c) { requested = r; completed = c; return 0; }
int cuptiActivityEnable(uint32_t kind) { enabled[kind] = 1; return 0; }
int cuptiActivityDisable(uint32_t kind) { enabled[kind] = 0; return 0; }
int cuptiActivityFlushPeriod(uint32_t ms) { (void)ms; return 0; }
int cuptiActivityFlushAll(uint32_t flag) {
    pthread_t thread;
    (void)flag;
    if (!requested || !waiting_size) return 0;
    if (pthread_create(&thread, 0, deliver, 0)) return 999;
    pthread_join(thread, 0);
    return 0;
}
int cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, uint8_t **record) {
    uint8_t *next = *record ? *record + sizes[*(uint32_t *)*record] : buffer;
    if (next >= buffer + valid) return 12;
    *record = next;
    return 0;
}
int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *count) {
    (void)context; (void)stream;
    *count = dropped;
    dropped = 0;
    return 0;
}
int cuptiActivityPushExternalCorrelationId(uint32_t kind, uint64_t id) { (void)kind; (void)id; return 0; }
int cuptiActivityPopExternalCorrelationId(uint32_t kind, uint64_t *last) { (void)kind; *last = 0; return 0; }
int cuptiGetTimestamp(uint64_t *ns) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    *ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    return 0;
}
int cuptiGetVersion(uint32_t *version) { *version = 130500; return 0; }
int cuptiSubscribe_v2(void **subscriber, void *callback, void *data, void *parameters) {
    (void)callback; (void)data;
    if (other_subscriber) {
        strcpy(*(char **)((char *)parameters + 16), "CUPTI for another tool");
        return 39;
    }
    subscribers++;
    *subscriber = &subscribers;
    return 0;
}
int cuptiUnsubscribe(void *subscriber) { (void)subscriber; subscribers--; return 0; }
int cuptiGetResultString(int result, const char **text) { (void)result; *text = "fake"; return 0; }
