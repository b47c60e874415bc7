// A store of records under Python: samples go in and come out as objects.
#pragma once

#include <Python.h>
// Python.h stays first.
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "api/errors.h"
#include "codec/codec.h"
#include "python/usual_layout.h"
#include "stocache-torch/src/bridge.rs.h"
#include "tensor/buffers.h"

namespace stocache {

// The schema number of a record that brings its own: a length, the schema, and zeros up to a
// multiple of 16, before the record proper.
inline constexpr uint16_t kInline = UINT16_MAX;
// Below this, giving up the GIL costs more than it saves others.
inline constexpr size_t kWorthReleasing = 256 << 10;

// Everything runs with the GIL held, which also guards the tables of schemas; bytes are moved
// without it.
class RecordCache {
 public:
  explicit RecordCache(const bridge::RecordOptions& options);
  ~RecordCache();

  const bridge::Records& records() const { return *records_; }

  // The sample, a new reference; nullptr without a Python error if it is not in memory. Counts
  // nothing: a miss may yet become a hit, if another process is waited for.
  PyObject* get(int64_t index, bool allow_pickle);
  // The sample of a record from a level below; nullptr without a Python error if there is none.
  PyObject* made_of(const bridge::RecordAt& record, int64_t index, bool allow_pickle);
  // Puts a disk level below it.
  void open_disk(const bridge::DiskOptions& options);
  // Puts a cluster below it, and below the disk.
  void open_cluster(const bridge::ClusterOptions& options);
  // Stores a sample that was to be loaded; ends the claim in any case.
  bridge::Put put(bridge::Acquiring& acquiring, int64_t index, PyObject* sample, bool allow_pickle);
  // Why nothing can be stored from this process, once; empty if something can.
  std::string news();
  // Whether the stored sample differs from this one; nothing if it is not there.
  std::optional<bool> differs(int64_t index, PyObject* sample, bool allow_pickle);

  using Schema = std::shared_ptr<const codec::Schema>;
  // The schema of that number; nullptr if the store does not know it.
  Schema schema_of(uint16_t number);
  // Memory for batches that stay in this process.
  Buffers& buffers() { return buffers_; }
  // How batches of what servers have are laid out.
  UsualLayout& usual_layout() { return usual_layout_; }

 private:
  // A copy of the record that nobody changes; undefined if it is not there.
  at::Tensor copy(int64_t index, uint16_t& schema);
  PyObject* decode(at::Tensor record, uint16_t schema, int64_t index, bool allow_pickle);
  uint16_t number_of(const std::string& schema);

  ::rust::Box<bridge::Records> records_;
  std::vector<Schema> schemas_;
  std::unordered_map<std::string, uint16_t> numbers_;
  Buffers buffers_;
  UsualLayout usual_layout_;
  bool told_ = false;
  bool has_below_ = false;
};

}  // namespace stocache
