// A cache as C++ code uses it: the public class, the ops, the TorchScript class and the Python fast
// path all stand on this.
#pragma once

#include <ATen/core/Tensor.h>
#include <stocache/shared_cache.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "api/errors.h"
#include "stocache-torch/src/bridge.rs.h"
#include "tensor/buffers.h"
#include "tensor/tensor.h"

namespace stocache {

class Cache {
 public:
  explicit Cache(::rust::Box<bridge::Handle> handle);

  static std::shared_ptr<Cache> open(const bridge::Options& options);
  static std::shared_ptr<Cache> join(const std::string& name);
  // The cache of that name, which this process joins, for the rest of its life, if need be.
  static std::shared_ptr<Cache> by_name(const std::string& name);
  // Keeps it open for `by_name` when this object is gone; `release` ends that.
  void hold() const { handle_->hold(); }
  static bool release(const std::string& name);

  // Whether the index lies outside the dataset.
  bool is_outside(int64_t index) const { return index < 0 || index >= geometry_.dataset_len; }

  // A view of the sample. Empty where there is none and that is allowed.
  std::optional<at::Tensor> get_slot(int64_t index, bool allow_beyond, bool allow_empty) const;
  // What became of the value; never Outside, Beyond only if allowed, nor Occupied.
  bridge::Slot set_slot(int64_t index, const at::Tensor& value, bool allow_beyond,
                        bool allow_overwrite) const;
  // As above where an occupied slot is no error, and whether it was stored.
  bool offer(int64_t index, const at::Tensor& value, bool allow_overwrite) const;

  // A copy of the sample, zeros if it is not there, and whether it is.
  std::tuple<at::Tensor, at::Tensor> copy(int64_t index) const;
  // The batch and which of it was found. Without `out`, into a buffer that is used again.
  std::tuple<at::Tensor, at::Tensor> get_many(const at::Tensor& indices,
                                              const std::optional<at::Tensor>& out,
                                              int64_t threads);
  // Which of the batch were stored, and whether this call froze the cache.
  std::tuple<at::Tensor, bool> set_many(const at::Tensor& indices, const at::Tensor& batch,
                                        bool allow_overwrite) const;

  at::Tensor slot_in_place(int64_t index) const;
  at::Tensor array() const;
  at::Tensor states() const;
  void clear() const;
  Stats stats() const;
  std::string frozen_reason() const {
    return translated([&] { return std::string(handle_->frozen_reason()); });
  }
  const bridge::Geometry& geometry() const { return geometry_; }
  bridge::Location location() const {
    return translated([&] { return handle_->location(); });
  }
  // What leads here again, or to an equal cache if this one is gone.
  bridge::Options options() const {
    return translated([&] { return handle_->options(); });
  }
  at::IntArrayRef sizes() const { return sizes_; }
  at::ScalarType dtype() const { return static_cast<at::ScalarType>(geometry_.dtype); }

 private:
  at::Tensor view(uint8_t* data) const {
    return segment_tensor(handle_->pin(), data, geometry_.slot_bytes, sizes_, strides_, type_);
  }
  bridge::Slot store(int64_t index, const at::Tensor& value, bool allow_overwrite) const;
  // The exceptions of a drop-in for stocaching, word for word.
  [[noreturn]] void throw_outside_dataset(int64_t index) const;
  [[noreturn]] void throw_outside_cache(int64_t index) const;
  void check_value(const at::Tensor& value, at::IntArrayRef sizes, const char* what) const;
  at::Tensor check_indices(const at::Tensor& indices) const;
  std::vector<int64_t> batch_sizes(int64_t rows) const;

  ::rust::Box<bridge::Handle> handle_;
  bridge::Geometry geometry_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  caffe2::TypeMeta type_;
  Buffers buffers_;
};

// What the user's words ask for. The core checks the values.
bridge::Options options_of(const Options& options, int64_t dataset_len, at::IntArrayRef data_dims,
                           at::ScalarType dtype);

}  // namespace stocache
