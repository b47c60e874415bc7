#include "tensor/buffers.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

#include "tensor/over.h"

namespace stocache {
namespace {

constexpr size_t kRing = 8;
// Smaller ones come from malloc's own free lists, already mapped.
constexpr size_t kSmallest = 64 << 10;

// From here on malloc gives memory a mapping of its own, whatever was allocated and freed before.
constexpr size_t kMapped = 32 << 20;
constexpr uintptr_t kHugePage = 2 << 20;

void free_buffer(void* data) { c10::free_cpu(data); }

// A batch of 150 MB is 37,000 pages, each with a fault at its first touch. Where huge pages are
// given to those who ask for them, it is 73.
void ask_for_huge_pages(void* data, size_t bytes) {
  if (bytes < kMapped) return;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  // Where there are none, it stays as it is.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

bool is_ours(const c10::Storage& storage) {
  return storage.data_ptr().get_deleter() == &free_buffer;
}

c10::Storage allocate(size_t bytes) {
  void* data = c10::alloc_cpu(bytes);
  ask_for_huge_pages(data, bytes);
  // With an allocator, so that a batch can grow as torch's can; it then leaves the ring.
  return storage_over(memory_of(data, data, &free_buffer), bytes, c10::GetCPUAllocator());
}

}  // namespace

at::Tensor Buffers::take(at::IntArrayRef sizes, caffe2::TypeMeta dtype) {
  const size_t bytes = c10::multiply_integers(sizes) * dtype.itemsize();
  if (bytes < kSmallest || busy_.test_and_set(std::memory_order_acquire)) {
    return at::empty(sizes, at::TensorOptions().dtype(dtype));
  }
  // Given back at the end: what a program put in the place of our memory may run code of its own.
  std::vector<c10::Storage> gone;
  struct Clear {
    std::atomic_flag& flag;
    ~Clear() { flag.clear(std::memory_order_release); }
  } clear{busy_};
  // Exactly the same size: a larger storage would be carried whole to another process.
  auto fits = [&](const c10::Storage& s) { return s.use_count() == 1 && s.nbytes() == bytes; };
  const auto foreign = std::stable_partition(ring_.begin(), ring_.end(), is_ours);
  gone.assign(std::make_move_iterator(foreign), std::make_move_iterator(ring_.end()));
  ring_.erase(foreign, ring_.end());
  auto found = std::find_if(ring_.begin(), ring_.end(), fits);
  if (found != ring_.end()) {
    // The count is read without order; who gave up the last reference has also read the bytes.
    std::atomic_thread_fence(std::memory_order_acquire);
    return tensor_over(*found, sizes, dtype);
  }
  if (ring_.size() == kRing) ring_.erase(ring_.begin());
  ring_.push_back(allocate(bytes));
  return tensor_over(ring_.back(), sizes, dtype);
}

}  // namespace stocache
