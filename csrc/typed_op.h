// An op of this library by its name, as a C++ function of the signature its schema stands for.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace gdn {

// Looking a name up costs a hash: callers keep the handle in a static.
template <class Signature>
auto typed_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace gdn
