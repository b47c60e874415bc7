// Tensors over memory that was not made for them: of a segment, a record, a batch buffer.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <utility>

namespace stocache {

// Memory that `drop(owner)` gives back once nobody uses it any more.
inline c10::DataPtr memory_of(void* data, void* owner, c10::DeleterFnPtr drop) {
  return c10::DataPtr(data, owner, drop, c10::Device(c10::DeviceType::CPU));
}

// A storage that spans just these bytes. With an allocator, torch may give it other memory when the
// tensor is to grow.
inline c10::Storage storage_over(c10::DataPtr memory, uint64_t bytes,
                                 c10::Allocator* allocator = nullptr) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                            bytes, std::move(memory), allocator,
                                                            /*resizable=*/allocator != nullptr));
}

namespace detail {

inline c10::intrusive_ptr<c10::TensorImpl> impl_over(c10::Storage storage, caffe2::TypeMeta dtype) {
  return c10::make_intrusive<c10::TensorImpl>(std::move(storage),
                                              c10::DispatchKeySet(c10::DispatchKey::CPU), dtype);
}

}  // namespace detail

// A contiguous tensor, without a trip through the dispatcher.
inline at::Tensor tensor_over(c10::Storage storage, at::IntArrayRef sizes, caffe2::TypeMeta dtype) {
  auto impl = detail::impl_over(std::move(storage), dtype);
  impl->set_sizes_contiguous(sizes);
  return at::Tensor(std::move(impl));
}

inline at::Tensor tensor_over(c10::Storage storage, at::IntArrayRef sizes, caffe2::TypeMeta dtype,
                              at::IntArrayRef strides, int64_t offset = 0) {
  auto impl = detail::impl_over(std::move(storage), dtype);
  impl->set_sizes_and_strides(sizes, strides);
  if (offset) impl->set_storage_offset(offset);
  return at::Tensor(std::move(impl));
}

}  // namespace stocache
