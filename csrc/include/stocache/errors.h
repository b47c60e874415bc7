// What stocache throws, beside c10's ValueError, TypeError, IndexError and Error.
//
// All of them are c10::Error: `what_without_backtrace()` is the sentence that Python shows too.
#pragma once

#include <c10/util/Exception.h>

namespace stocache {

// Not enough memory, space on the mount, or descriptors: MemoryError in Python.
class SpaceError : public c10::Error {
  using c10::Error::Error;
};

// The operating system said no: OSError in Python.
class SystemError : public c10::Error {
  using c10::Error::Error;
};

}  // namespace stocache
