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
// vmac = fused | unfused; mutate = "" or "<kind> <site>".
void configure(const std::string& key, const std::string& value);

}  // namespace twin
}  // namespace xpu
}  // namespace gdn
