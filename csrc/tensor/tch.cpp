// What core/tch.c passes on, compiled against the torch that is there. One that is missing here is
// an error when libstocache is linked.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>

namespace {

// What the last call failed with, until tch asks. From malloc, because tch frees it so.
thread_local char* last_error = nullptr;

// What `call` gives; an exception becomes the answer `otherwise` and an error that tch asks for.
template <typename Call, typename Answer>
Answer or_error(Call call, Answer otherwise) noexcept {
  try {
    return call();
  } catch (const std::exception& e) {
    std::free(last_error);
    last_error = strdup(e.what());
  }
  return otherwise;
}

}  // namespace

extern "C" {

char* stocache_get_and_reset_last_err() {
  char* error = last_error;
  last_error = nullptr;
  return error;
}

at::Tensor* stocache_at_shallow_clone(at::Tensor* tensor) {
  return or_error([&] { return new at::Tensor(*tensor); }, static_cast<at::Tensor*>(nullptr));
}

void stocache_at_free(at::Tensor* tensor) { delete tensor; }

void* stocache_at_data_ptr(at::Tensor* tensor) {
  return or_error([&] { return tensor->data_ptr(); }, static_cast<void*>(nullptr));
}

int stocache_at_is_contiguous(at::Tensor* tensor) {
  return or_error([&]() -> int { return tensor->is_contiguous(); }, 0);
}

size_t stocache_at_dim(at::Tensor* tensor) {
  return or_error([&]() -> size_t { return tensor->dim(); }, size_t{0});
}

void stocache_at_shape(at::Tensor* tensor, int64_t* sizes) {
  or_error([&] { return std::copy_n(tensor->sizes().begin(), tensor->dim(), sizes); }, sizes);
}

int stocache_at_scalar_type(at::Tensor* tensor) {
  return or_error([&] { return static_cast<int>(tensor->scalar_type()); }, -1);
}

void stocache_atg_contiguous(at::Tensor** out, at::Tensor* tensor) {
  *out = or_error([&] { return new at::Tensor(tensor->contiguous()); },
                  static_cast<at::Tensor*>(nullptr));
}

}  // extern "C"
