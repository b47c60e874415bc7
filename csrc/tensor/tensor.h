// Tensors over a segment. Called by Rust through the bridge, and by the hot path directly.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "rust/cxx.h"

namespace stocache::bridge {

struct Pin;

// A tensor over `bytes` bytes at `data`. It owns `pin`, which keeps them mapped.
std::unique_ptr<at::Tensor> over_segment(Pin* pin, uint8_t* data, uint64_t bytes,
                                         ::rust::Slice<const int64_t> sizes, int32_t dtype);

}  // namespace stocache::bridge

namespace stocache {

// As above with the strides known. Every tensor gets a storage of its own that spans just its
// bytes: torch copies whole storages when it pickles or shares a tensor, so a slot that shared
// the storage of the array would drag all of the cache along.
at::Tensor segment_tensor(bridge::Pin* pin, uint8_t* data, uint64_t bytes, at::IntArrayRef sizes,
                          at::IntArrayRef strides, caffe2::TypeMeta dtype);

}  // namespace stocache
