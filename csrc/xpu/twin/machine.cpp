#include "machine.h"

#include "isa.h"

#include <ucontext.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>

namespace gdn {
namespace xpu {
namespace twin {
namespace {

const char* base_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash ? slash + 1 : path;
}

struct SmGranule {  // 4 bytes of shared memory
  uint32_t write_epoch = 0, read_epoch = 0, fence_id = 0;
  uint16_t writer = 0, reader = 0;  // core + 1; 0 none
  uint8_t unit = 0;
};

constexpr uint16_t kManyReaders = 0xffff;

struct Chip {
  std::vector<Core> cores{static_cast<size_t>(kCores)};
  std::vector<uint8_t> sm = std::vector<uint8_t>(kSmBytes);
  std::vector<SmGranule> sm_shadow = std::vector<SmGranule>(kSmBytes / 4);
  std::vector<GmAccess> trace;
  const char* kernel = "";
  int clusters = 0, ncores = 0;
  int sm_bytes = 0;    // of the kernel's array
  uint32_t epoch = 1;  // barriers passed in this cluster, plus one
  bool barriers = false;

  // Fibres of the cluster that is running.
  std::vector<ucontext_t> fibres{static_cast<size_t>(kCores)};
  std::vector<std::unique_ptr<char[]>> stacks;
  std::vector<int> state;  // 0 ready, 1 at the barrier, 2 done
  std::vector<const Site*> waiting_at;
  ucontext_t scheduler;
  const std::function<void()>* body = nullptr;
  std::exception_ptr error;
};

Chip& chip() {
  static Chip* c = new Chip;
  return *c;
}

constexpr size_t kFibreStack = 128 * 1024;

std::mutex g_launch_mutex;
std::mutex g_gm_mutex;
std::map<uint64_t, uint64_t>& gm_ranges() {
  static auto* m = new std::map<uint64_t, uint64_t>;
  return *m;
}

std::vector<LaunchReport>& reports() {
  static auto* r = new std::vector<LaunchReport>;
  return *r;
}

Mutation g_mutation;
uint64_t g_mutation_epoch = 0;
std::mutex g_site_mutex;
std::set<std::string>& sites() {
  static auto* s = new std::set<std::string>;
  return *s;
}

std::string hex(uint64_t v) {
  std::ostringstream s;
  s << "0x" << std::hex << v;
  return s.str();
}

uint64_t gm_lo = 1, gm_hi = 0;  // the range the last check fell into

bool gm_inside(uint64_t addr, uint64_t bytes) {
  if (addr >= gm_lo && addr + bytes <= gm_hi) return true;
  std::lock_guard<std::mutex> lock(g_gm_mutex);
  auto it = gm_ranges().upper_bound(addr);
  if (it == gm_ranges().begin()) return false;
  --it;
  if (addr + bytes > it->first + it->second) return false;
  gm_lo = it->first;
  gm_hi = it->first + it->second;
  return true;
}

const char* flag_text(uint8_t flags) {
  if (flags & kPendLoad) return "are the target of a transfer that no fence has covered";
  if (flags & kPendStore) return "are the source of a transfer that no fence has covered";
  if (flags & kUninit) return "were never written";
  if (flags & kVectorDirty) return "were written by a vector store and not fenced";
  if (flags & kScalarDirty) return "were written by a scalar store and not fenced";
  return "were read since the last fence";
}

// One test over the span; only a breach pays for the search.
uint8_t any_flags(size_t offset, size_t bytes) {
  const uint8_t* s = current->shadow + offset;
  uint64_t acc = 0;
  size_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    uint64_t w;
    std::memcpy(&w, s + i, 8);
    acc |= w;
  }
  for (; i < bytes; ++i) acc |= s[i];
  acc |= acc >> 32;
  acc |= acc >> 16;
  acc |= acc >> 8;
  return static_cast<uint8_t>(acc);
}

void check_flags(size_t offset, size_t bytes, uint8_t bad, const char* action, Where where) {
  if (!(any_flags(offset, bytes) & bad)) return;
  const uint8_t* s = current->shadow + offset;
  for (size_t i = 0; i < bytes; ++i) {
    if (s[i] & bad) {
      fail(where, std::string(action) + " of local bytes " + hex(offset) + ".." +
                      hex(offset + bytes) + ": byte " + hex(offset + i) + " " +
                      flag_text(s[i] & bad));
    }
  }
}

void gm_check(uint64_t gm, int64_t bytes, bool write, Where where) {
  if (bytes <= 0) fail(where, "transfer of " + std::to_string(bytes) + " bytes");
  if (!gm_inside(gm, static_cast<uint64_t>(bytes)))
    fail(where, "transfer of " + std::to_string(bytes) + " bytes at global address " + hex(gm) +
                    " leaves every allocation");
  for (const GmAccess& a : current->pending) {
    if ((a.write || write) && gm < a.addr + a.bytes && a.addr < gm + static_cast<uint64_t>(bytes))
      fail(where, "global bytes at " + hex(gm) + " overlap a transfer issued at line " +
                      std::to_string(a.line) + " that no fence has covered");
  }
}

void lm_align_check(size_t offset, int64_t bytes, Where where) {
  size_t need = bytes >= 64 ? 64 : 4;
  if (offset % need)
    fail(where, "transfer of " + std::to_string(bytes) + " bytes at local address " + hex(offset) +
                    ", which is not a multiple of " + std::to_string(need));
}

void record(uint64_t gm, int64_t bytes, bool write, Where where) {
  Chip& c = chip();
  GmAccess a{gm,
             static_cast<uint32_t>(bytes),
             c.epoch,
             static_cast<uint16_t>(current->cluster * kCores + current->core),
             static_cast<uint16_t>(where.line),
             write};
  current->pending.push_back(a);
  c.trace.push_back(a);
  Counters& n = current->counters;
  (write ? n.store_bytes : n.load_bytes) += bytes;
  n.transfers += 1;
  n.small_transfers += bytes < 64;
}

int64_t mutated_bytes(const Site& site, int64_t bytes) {
  if (site.mutated("dma-short")) return bytes > 4 ? bytes - 4 : bytes / 2;
  if (site.mutated("dma-long")) return bytes + 64;
  return bytes;
}

bool ordered(const GmAccess& a, const GmAccess& b) {
  return a.core == b.core || (a.core / kCores == b.core / kCores && a.epoch != b.epoch);
}

// Two cores may touch the same global bytes in one launch only if a barrier orders them.
void check_races(const char* kernel, std::vector<GmAccess>& trace) {
  std::vector<GmAccess> writes;
  for (const GmAccess& a : trace)
    if (a.write) writes.push_back(a);
  std::sort(writes.begin(), writes.end(),
            [](const GmAccess& a, const GmAccess& b) { return a.addr < b.addr; });
  uint32_t widest = 0;
  for (const GmAccess& w : writes) widest = std::max(widest, w.bytes);
  for (const GmAccess& a : trace) {
    uint64_t from = a.addr > widest ? a.addr - widest : 0;
    auto it = std::lower_bound(writes.begin(), writes.end(), from,
                               [](const GmAccess& w, uint64_t v) { return w.addr < v; });
    for (; it != writes.end() && it->addr < a.addr + a.bytes; ++it) {
      if (it->addr + it->bytes <= a.addr || ordered(a, *it)) continue;
      throw TwinError(std::string("kernel ") + kernel + ": cores " + std::to_string(a.core) +
                      " (line " + std::to_string(a.line) + ") and " + std::to_string(it->core) +
                      " (line " + std::to_string(it->line) + ") both touch global address " +
                      hex(std::max(a.addr, it->addr)) + ", at least one writes, unordered");
    }
  }
}

void fibre_entry() {
  Chip& c = chip();
  Core* self = current;
  try {
    (*c.body)();
  } catch (...) {
    if (!c.error) c.error = std::current_exception();
  }
  c.state[self->core] = 2;
  swapcontext(&c.fibres[self->core], &c.scheduler);
}

void run_cluster_with_fibres(int cluster, int cores) {
  Chip& c = chip();
  while (static_cast<int>(c.stacks.size()) < cores) c.stacks.emplace_back(new char[kFibreStack]);
  c.state.assign(cores, 0);
  c.waiting_at.assign(cores, nullptr);
  for (int i = 0; i < cores; ++i) {
    getcontext(&c.fibres[i]);
    c.fibres[i].uc_stack.ss_sp = c.stacks[i].get();
    c.fibres[i].uc_stack.ss_size = kFibreStack;
    c.fibres[i].uc_link = nullptr;
    makecontext(&c.fibres[i], fibre_entry, 0);
  }
  for (;;) {
    for (int i = 0; i < cores && !c.error; ++i) {
      if (c.state[i] != 0) continue;
      current = &c.cores[i];
      swapcontext(&c.scheduler, &c.fibres[i]);
    }
    // Fibres left behind by an error are abandoned: their stacks hold no owning objects.
    if (c.error) std::rethrow_exception(c.error);
    int waiting = 0, done = 0, first = -1, gone = -1;
    for (int i = 0; i < cores; ++i) {
      waiting += c.state[i] == 1;
      done += c.state[i] == 2;
      if (c.state[i] == 1 && first < 0) first = i;
      if (c.state[i] == 2 && gone < 0) gone = i;
    }
    if (done == cores) return;
    current = &c.cores[first];
    if (waiting != cores)
      fail(c.waiting_at[first]->where,
           "barrier mismatch: core " + std::to_string(gone) + " has left the kernel");
    for (int i = 0; i < cores; ++i) {
      if (c.waiting_at[i]->where.line != c.waiting_at[first]->where.line)
        fail(c.waiting_at[i]->where, "barrier mismatch: core " + std::to_string(i) +
                                         " waits here, core " + std::to_string(first) +
                                         " at line " +
                                         std::to_string(c.waiting_at[first]->where.line));
      c.state[i] = 0;
    }
    c.epoch += 1;
  }
  (void)cluster;
}

}  // namespace

Core* current = nullptr;

void Counters::add(const Counters& o) {
  load_bytes += o.load_bytes;
  store_bytes += o.store_bytes;
  transfers += o.transfers;
  small_transfers += o.small_transfers;
  vector += o.vector;
  scalar += o.scalar;
  transcendental += o.transcendental;
  fences += o.fences;
  waits += o.waits;
  barriers += o.barriers;
  lm_high_water = std::max(lm_high_water, o.lm_high_water);
  vectors_alive = std::max(vectors_alive, o.vectors_alive);
}

Config& config() {
  static Config c;
  return c;
}

void gm_register(uint64_t base, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(g_gm_mutex);
  gm_ranges()[base] = bytes;
}

void gm_unregister(uint64_t base) {
  std::lock_guard<std::mutex> lock(g_gm_mutex);
  gm_ranges().erase(base);
  gm_lo = 1;
  gm_hi = 0;
}

void set_mutation(const Mutation& m) {
  g_mutation = m;
  ++g_mutation_epoch;
}
const Mutation& mutation() { return g_mutation; }
uint64_t mutation_epoch() { return g_mutation_epoch; }

void note_site(const char* kind, const std::string& site) {
  std::lock_guard<std::mutex> lock(g_site_mutex);
  sites().insert(std::string(kind) + " " + site);
}

std::vector<std::string> mutation_sites() {
  std::lock_guard<std::mutex> lock(g_site_mutex);
  return {sites().begin(), sites().end()};
}

Site::Site(const char* kind_, const char* file, int line)
    : where{file, line},
      kind(kind_),
      name(std::string(base_name(file)) + ":" + std::to_string(line)) {
  note_site(kind, name);
}

bool Site::mutated(const char* wanted) const {
  if (epoch != g_mutation_epoch) {
    epoch = g_mutation_epoch;
    hit = !g_mutation.kind.empty() && g_mutation.site == name;
  }
  return hit && g_mutation.kind == wanted;
}

void Core::reset(int cluster_id, int core_id_) {
  cluster = cluster_id;
  core = core_id_;
  lm_top = 0;
  touched_lo = kLmBytes;
  touched_hi = 0;
  counters = Counters();
  pending.clear();
  fence_id = 0;
  vectors_alive = 0;
  sm_taken = false;
  std::memset(shadow, kUninit, sizeof(shadow));
}

int cluster_id() { return current->cluster; }
int cluster_num() { return chip().clusters; }
int core_id() { return current->core; }
int core_num() { return chip().ncores; }

void fail(Where where, const std::string& what) {
  throw TwinError(std::string("kernel ") + chip().kernel + ", cluster " +
                  std::to_string(current->cluster) + " core " + std::to_string(current->core) +
                  ", " + base_name(where.file) + ":" + std::to_string(where.line) + ": " + what);
}

size_t lm_offset(const void* p, size_t bytes, Where where) {
  const uint8_t* b = static_cast<const uint8_t*>(p);
  if (b < current->lm || b + bytes > current->lm + current->lm_top)
    fail(where, "local access of " + std::to_string(bytes) + " bytes at offset " +
                    std::to_string(b - current->lm) + " outside the " +
                    std::to_string(current->lm_top) + " bytes in use");
  return static_cast<size_t>(b - current->lm);
}

size_t lm_scalar_offset(const void* p, size_t bytes, Where where) {
  const size_t o = lm_offset(p, bytes, where);
  if (o % bytes)
    fail(where, "scalar access of " + std::to_string(bytes) + " bytes at local address " + hex(o));
  return o;
}

namespace {
// Bytes that may have served another array: what that left behind must not be read, no transfer may
// still be using them, and what the other unit did to them still wants its fence.
void reuse(size_t at, size_t bytes, Where where) {
  check_flags(at, bytes, kPendLoad | kPendStore, "allocation", where);
  for (size_t i = at; i < at + bytes; ++i) current->shadow[i] |= kUninit;
}
}  // namespace

void lm_cut(const void* p, int bytes, int left, Where where) {
  if (left < 0)
    fail(where,
         "the arrays cut from an arena need " + std::to_string(-left) + " bytes more than it has");
  reuse(lm_offset(p, static_cast<size_t>(bytes), where), static_cast<size_t>(bytes), where);
}

void* lm_alloc(size_t bytes, Where where) {
  Core& c = *current;
  size_t at = c.lm_top;
  c.lm_top = (at + bytes + 63) / 64 * 64;
  uint64_t used = c.lm_top + kStackReserve;
  c.counters.lm_high_water = std::max(c.counters.lm_high_water, used);
  if (used > static_cast<uint64_t>(kLmUsable))
    fail(where, "local memory exhausted: " + std::to_string(used) + " of " +
                    std::to_string(kLmUsable) + " bytes, stack reserve included");
  reuse(at, c.lm_top - at, where);
  return c.lm + at;
}

void lm_release(size_t top) { current->lm_top = top; }

void lm_check_read(size_t offset, size_t bytes, Unit unit, Where where) {
  uint8_t bad = kUninit | kPendLoad | (unit == Unit::vector ? kScalarDirty : kVectorDirty);
  check_flags(offset, bytes, bad, unit == Unit::vector ? "vector load" : "scalar load", where);
  uint8_t* s = current->shadow + offset;
  for (size_t i = 0; i < bytes; ++i) s[i] |= kRead;
  current->touch(offset, bytes);
}

void lm_check_write(size_t offset, size_t bytes, Unit unit, Where where) {
  uint8_t bad = kPendLoad | kPendStore | (unit == Unit::vector ? kScalarDirty : kVectorDirty);
  check_flags(offset, bytes, bad, unit == Unit::vector ? "vector store" : "scalar store", where);
  uint8_t* s = current->shadow + offset;
  uint8_t set = unit == Unit::vector ? kVectorDirty : kScalarDirty;
  for (size_t i = 0; i < bytes; ++i) s[i] = static_cast<uint8_t>((s[i] & ~kUninit) | set);
  current->touch(offset, bytes);
}

void dma_load(const Site& site, uint64_t gm, void* lm, int64_t bytes) {
  bytes = mutated_bytes(site, bytes);
  if (site.mutated("dma-drop")) return;
  gm_check(gm, bytes, false, site.where);
  size_t offset = lm_offset(lm, static_cast<size_t>(bytes), site.where);
  lm_align_check(offset, bytes, site.where);
  size_t n = static_cast<size_t>(bytes);
  check_flags(offset, n, kPendLoad | kPendStore | kVectorDirty | kScalarDirty | kRead,
              "transfer into", site.where);
  std::memcpy(current->lm + offset, gm_host(gm), n);
  uint8_t* s = current->shadow + offset;
  for (size_t i = 0; i < n; ++i) s[i] = kPendLoad;
  current->touch(offset, n);
  record(gm, bytes, false, site.where);
}

void dma_store(const Site& site, const void* lm, uint64_t gm, int64_t bytes) {
  bytes = mutated_bytes(site, bytes);
  if (site.mutated("dma-drop")) return;
  gm_check(gm, bytes, true, site.where);
  size_t n = static_cast<size_t>(bytes);
  size_t offset = lm_offset(lm, n, site.where);
  lm_align_check(offset, bytes, site.where);
  check_flags(offset, n, kUninit | kPendLoad | kVectorDirty | kScalarDirty, "transfer out",
              site.where);
  std::memcpy(gm_host(gm), current->lm + offset, n);
  uint8_t* s = current->shadow + offset;
  for (size_t i = 0; i < n; ++i) s[i] |= kPendStore;
  current->touch(offset, n);
  record(gm, bytes, true, site.where);
}

namespace {
void clear_flags(Core& c, bool transfers) {
  uint8_t clear = kVectorDirty | kScalarDirty | kRead;
  if (transfers) clear |= kPendLoad | kPendStore;
  uint8_t keep = static_cast<uint8_t>(~clear);
  for (size_t i = c.touched_lo; i < c.touched_hi; ++i) c.shadow[i] &= keep;
  if (transfers) {
    c.touched_lo = kLmBytes;
    c.touched_hi = 0;
  }
}
}  // namespace

void fence(const Site& site, int spaces) {
  if (site.mutated("fence-drop")) return;
  Core& c = *current;
  c.counters.fences += 1;
  if (spaces & kFenceLm) {
    // A transfer between GM and LM is complete only when both sides are.
    bool transfers = spaces & kFenceGm;
    clear_flags(c, transfers);
    c.counters.waits += transfers && !c.pending.empty();
    if (transfers) c.pending.clear();
  }
  if (spaces & kFenceSm) c.fence_id += 1;
}

void barrier(const Site& site) {
  Chip& c = chip();
  if (!c.barriers) fail(site.where, "barrier in a kernel launched without barriers");
  if (site.mutated("barrier-drop")) return;
  Core* self = current;
  // The vendor's barrier begins with a fence over every space.
  clear_flags(*self, true);
  self->counters.waits += !self->pending.empty();
  self->pending.clear();
  self->counters.barriers += 1;
  self->fence_id += 1;
  c.state[self->core] = 1;
  c.waiting_at[self->core] = &site;
  swapcontext(&c.fibres[self->core], &c.scheduler);
  current = self;
}

SmPtr sm_array(int bytes, Where where) {
  Chip& c = chip();
  if (bytes > kSmBytes)
    fail(where, "shared memory exhausted: " + std::to_string(bytes) + " of " +
                    std::to_string(kSmBytes) + " bytes");
  if (current->sm_taken) fail(where, "a second array of shared memory");
  if (c.sm_bytes && c.sm_bytes != bytes) fail(where, "cores differ in the size of shared memory");
  if (!c.barriers) fail(where, "shared memory in a kernel launched without barriers");
  current->sm_taken = true;
  c.sm_bytes = bytes;
  return SmPtr{0};
}

namespace {
void sm_check(uint32_t offset, size_t bytes, Where where) {
  const int size = chip().sm_bytes;
  if (offset + bytes > static_cast<size_t>(size))
    fail(where, "shared access at " + hex(offset) + " beyond the " + std::to_string(size) +
                    " bytes of the kernel's array");
  if (offset % bytes)
    fail(where, "shared access of " + std::to_string(bytes) + " bytes at " + hex(offset));
}
}  // namespace

void sm_read(uint32_t offset, void* out, size_t bytes, Unit unit, Where where) {
  Chip& c = chip();
  sm_check(offset, bytes, where);
  uint16_t me = static_cast<uint16_t>(current->core + 1);
  for (size_t g = offset / 4; g < (offset + bytes + 3) / 4; ++g) {
    SmGranule& s = c.sm_shadow[g];
    if (!s.writer) fail(where, "shared bytes at " + hex(4 * g) + " were never written");
    if (s.writer != me && s.write_epoch == c.epoch)
      fail(where, "shared bytes at " + hex(4 * g) + " were written by core " +
                      std::to_string(s.writer - 1) + " and no barrier has passed");
    if (s.writer == me && s.write_epoch == c.epoch && s.unit != static_cast<uint8_t>(unit) &&
        s.fence_id == current->fence_id)
      fail(where, "shared bytes at " + hex(4 * g) + " were written by the other unit, not fenced");
    s.reader = s.read_epoch == c.epoch && s.reader && s.reader != me ? kManyReaders : me;
    s.read_epoch = c.epoch;
  }
  std::memcpy(out, c.sm.data() + offset, bytes);
}

void sm_write(uint32_t offset, const void* in, size_t bytes, Unit unit, Where where) {
  Chip& c = chip();
  sm_check(offset, bytes, where);
  uint16_t me = static_cast<uint16_t>(current->core + 1);
  for (size_t g = offset / 4; g < (offset + bytes + 3) / 4; ++g) {
    SmGranule& s = c.sm_shadow[g];
    if (s.writer && s.writer != me && s.write_epoch == c.epoch)
      fail(where,
           "shared bytes at " + hex(4 * g) + " are written by two cores, no barrier between");
    if (s.reader && s.reader != me && s.read_epoch == c.epoch)
      fail(where, "shared bytes at " + hex(4 * g) + " were read by another core, no barrier since");
    s.writer = me;
    s.write_epoch = c.epoch;
    s.fence_id = current->fence_id;
    s.unit = static_cast<uint8_t>(unit);
  }
  std::memcpy(c.sm.data() + offset, in, bytes);
}

void launch(const char* kernel, int clusters, int cores, bool barriers,
            const std::function<void()>& body) {
  std::lock_guard<std::mutex> lock(g_launch_mutex);
  require_host();
  Chip& c = chip();
  if (clusters < 1 || clusters > kClusters || cores < 1 || cores > kCores)
    throw TwinError("launch of " + std::string(kernel) + " on " + std::to_string(clusters) + " x " +
                    std::to_string(cores) + " cores");
  c.kernel = kernel;
  c.clusters = clusters;
  c.ncores = cores;
  c.barriers = barriers;
  c.sm_bytes = 0;
  c.trace.clear();
  c.error = nullptr;
  c.body = &body;
  LaunchReport report;
  report.kernel = kernel;
  report.clusters = clusters;
  report.cores = cores;
  struct Leave {
    ~Leave() { current = nullptr; }
  } leave;
  for (int cluster = 0; cluster < clusters; ++cluster) {
    c.epoch = 1;
    for (int i = 0; i < cores; ++i) c.cores[i].reset(cluster, i);
    if (barriers) {
      std::fill(c.sm_shadow.begin(), c.sm_shadow.end(), SmGranule());
      run_cluster_with_fibres(cluster, cores);
    } else {
      for (int i = 0; i < cores; ++i) {
        current = &c.cores[i];
        body();
      }
    }
    for (int i = 0; i < cores; ++i) {
      current = &c.cores[i];
      if (!current->pending.empty())
        fail({"", current->pending.front().line},
             "kernel ends before this transfer has been fenced");
      const Counters& n = current->counters;
      report.total.add(n);
      report.core_work_max = std::max(report.core_work_max, n.vector);
      report.core_waits_max = std::max(report.core_waits_max, n.waits);
      report.cores_active += n.vector > 0;
    }
  }
  report.core_work_mean = static_cast<double>(report.total.vector) / (kClusters * kCores);
  check_races(kernel, c.trace);
  // Callers that never ask must not grow the list without bound.
  if (reports().size() >= 4096) reports().erase(reports().begin(), reports().begin() + 2048);
  reports().push_back(report);
}

std::vector<LaunchReport> take_reports() {
  std::lock_guard<std::mutex> lock(g_launch_mutex);
  std::vector<LaunchReport> out;
  out.swap(reports());
  return out;
}

}  // namespace twin
}  // namespace xpu
}  // namespace gdn
