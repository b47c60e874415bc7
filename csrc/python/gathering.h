// A batch in the making under Python: rows of stores, and of samples and records that were loaded.
#pragma once

#include <Python.h>
// Python.h stays first.
#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "codec/codec.h"
#include "codec/objects.h"
#include "python/records.h"
#include "stocache-torch/src/bridge.rs.h"

namespace stocache {

// What a batch consists of besides what the stores have, by row.
struct Loaded {
  // Samples: a dict by row, a list of all rows, or nullptr.
  PyObject* samples = nullptr;
  codec::Ref sample(uint32_t row) const;
  // Records of samples, in the memory of tensors; see `pack`.
  struct Record {
    std::string_view schema;
    const uint8_t* data;
    size_t bytes;
  };
  std::unordered_map<int64_t, Record> records;
  std::vector<codec::Lent> memory;
  std::vector<codec::Ref> schemas;  // the bytes that the views of the records lie in
};

// What becomes of images: a pipeline, and what its random numbers follow from beside the index.
struct Fused {
  std::shared_ptr<::rust::Box<bridge::Pipeline>> pipeline;  // none: images stay as they are
  uint64_t seed = 0, epoch = 0;
  std::vector<int64_t> numbers;  // of each row, instead of its index; or none
};

// Everything runs with the GIL held; bytes are moved without it, also while nobody calls.
class Gathering {
 public:
  using Caches = std::vector<std::shared_ptr<RecordCache>>;

  // Begins with the samples of these indices, each in the store of that number, or all in the
  // first. Rows that are there are copied from now on, on up to so many threads. With `shared`, to
  // memory that other processes can map.
  Gathering(Caches caches, std::vector<uint32_t> which, const std::vector<int64_t>& indices,
            size_t threads, bool shared, Fused fused);

  // A batch of samples that were all loaded: `finish` gets them.
  Gathering(std::shared_ptr<RecordCache> cache, size_t rows, size_t threads, bool shared);
  ~Gathering();

  // False if these samples are not gathered, whatever is loaded of them.
  bool is_possible() const { return possible_; }
  // The rows that are not there.
  std::vector<uint32_t> absent() const;
  // Takes of what is acquired as much as comes from below, as it comes: the samples that are there
  // then. The rest is as if nobody had asked.
  std::vector<int64_t> receive(bridge::Acquiring& acquiring);
  // What default_collate makes of the samples; nullptr without a Python error if one is not there,
  // or they cannot be gathered. Of the samples of each store, so many were counted as they came;
  // the others are hits. Once.
  PyObject* finish(const Loaded& loaded, const std::vector<uint64_t>& counted);
  // Whether every row that came from a store is still there.
  bool is_current() const { return collation_.batch().is_current(); }

 private:
  using Schema = RecordCache::Schema;

  // Sees that what was found is of one schema. False if it is not, or is not gathered.
  bool agree_on_schema();
  bool agree_on(const Schema& schema);
  bool is_gathered(const Schema& schema) const;
  // False if it is of another kind than the others.
  bool give(uint32_t row, const Schema& schema, ::rust::Slice<const bridge::Part> pieces);
  // Makes the columns, if any record is there, and begins to copy.
  bool begin();
  // The same by the batches before this one, if they are alike: whether that was done.
  bool begin_as_usual();
  codec::Collation::Allocate allocate();
  PyObject* try_to_finish(const Loaded& loaded, const std::vector<uint64_t>& counted);
  // Waits for what is read from levels below memory; false if it is not gathered.
  bool arrive();
  bool give_absent(const Loaded& loaded);
  // Whether what was given is still where it was: samples may have code, which has run since.
  bool is_there() const;

  Caches caches_;
  std::vector<uint32_t> which_;
  Fused fused_;
  size_t threads_;
  bool shared_;
  pid_t process_;
  // Whether samples in another memory format are left to torch, whose batches have it too.
  bool keeps_strides_ = false;
  bool possible_ = false, begun_ = false;
  // Laid out before its first record; of what levels below have.
  bool as_usual_ = false, received_ = false;
  Schema schema_;
  // What was given: kept until the batch is finished.
  std::vector<codec::Encoded> encoded_;
  std::vector<codec::Lent> memory_;
  codec::Collation collation_;  // goes first: it points to what was given
};

// The records of samples (a dict, by row) for another process, in memory that it can map:
// (tensor, [schema, ...], [(row, schema, at, bytes), ...]), each with the place of its schema in
// the list. nullptr without a Python error if one is not gathered in batches, which where images
// are `fused` may have some.
PyObject* pack(PyObject* samples, bool fused);

}  // namespace stocache
