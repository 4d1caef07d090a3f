#include "report.h"

#include <atomic>
#include <sstream>

#include "isa.h"

namespace gdn {
namespace xpu {
namespace twin {

std::string report_json() {
  std::ostringstream s;
  s.precision(15);
  s << "[";
  bool first = true;
  for (const LaunchReport& r : take_reports()) {
    const Counters& c = r.total;
    s << (first ? "" : ",") << "{\"kernel\":\"" << r.kernel << "\",\"load_bytes\":" << c.load_bytes
      << ",\"store_bytes\":" << c.store_bytes << ",\"transfers\":" << c.transfers
      << ",\"small_transfers\":" << c.small_transfers << ",\"vector\":" << c.vector
      << ",\"scalar\":" << c.scalar << ",\"transcendental\":" << c.transcendental
      << ",\"fences\":" << c.fences << ",\"barriers\":" << c.barriers
      << ",\"lm_high_water\":" << c.lm_high_water << ",\"vectors_alive\":" << c.vectors_alive
      << ",\"core_work_max\":" << r.core_work_max << ",\"core_work_mean\":" << r.core_work_mean
      << ",\"core_waits_max\":" << r.core_waits_max << ",\"cores_active\":" << r.cores_active
      << "}";
    first = false;
  }
  s << "]";
  return s.str();
}

std::string forms_json() {
  std::ostringstream s;
  s << "[";
  bool first = true;
  for (const Form& f : forms()) {
    s << (first ? "" : ",") << "{\"mnemonic\":\"" << f.mnemonic << "\",\"operands\":\""
      << f.operands << "\",\"seen\":" << (f.proof == Proof::seen ? "true" : "false")
      << ",\"evidence\":\"" << f.evidence << "\"}";
    first = false;
  }
  s << "]";
  return s.str();
}

namespace {
std::atomic<int64_t> g_host_copies{0};
}
void count_host_copy() { ++g_host_copies; }
int64_t host_copies() { return g_host_copies; }

void configure(const std::string& key, const std::string& value) {
  if (key == "vmac" && (value == "fused" || value == "unfused")) {
    config().fused_mac = value == "fused";
  } else if (key == "GDN_XPU_SCALAR_MAC" && (value == "0" || value == "1")) {
    config().scalar_mac = value == "1";
  } else if (key == "GDN_XPU_NO_MERGE32" && (value == "0" || value == "1")) {
    config().no_merge32 = value == "1";
  } else if (key == "mutate") {
    size_t space = value.find(' ');
    Mutation m;
    if (space != std::string::npos) {
      m.kind = value.substr(0, space);
      m.site = value.substr(space + 1);
    }
    set_mutation(m);
  } else {
    throw TwinError("twin: no setting " + key + " = " + value);
  }
}

}  // namespace twin
}  // namespace xpu
}  // namespace gdn
