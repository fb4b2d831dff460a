/* A libnvidia-ml.so.1 without a GPU: each call reads the file that FAKE_NVML names.
 *
 * Its lines are `KEY VALUE`; a key that is absent has the value of a healthy GPU. `N.KEY VALUE` is
 * for GPU N alone. Keys: gpus, init, hang (NAME of the function that never returns), lost, and those
 * of the functions below; `error.FUNCTION CODE` makes a function fail; `absent.FUNCTION 1` is as in
 * a driver that lacks it. `xid NUMBER SERIAL GPU`: one event for each new SERIAL.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void *device;
typedef unsigned long long u64;
typedef struct { device gpu; u64 type, data; unsigned instance, compute; } event;
typedef struct {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char text[32];
} pci_info;
typedef struct { unsigned gpu, memory; } rates;
typedef struct { u64 total, free, used; } memory_info;
enum { NOT_SUPPORTED = 3, TIMEOUT = 10, NOT_FOUND = 13, LOST = 15 };

static int index_of(device gpu) { return (int)((size_t)gpu & 0xff); }

static int line_of(const char *key, char *value, size_t size) {
  const char *path = getenv("FAKE_NVML");
  FILE *file = path ? fopen(path, "r") : NULL;
  char line[256];
  int found = 0;
  size_t n = strlen(key);
  while (file && fgets(line, sizeof line, file))
    if (!strncmp(line, key, n) && line[n] == ' ') {
      line[strcspn(line, "\n")] = 0;
      snprintf(value, size, "%s", line + n + 1);
      found = 1;
    }
  if (file) fclose(file);
  return found;
}

static u64 number(const char *key, u64 healthy) {
  char value[256];
  return line_of(key, value, sizeof value) ? strtoull(value, NULL, 0) : healthy;
}

static u64 of(device gpu, const char *key, u64 healthy) {
  char own[128];
  snprintf(own, sizeof own, "%d.%s", index_of(gpu), key);
  return number(own, number(key, healthy));
}

static int fails(device gpu, const char *function) {
  char key[128], value[256];
  if (line_of("hang", value, sizeof value) && !strcmp(value, function))
    for (;;) pause();
  snprintf(key, sizeof key, "absent.%s", function);
  if (number(key, 0)) return NOT_FOUND;
  if (gpu && of(gpu, "lost", 0)) return (int)of(gpu, "lost", LOST);
  snprintf(key, sizeof key, "error.%s", function);
  return (int)(gpu ? of(gpu, key, 0) : number(key, 0));
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return (int)number("init", 0); }
int nvmlInit_v2(void) { return (int)number("init", 0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) {
  switch (code) {
    case 3: return "Not Supported";
    case 9: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 13: return "Function Not Found";
    case 15: return "GPU is lost";
    case 16: return "GPU requires reset";
  }
  return "Unknown Error";
}
int nvmlSystemGetDriverVersion(char *text, unsigned n) { strncpy(text, "580.1", n); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) {
  *n = (unsigned)number("gpus", 1);
  return fails(NULL, "nvmlDeviceGetCount");
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, device *gpu) {
  *gpu = (device)(0x7f0000000100 | (size_t)i);
  return fails(*gpu, "nvmlDeviceGetHandleByIndex");
}
int nvmlDeviceGetUUID(device gpu, char *text, unsigned n) {
  snprintf(text, n, "GPU-%d", index_of(gpu));
  return fails(gpu, "nvmlDeviceGetUUID");
}
int nvmlDeviceGetName(device gpu, char *text, unsigned n) {
  snprintf(text, n, "Fake H100");
  return fails(gpu, "nvmlDeviceGetName");
}
int nvmlDeviceGetPciInfo_v3(device gpu, pci_info *pci) {
  memset(pci, 0, sizeof *pci);
  pci->bus = 0x65 + (unsigned)index_of(gpu);
  return fails(gpu, "nvmlDeviceGetPciInfo");
}
int nvmlDeviceGetTemperature(device gpu, int sensor, unsigned *t) {
  *t = (unsigned)of(gpu, "temperature", 41) + (unsigned)sensor;
  return fails(gpu, "nvmlDeviceGetTemperature");
}
int nvmlDeviceGetPowerUsage(device gpu, unsigned *mw) {
  *mw = 300000;
  return fails(gpu, "nvmlDeviceGetPowerUsage");
}
int nvmlDeviceGetTotalEccErrors(device gpu, int kind, int since, u64 *n) {
  *n = of(gpu, kind ? "ecc_uncorrected" : "ecc_corrected", 0) + (u64)(since ? 100 : 0);
  return fails(gpu, "nvmlDeviceGetTotalEccErrors");
}
int nvmlDeviceGetRemappedRows(device gpu, unsigned *c, unsigned *u, unsigned *p, unsigned *f) {
  *c = 1, *u = 2;
  *p = (unsigned)of(gpu, "remap_pending", 0), *f = (unsigned)of(gpu, "remap_failed", 0);
  return fails(gpu, "nvmlDeviceGetRemappedRows");
}
int nvmlDeviceGetCurrentClocksEventReasons(device gpu, u64 *bits) {
  *bits = of(gpu, "reasons", 0x1);
  return fails(gpu, "nvmlDeviceGetCurrentClocksEventReasons");
}
int nvmlDeviceGetCurrentClocksThrottleReasons(device gpu, u64 *bits) {
  *bits = of(gpu, "reasons", 0x1);
  return fails(gpu, "nvmlDeviceGetCurrentClocksThrottleReasons");
}
int nvmlDeviceGetUtilizationRates(device gpu, rates *used) {
  used->gpu = (unsigned)of(gpu, "utilization", 97), used->memory = 50;
  return fails(gpu, "nvmlDeviceGetUtilizationRates");
}
int nvmlDeviceGetMemoryInfo(device gpu, memory_info *memory) {
  memory->total = 80000000000, memory->used = of(gpu, "memory_used", 60000000000);
  memory->free = memory->total - memory->used;
  return fails(gpu, "nvmlDeviceGetMemoryInfo");
}
int nvmlDeviceGetPcieReplayCounter(device gpu, unsigned *n) {
  *n = (unsigned)of(gpu, "pcie_replays", 0);
  return fails(gpu, "nvmlDeviceGetPcieReplayCounter");
}
int nvmlDeviceGetNvLinkState(device gpu, unsigned link, unsigned *up) {
  *up = link < 4;
  return link < 6 ? fails(gpu, "nvmlDeviceGetNvLinkState") : NOT_SUPPORTED;
}
int nvmlDeviceGetNvLinkErrorCounter(device gpu, unsigned link, int counter, u64 *n) {
  *n = link == 0 && counter == 0 ? of(gpu, "nvlink_errors", 0) : 0;
  return fails(gpu, "nvmlDeviceGetNvLinkErrorCounter");
}
int nvmlEventSetCreate(void **set) { *set = (void *)1; return fails(NULL, "nvmlEventSetCreate"); }
int nvmlDeviceRegisterEvents(device gpu, u64 types, void *set) {
  (void)types, (void)set;
  return fails(gpu, "nvmlDeviceRegisterEvents");
}
int nvmlEventSetWait_v2(void *set, event *happened, unsigned milliseconds) {
  static char seen[64];
  char value[256], serial[64];
  (void)set;
  for (unsigned waited = 0;; waited += 10) {
    int code = fails(NULL, "nvmlEventSetWait"), xid = 0, gpu = 0;
    if (code) return code;
    if (line_of("xid", value, sizeof value) &&
        sscanf(value, "%d %63s %d", &xid, serial, &gpu) == 3 && strcmp(serial, seen)) {
      strcpy(seen, serial);
      memset(happened, 0, sizeof *happened);
      happened->gpu = (device)(0x7f0000000100 | (size_t)gpu);
      happened->type = 8, happened->data = (u64)xid;
      return 0;
    }
    if (waited >= milliseconds) return TIMEOUT;
    usleep(10000);
  }
}
