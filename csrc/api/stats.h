// The numbers of `Stats` by name, in the order of Python's SharedCacheStats.
#pragma once

#include <stocache/shared_cache.h>

#include <array>
#include <utility>

namespace stocache {

inline std::array<std::pair<const char*, int64_t>, 13> numbers(const Stats& stats) {
  return {{{"hits", stats.hits},
           {"misses", stats.misses},
           {"fills", stats.fills},
           {"bytes", stats.bytes},
           {"waits", stats.waits},
           {"lost", stats.lost},
           {"dropped", stats.dropped},
           {"damaged", stats.damaged},
           {"filled", stats.filled},
           {"capacity", stats.capacity},
           {"dataset_len", stats.dataset_len},
           {"slot_bytes", stats.slot_bytes},
           {"frozen", stats.frozen}}};
}

}  // namespace stocache
