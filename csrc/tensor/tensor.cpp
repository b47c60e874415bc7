#include "tensor/tensor.h"

#include <vector>

#include "stocache-torch/src/bridge.rs.h"
#include "tensor/over.h"

namespace stocache {
namespace {

void drop_pin(void* pin) { bridge::unpin(static_cast<bridge::Pin*>(pin)); }

}  // namespace

at::Tensor segment_tensor(bridge::Pin* pin, uint8_t* data, uint64_t bytes, at::IntArrayRef sizes,
                          at::IntArrayRef strides, caffe2::TypeMeta dtype) {
  // First, so that the pin is dropped whatever fails.
  c10::DataPtr memory = memory_of(data, pin, &drop_pin);
  return tensor_over(storage_over(std::move(memory), bytes), sizes, dtype, strides);
}

namespace bridge {

std::unique_ptr<at::Tensor> over_segment(Pin* pin, uint8_t* data, uint64_t bytes,
                                         ::rust::Slice<const int64_t> sizes, int32_t dtype) {
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i];
  }
  const auto type = c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(dtype));
  return std::make_unique<at::Tensor>(segment_tensor(pin, data, bytes, shape, strides, type));
}

}  // namespace bridge
}  // namespace stocache
