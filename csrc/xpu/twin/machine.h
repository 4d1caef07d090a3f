// The host twin of a Kunlun XPU3: clusters of cores with local memory, shared memory and DMA, which
// runs the kernels' C++ on the host and their assembly text through an interpreter (isa.h).
//
// The twin is stricter than any public statement about the chip: a kernel that passes here obeys
// every rule in docs/xpu.md, whether or not the silicon would forgive a breach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace gdn {
namespace xpu {
namespace twin {

constexpr int kClusters = 12;
constexpr int kCores = 64;            // per cluster
constexpr int kLmBytes = 8192;        // per core
constexpr int kLmUsable = 8000;       // the vendor's compilers refuse a larger stack
constexpr int kStackReserve = 1024;   // of it, kept for scalars, spills and call frames
constexpr int kSmBytes = 256 * 1024;  // per cluster

// Fence spaces, as the operand of the vendor's mfence.
enum : int { kFenceLm = 1, kFenceSm = 2, kFenceGm = 4 };

struct SmPtr {  // byte offset in the cluster's shared memory
  uint32_t at = 0;
  SmPtr operator+(int bytes) const { return SmPtr{at + static_cast<uint32_t>(bytes)}; }
};

struct Where {
  const char* file;
  int line;
};

// A breach of a memory, ordering or instruction rule.
class TwinError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Counters {
  uint64_t load_bytes = 0, store_bytes = 0;  // DMA between GM and LM or SM
  uint64_t transfers = 0;
  uint64_t small_transfers = 0;  // below 64 bytes
  uint64_t vector = 0;           // vector instructions, whatever their kind
  uint64_t scalar = 0;           // scalar float operations and scalar LM/SM accesses
  uint64_t transcendental = 0;   // exp, log, sqrt, divide
  uint64_t fences = 0, barriers = 0;
  uint64_t waits = 0;  // of them, those that ended transfers: round trips to global memory
  // Maxima, not sums.
  uint64_t lm_high_water = 0;  // bytes, stack reserve included
  uint64_t vectors_alive = 0;  // vector variables in scope, which want a register each
  void add(const Counters& o);
};

struct LaunchReport {
  std::string kernel;
  int clusters = 0, cores = 0;
  Counters total;
  uint64_t core_work_max = 0;  // vector instructions of the busiest core
  double core_work_mean = 0;   // over all cores of the chip
  uint64_t core_waits_max = 0;
  int cores_active = 0;  // cores that executed a vector instruction
};

struct Config {
  bool fused_mac = true;  // vmac rounds once; false: product and sum each round
  // Switches of the build (kernels/lang.h).
#if defined(GDN_XPU_SCALAR_MAC)
  bool scalar_mac = true;
#else
  bool scalar_mac = false;
#endif
#if defined(GDN_XPU_NO_MERGE32)
  bool no_merge32 = true;
#else
  bool no_merge32 = false;
#endif
};
Config& config();

// Global memory is the host's under addresses the host cannot use: bit 52 is set, so that a host
// that follows a device pointer faults. Only registered ranges may be touched.
constexpr uint64_t kGmTag = 1ull << 52;
inline void* gm_host(uint64_t addr) { return reinterpret_cast<void*>(addr & ~kGmTag); }
void gm_register(uint64_t base, uint64_t bytes);
void gm_unregister(uint64_t base);

// One deliberate defect, for the mutation tests: `site` is "file:line" or, for an instruction,
// "file:line#index". Empty kind: none.
struct Mutation {
  std::string kind, site;
};
void set_mutation(const Mutation& m);
const Mutation& mutation();
uint64_t mutation_epoch();

// Every place in a kernel that can be mutated, as "kind site" lines, known once it has run.
std::vector<std::string> mutation_sites();
void note_site(const char* kind, const std::string& site);

struct GmAccess {
  uint64_t addr;
  uint32_t bytes;
  uint32_t epoch;  // barriers the cluster had passed
  uint16_t core;   // cluster * kCores + core
  uint16_t line;
  bool write;
};

// Shadow of one local byte.
enum : uint8_t {
  kUninit = 1,       // never written in this launch
  kPendLoad = 2,     // target of a transfer no fence has covered
  kPendStore = 4,    // source of such a transfer
  kVectorDirty = 8,  // written by a vector store since the last fence
  kScalarDirty = 16,
  kRead = 32,  // read by the core since the last fence
};

struct Core {
  alignas(64) uint8_t lm[kLmBytes];
  alignas(64) uint8_t shadow[kLmBytes];
  int cluster = 0, core = 0;
  size_t lm_top = 0;
  size_t touched_lo = kLmBytes, touched_hi = 0;  // span with flags a fence must clear
  Counters counters;
  std::vector<GmAccess> pending;  // transfers since the last fence
  uint32_t fence_id = 0;          // counts fences that covered SM
  int vectors_alive = 0;
  bool sm_taken = false;  // has declared the kernel's array of shared memory

  void reset(int cluster_id, int core_id);
  void touch(size_t offset, size_t bytes) {
    if (offset < touched_lo) touched_lo = offset;
    if (offset + bytes > touched_hi) touched_hi = offset + bytes;
  }
};

// The core whose code is running.
extern Core* current;

int cluster_id();
int cluster_num();
int core_id();
int core_num();

[[noreturn]] void fail(Where where, const std::string& what);

// Offset in the running core's local memory; raises when [p, p + bytes) is not inside it.
size_t lm_offset(const void* p, size_t bytes, Where where);

// The same for one scalar, which has to be aligned.
size_t lm_scalar_offset(const void* p, size_t bytes, Where where);

void* lm_alloc(size_t bytes, Where where);
void lm_release(size_t top);
// Bytes [p, p + bytes) of an arena become another array; `left` is what the arena still has.
void lm_cut(const void* p, int bytes, int left, Where where);

enum class Unit { vector, scalar };
void lm_check_read(size_t offset, size_t bytes, Unit unit, Where where);
void lm_check_write(size_t offset, size_t bytes, Unit unit, Where where);

// A transfer or fence in a kernel's source; constructed once.
struct Site {
  Where where;
  Site(const char* kind, const char* file, int line);
  bool mutated(const char* kind) const;
  const char* kind;
  std::string name;
  mutable uint64_t epoch = ~0ull;
  mutable bool hit = false;
};

void dma_load(const Site& site, uint64_t gm, void* lm, int64_t bytes);  // GM to LM, asynchronous
void dma_store(const Site& site, const void* lm, uint64_t gm, int64_t bytes);  // LM to GM
void fence(const Site& site, int spaces);
void barrier(const Site& site);

// Shared memory: byte offsets within the running core's cluster. The kernel's one array begins at
// 0.
SmPtr sm_array(int bytes, Where where);
void sm_read(uint32_t offset, void* out, size_t bytes, Unit unit, Where where);
void sm_write(uint32_t offset, const void* in, size_t bytes, Unit unit, Where where);

// Runs `body` on every core; with barriers the cores of a cluster run as fibres.
void launch(const char* kernel, int clusters, int cores, bool barriers,
            const std::function<void()>& body);

// Reports of the launches since the last call.
std::vector<LaunchReport> take_reports();

}  // namespace twin
}  // namespace xpu
}  // namespace gdn
