#include "api/interrupt.h"

#include <atomic>

#include "stocache-torch/src/bridge.rs.h"

namespace stocache {
namespace {

std::atomic<bool (*)()> asked{nullptr};

}  // namespace

void ask_with(bool (*ask)()) {
  asked.store(ask, std::memory_order_release);
  bridge::ask_cpp();
}

namespace bridge {

bool is_interrupted() noexcept {
  const auto ask = asked.load(std::memory_order_acquire);
  return ask && ask();
}

}  // namespace bridge
}  // namespace stocache
