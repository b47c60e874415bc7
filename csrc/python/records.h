// A store of records under Python: samples go in and come out as objects.
#pragma once

#include <Python.h>
// Python.h stays first.
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "api/errors.h"
#include "codec/codec.h"
#include "stocache-torch/src/bridge.rs.h"
#include "tensor/buffers.h"

namespace stocache {

// What a batch consists of besides what the store has, by row.
struct Loaded {
  // Samples: a dict, or nullptr.
  PyObject* samples = nullptr;
  // Records of samples, in the memory of these tensors; see `RecordCache::pack`.
  struct Record {
    uint16_t schema;
    const uint8_t* data;
    size_t bytes;
  };
  std::vector<at::Tensor> packed;
  std::unordered_map<int64_t, Record> records;
};

// Everything runs with the GIL held, which also guards the tables of schemas; bytes are moved
// without it.
class RecordCache {
 public:
  explicit RecordCache(const bridge::RecordOptions& options);

  const bridge::Records& records() const { return *records_; }

  // The sample, a new reference; nullptr without a Python error if it is not there. Counts nothing:
  // a miss may yet become a hit, if another process is waited for.
  PyObject* get(int64_t index, bool allow_pickle);
  // Stores a sample that was to be loaded; ends the claim in any case.
  bridge::Put put(bridge::Acquiring& acquiring, int64_t index, PyObject* sample, bool allow_pickle);
  // What default_collate makes of these samples; nullptr without a Python error if one is not there
  // or they cannot be gathered. With `shared`, in memory that other processes can map.
  // Of the samples, `counted` were counted as they came; the others are hits.
  PyObject* collate(const std::vector<int64_t>& indices, int64_t threads, bool shared,
                    uint64_t counted, const Loaded& loaded);
  // The records of samples (a dict, by row) for another process, in memory that it can map:
  // (tensor, [(row, schema, at, bytes), ...]). nullptr without a Python error if one is not
  // gathered in batches.
  PyObject* pack(PyObject* samples);
  // Why nothing can be stored from this process, once; empty if something can.
  std::string news();
  // Whether the stored sample differs from this one; nothing if it is not there.
  std::optional<bool> differs(int64_t index, PyObject* sample, bool allow_pickle);

 private:
  using Schema = std::shared_ptr<const codec::Schema>;

  // Gives the batch the rows that the store does not have. False if one is not among them either,
  // or cannot be a row of it. `encoded` keeps what the batch then points to.
  bool give_absent(bridge::Batch& batch, const Loaded& loaded,
                   std::vector<codec::Encoded>& encoded);
  // The sample taken apart, and the number of its schema; nothing if batches of such samples are
  // not gathered.
  std::optional<std::pair<codec::Encoded, uint16_t>> taken_apart(PyObject* sample);
  // A copy of the record that nobody changes; undefined if it is not there.
  at::Tensor copy(int64_t index, uint16_t& schema);
  uint16_t number_of(const std::string& schema);
  // The schema of that number; nullptr if the store does not know it.
  Schema schema_of(uint16_t number);

  ::rust::Box<bridge::Records> records_;
  std::vector<Schema> schemas_;
  std::unordered_map<std::string, uint16_t> numbers_;
  Buffers buffers_;
  bool told_ = false;
};

}  // namespace stocache
