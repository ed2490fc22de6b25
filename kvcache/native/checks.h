// Our own invariants: a broken one is a bug of this core and reaches Python as AssertionError.
#pragma once

#include <stdexcept>

namespace kvferry {

struct BrokenInvariant : std::logic_error {
  using std::logic_error::logic_error;
};

inline void ensure(bool holds, const char* message) {
  if (!holds) [[unlikely]] throw BrokenInvariant(message);
}

}  // namespace kvferry
