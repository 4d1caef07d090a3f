// Everything the kernels include, brought in before an isa_*.cpp raises its target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../../args.h"
#include "../../half.h"
#include "../../index.h"
#include "../parallel.h"
#include "../table.h"
