#include "tensor/recycled.h"

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

#include "tensor/over.h"

namespace stocache {
namespace {

// Smaller pieces come from malloc's own free lists, already mapped; larger ones are few.
constexpr size_t kSmallest = 32 << 10, kLargest = 16 << 20;
// So much is kept while nobody uses it.
constexpr size_t kKept = 64 << 20;
// A process may have some 65,000 mappings. Where samples are held in greater number, the rest of
// them come from malloc, as torch's would.
constexpr size_t kMostPieces = 4096;
// So many pieces of other sizes make room for one, at the most.
constexpr size_t kMostLeaving = 64;
// Sizes are rounded up by an eighth at most, so that samples of varying size find one another's.
constexpr int kSteps = 8;
constexpr size_t kSizes = kSteps * (std::bit_width(kLargest) - std::bit_width(kSmallest) + 1);

// In front of every piece.
struct alignas(16) Head {
  uint32_t size;  // which of the sizes, or kNone: from malloc
};
constexpr uint32_t kNone = UINT32_MAX;

// Which size so many bytes get, and how many that is.
struct Size {
  uint32_t number;
  size_t bytes;
};
Size size_for(size_t bytes) {
  const size_t power = std::bit_floor(bytes), step = power / kSteps;
  const size_t steps = (bytes - power + step - 1) / step;
  const auto powers = static_cast<uint32_t>(std::bit_width(power) - std::bit_width(kSmallest));
  return {powers * kSteps + static_cast<uint32_t>(steps), power + steps * step};
}

struct Pool {
  std::array<std::vector<Head*>, kSizes + 1> free;
  size_t bytes = 0;
  // The size whose turn it is to make room for others.
  size_t leaving = 0;
  // Who finds it set goes to malloc. A child of fork() may find it set by a thread that it does not
  // have, and goes there always.
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  // Those in use included.
  std::atomic<size_t> pieces = 0;
};

// It is there from the start, and never goes: tensors may outlive everything else, and a fork may
// come at any time.
union Forever {
  Pool pool;
  constexpr Forever() : pool() {}
  ~Forever() {}
};
constinit Forever forever;

Pool& pool() { return forever.pool; }

// Does something with the pool, unless somebody else is at it.
template <typename F>
bool with_pool(F&& does) {
  Pool& all = pool();
  if (all.busy.test_and_set(std::memory_order_acquire)) return false;
  struct Clear {
    std::atomic_flag& flag;
    ~Clear() { flag.clear(std::memory_order_release); }
  } clear{all.busy};
  return does(all);
}

size_t bytes_of(uint32_t size) {
  const size_t power = kSmallest << (size / kSteps);
  return power + size % kSteps * (power / kSteps);
}

void unmap(Head* head) {
  const size_t bytes = sizeof(Head) + bytes_of(head->size);
  if (munmap(head, bytes) == 0) {
    pool().pieces.fetch_sub(1, std::memory_order_relaxed);
  } else {  // it would take one more mapping, and the process has all it may have
    madvise(head, bytes, MADV_DONTNEED);
  }
}

// Those that are let go of, so that so many bytes can be kept: of other sizes, each in its turn.
// What was used before may not be used any more.
struct Leaving {
  std::array<Head*, kMostLeaving> pieces;
  size_t count = 0;

  bool make_room(Pool& all, uint32_t size) {
    const size_t most = kKept - bytes_of(size);
    for (size_t looked = 0; all.bytes > most; ++looked) {
      auto& others = all.free[all.leaving];
      if (looked > all.free.size() || count == pieces.size()) return false;
      if (all.leaving != size && !others.empty()) {
        pieces[count++] = others.back();
        others.pop_back();
        all.bytes -= bytes_of(static_cast<uint32_t>(all.leaving));
        looked = 0;
      }
      all.leaving = (all.leaving + 1) % all.free.size();
    }
    return true;
  }
};

void give_back(void* owner) {
  auto* head = static_cast<Head*>(owner);
  if (head->size == kNone) {
    std::free(head);
    return;
  }
  Leaving leaving;
  const bool kept = with_pool([&](Pool& all) {
    auto& free = all.free[head->size];
    if (free.size() == free.capacity() || !leaving.make_room(all, head->size)) return false;
    free.push_back(head);
    all.bytes += bytes_of(head->size);
    return true;
  });
  for (size_t i = 0; i < leaving.count; ++i) unmap(leaving.pieces[i]);
  if (!kept) unmap(head);
}

// Not from malloc: what is kept, somewhere in its heap, would keep it from giving back the rest.
Head* mapped(const Size& size) {
  auto& pieces = pool().pieces;
  if (pieces.fetch_add(1, std::memory_order_relaxed) < kMostPieces) {
    void* memory = mmap(nullptr, sizeof(Head) + size.bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory != MAP_FAILED) return new (memory) Head{size.number};
  }
  pieces.fetch_sub(1, std::memory_order_relaxed);
  return nullptr;
}

Head* allocated(size_t bytes) {
  static_assert(alignof(Head) <= alignof(std::max_align_t));
  void* memory = std::malloc(sizeof(Head) + bytes);
  if (!memory) throw std::bad_alloc();
  return new (memory) Head{kNone};
}

Head* kept_piece(uint32_t size) {
  Head* found = nullptr;
  with_pool([&](Pool& all) {
    auto& free = all.free[size];
    // Here memory may run out; where pieces are given back it must not.
    if (free.capacity() == 0) free.reserve(kKept / bytes_of(size));
    if (free.empty()) return false;
    found = free.back();
    free.pop_back();
    all.bytes -= bytes_of(size);
    return true;
  });
  return found;
}

}  // namespace

c10::DataPtr recycled(size_t bytes) {
  Head* head = nullptr;
  if (kSmallest <= bytes && bytes <= kLargest) {
    const Size size = size_for(bytes);
    head = kept_piece(size.number);
    if (!head) head = mapped(size);
  }
  if (!head) head = allocated(bytes);  // also where a process may have no more mappings
  return memory_of(head + 1, head, &give_back);
}

}  // namespace stocache
