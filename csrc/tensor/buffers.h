// Batch buffers that are used again once nobody holds them.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <vector>

namespace stocache {

// Fresh memory costs more than the copy into it: the kernel zeroes every page at first touch. So
// the buffers of earlier batches are kept, and one is given out again when this ring holds its
// only reference. A batch that somebody holds, in whatever form, is never touched.
//
// torch replaces the memory under a storage when it moves a batch to another process. Such a
// storage is recognised by its deleter, which is then not ours, and leaves the ring.
class Buffers {
 public:
  at::Tensor take(at::IntArrayRef sizes, caffe2::TypeMeta dtype);

 private:
  std::vector<c10::Storage> ring_;
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;  // a second thread simply gets fresh memory
};

}  // namespace stocache
