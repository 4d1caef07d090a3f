// Everything the kernels include, brought in before an isa_*.cpp raises its target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <utility>

#include "../../args.h"
#include "../../half.h"
#include "../../index.h"
#include "../parallel.h"
#include "../table.h"

#if defined(__x86_64__)
#pragma GCC diagnostic push
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
// The vectors of undefined contents in these headers (`__Y = __Y`) count as faults of whoever
// inlines them: 60 warnings a level.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
