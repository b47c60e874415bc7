// The C functions of torch-sys that our Rust reaches through tch, and no others. torch-sys would
// compile a wrapper of every function of one version of torch; these few compile with any. One that
// is missing here is an error when libstocache is linked (-z defs).
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

char* get_and_reset_last_err() {
  char* error = last_error;
  last_error = nullptr;
  return error;
}

at::Tensor* at_shallow_clone(at::Tensor* tensor) {
  return or_error([&] { return new at::Tensor(*tensor); }, static_cast<at::Tensor*>(nullptr));
}

void at_free(at::Tensor* tensor) { delete tensor; }

void* at_data_ptr(at::Tensor* tensor) {
  return or_error([&] { return tensor->data_ptr(); }, static_cast<void*>(nullptr));
}

int at_is_contiguous(at::Tensor* tensor) {
  return or_error([&]() -> int { return tensor->is_contiguous(); }, 0);
}

size_t at_dim(at::Tensor* tensor) {
  return or_error([&]() -> size_t { return tensor->dim(); }, size_t{0});
}

void at_shape(at::Tensor* tensor, int64_t* sizes) {
  or_error([&] { return std::copy_n(tensor->sizes().begin(), tensor->dim(), sizes); }, sizes);
}

int at_scalar_type(at::Tensor* tensor) {
  return or_error([&] { return static_cast<int>(tensor->scalar_type()); }, -1);
}

void atg_contiguous(at::Tensor** out, at::Tensor* tensor) {
  *out = or_error([&] { return new at::Tensor(tensor->contiguous()); },
                  static_cast<at::Tensor*>(nullptr));
}

}  // extern "C"
