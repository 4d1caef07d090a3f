// The twin's counters and switches as text, for tests and benchmarks.
#pragma once

#include <string>
#include <vector>

#include "machine.h"

namespace gdn {
namespace xpu {
namespace twin {

// The launches since the last call, a JSON list.
std::string report_json();
// The table of instruction forms, a JSON list.
std::string forms_json();
// Copies between the device and the host, single values too, that no operator run on the CPU made.
void count_host_copy();
int64_t host_copies();
// vmac = fused | unfused; a switch of the build = 0 | 1; mutate = "" or "<kind> <site>".
void configure(const std::string& key, const std::string& value);

}  // namespace twin
}  // namespace xpu
}  // namespace gdn
