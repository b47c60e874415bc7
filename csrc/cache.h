// A cache as C++ code uses it: the ops and the Python fast path both stand on this.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "buffers.h"
#include "errors.h"
#include "stocache-torch/src/bridge.rs.h"
#include "tensor.h"

namespace stocache {

class Cache {
 public:
  explicit Cache(::rust::Box<bridge::Handle> handle);

  static std::shared_ptr<Cache> open(const bridge::Options& options);
  static std::shared_ptr<Cache> by_id(int64_t id);

  // A view of the sample. Empty where there is none; IndexError outside the dataset.
  std::optional<at::Tensor> get(int64_t index) const;
  // The bare look-up of the hot path, and the view of what it hit.
  bridge::Found look(int64_t index) const { return handle_->look(index); }
  at::Tensor view(uint8_t* data) const {
    return segment_tensor(handle_->pin(), data, facts_.slot_bytes, sizes_, strides_, dtype_);
  }

  bridge::Slot set(int64_t index, const at::Tensor& value, bool overwrite) const;

  // The batch and which of it was found. Without `out`, into a buffer that is used again.
  std::tuple<at::Tensor, at::Tensor> get_many(const at::Tensor& indices,
                                              const std::optional<at::Tensor>& out,
                                              int64_t threads);
  // Which of the batch were stored, and whether this call froze the cache.
  std::tuple<at::Tensor, bool> set_many(const at::Tensor& indices, const at::Tensor& values,
                                        bool overwrite) const;

  at::Tensor slot_in_place(int64_t index) const;
  at::Tensor array() const;
  at::Tensor states() const;
  void clear() const;
  bridge::Stats stats() const { return handle_->stats(); }
  std::string frozen_reason() const { return std::string(handle_->frozen_reason()); }
  const bridge::Facts& facts() const { return facts_; }

  // The exceptions of a drop-in for stocaching, word for word.
  [[noreturn]] void throw_outside_dataset(int64_t index) const;
  [[noreturn]] void throw_outside_cache(int64_t index) const;

 private:
  void check_value(const at::Tensor& value, at::IntArrayRef sizes, const char* what) const;
  at::Tensor check_indices(const at::Tensor& indices) const;
  std::vector<int64_t> batch_sizes(int64_t rows) const;

  ::rust::Box<bridge::Handle> handle_;
  bridge::Facts facts_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  caffe2::TypeMeta dtype_;
  Buffers buffers_;
};

}  // namespace stocache
