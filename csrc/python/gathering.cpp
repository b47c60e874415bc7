#include "python/gathering.h"

#include <c10/core/InferenceMode.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <utility>

#include "api/errors.h"
#include "python/shared_batches.h"
#include "python/support.h"

namespace stocache {
namespace {

using python::WithoutGil;
using Schema = RecordCache::Schema;

// So many schemas of samples that were not stored are remembered.
constexpr size_t kRemembered = 64;

// Whether batches of such samples are gathered here; where images are `fused` they may have some.
bool can_be_gathered(const Schema& schema, bool fused) {
  return schema && (fused ? schema->fusible() : schema->collatable()) &&
         !codec::is_collated_otherwise(*schema);
}

// The schema of these bytes.
Schema parsed(std::string_view bytes) {
  using Schemas = std::unordered_map<std::string, Schema>;
  static Schemas& remembered = *new Schemas;
  const std::string text(bytes);
  const auto found = remembered.find(text);
  if (found != remembered.end()) return found->second;
  Schema made = codec::Schema::parse(text);
  Schemas dropped;
  if (remembered.size() >= kRemembered) dropped.swap(remembered);
  remembered.insert_or_assign(text, made);
  return made;
}

// The sample taken apart; nothing if batches of such samples are not gathered.
std::optional<codec::Encoded> taken_apart(PyObject* sample, bool fused) {
  try {
    // A pickle stands for an object that default_collate must see itself.
    auto encoded = codec::encode(sample, false);
    if (!encoded.has_gradients && can_be_gathered(parsed(encoded.schema), fused)) return encoded;
  } catch (const c10::Error&) {
  } catch (...) {
    if (!is_python_error()) throw;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw PythonError();  // Ctrl-C
    PyErr_Clear();
  }
  return std::nullopt;
}

}  // namespace

codec::Ref Loaded::sample(uint32_t row) const {
  if (!samples) return {};
  if (PyList_Check(samples)) {  // code of a sample's may have made it shorter
    const bool there = static_cast<Py_ssize_t>(row) < PyList_GET_SIZE(samples);
    return codec::Ref::to(there ? PyList_GET_ITEM(samples, static_cast<Py_ssize_t>(row)) : nullptr);
  }
  codec::Ref key = codec::checked(PyLong_FromUnsignedLong(row));
  PyObject* found = PyDict_GetItemWithError(samples, key.get());
  if (!found && PyErr_Occurred()) throw PythonError();
  return codec::Ref::to(found);
}

Gathering::Gathering(Caches caches, std::vector<uint32_t> which,
                     const std::vector<int64_t>& indices, size_t threads, bool shared, Fused fused)
    : caches_(std::move(caches)),
      which_(std::move(which)),
      fused_(std::move(fused)),
      threads_(std::max<size_t>(1, threads)),
      shared_(shared),
      process_(getpid()),
      collation_(bridge::new_batch(0)) {
  auto& batch = collation_.batch();
  for (const auto& cache : caches_) batch.add_store(cache->records());
  if (fused_.pipeline) {
    batch.fuse(**fused_.pipeline, fused_.seed, fused_.epoch,
               {fused_.numbers.data(), fused_.numbers.size()});
  }
  possible_ = !indices.empty() &&
              batch.find({which_.data(), which_.size()}, {indices.data(), indices.size()}) &&
              agree_on_schema() && begin();
  if (possible_ && batch.is_coming()) {
    received_ = true;
    begin_as_usual();
  }
}

Gathering::Gathering(std::shared_ptr<RecordCache> cache, size_t rows, size_t threads, bool shared)
    : caches_{std::move(cache)},
      threads_(std::max<size_t>(1, threads)),
      shared_(shared),
      process_(getpid()),
      keeps_strides_(true),
      possible_(rows > 0),
      collation_(bridge::new_batch(rows)) {}

// Who is at reading for it is waited for, as long as the disk takes.
Gathering::~Gathering() {
  if (!collation_.batch().is_coming()) return;
  const WithoutGil free(PyGILState_Check());
  try {
    collation_.batch().arrive();
  } catch (const ::rust::Error&) {  // it is not wanted any more
  }
}

std::vector<uint32_t> Gathering::absent() const {
  const auto rows = collation_.batch().absent();
  return {rows.begin(), rows.end()};
}

bool Gathering::agree_on_schema() {
  auto& batch = collation_.batch();
  for (size_t store = 0; store < caches_.size(); ++store) {
    const auto found = batch.schemas_in(store);
    const std::vector<uint16_t> numbers(found.begin(), found.end());
    for (const uint16_t number : numbers) {
      const Schema schema = caches_[store]->schema_of(number);
      if (!agree_on(schema)) return false;
      if (schema->bytes() != schema_->bytes()) batch.know(store, number, schema->parsed());
    }
  }
  return true;
}

bool Gathering::agree_on(const Schema& schema) {
  if (!schema_) {
    if (!is_gathered(schema)) return false;
    schema_ = schema;
    return true;
  }
  if (schema == schema_) return true;
  if (!schema) return false;
  if (schema->bytes() == schema_->bytes()) return true;
  return fused_.pipeline && schema->is_like(*schema_);
}

bool Gathering::is_gathered(const Schema& schema) const {
  return can_be_gathered(schema, fused_.pipeline != nullptr);
}

bool Gathering::give(uint32_t row, const Schema& schema, ::rust::Slice<const bridge::Part> pieces) {
  if (!agree_on(schema)) return false;
  auto& batch = collation_.batch();
  if (schema->bytes() == schema_->bytes()) return batch.give(row, pieces);
  return batch.give_as(row, pieces, schema->parsed());
}

codec::Collation::Allocate Gathering::allocate() {
  return [this](at::IntArrayRef sizes, at::ScalarType dtype) {
    // Batches that are begun ahead in an inference mode may be used outside.
    const c10::InferenceMode none(false);
    const auto type = c10::scalarTypeToTypeMeta(dtype);
    return shared_ ? shared_batch(sizes, type) : caches_[0]->buffers().take(sizes, type);
  };
}

bool Gathering::begin() {
  if (!schema_ || begun_) return true;
  begun_ = true;
  if (!collation_.plan(schema_, allocate())) return false;
  collation_.begin(threads_);
  return true;
}

bool Gathering::begin_as_usual() {
  if (begun_ || schema_ || fused_.pipeline) return false;
  const auto usual = caches_[0]->usual_layout().get();
  if (!usual.columns || !is_gathered(usual.schema)) return false;
  if (!collation_.plan_like(usual.schema, **usual.columns, allocate())) return false;
  schema_ = usual.schema;
  begun_ = as_usual_ = true;
  collation_.begin(threads_);
  return true;
}

bool Gathering::give_absent(const Loaded& loaded) {
  auto& batch = collation_.batch();
  bool all = true;
  for (const uint32_t row : batch.absent()) {
    const auto record = loaded.records.find(row);
    if (record != loaded.records.end()) {
      const auto& [schema, data, bytes] = record->second;
      const bridge::Part part{data, bytes};
      if (!give(row, parsed(schema), {&part, 1})) return false;
      continue;
    }
    const codec::Ref sample = loaded.sample(row);
    if (!sample) {
      all = false;
      continue;
    }
    auto apart = taken_apart(sample.get(), fused_.pipeline != nullptr);
    if (!apart || (keeps_strides_ && apart->has_strides)) return false;
    const Schema schema = parsed(apart->schema);
    std::vector<bridge::Part> pieces;
    for (const auto& part : apart->parts) {
      pieces.push_back({static_cast<const uint8_t*>(part.iov_base), part.iov_len});
    }
    encoded_.push_back(std::move(*apart));
    if (!give(row, schema, {pieces.data(), pieces.size()})) return false;
  }
  // What nobody brought may have come into a store.
  return all || (batch.look_again() && arrive() && agree_on_schema());
}

bool Gathering::arrive() {
  auto& batch = collation_.batch();
  if (!batch.is_coming()) return true;
  bool alike = false;
  {
    WithoutGil free;
    alike = translated([&] { return batch.arrive(); });
  }
  return alike && agree_on_schema();
}

std::vector<int64_t> Gathering::receive(bridge::Acquiring& acquiring) {
  if (!possible_ || caches_.size() != 1) return {};
  auto& batch = collation_.batch();
  received_ = true;
  if (!begun_ && !begin_as_usual()) {
    bool alike = false;
    {
      WithoutGil free;
      alike = translated([&] { return batch.lend(acquiring); });
    }
    // Whatever goes wrong, no row is left to what somebody else keeps.
    struct Lent {
      bridge::Batch& batch;
      ~Lent() { batch.return_lent(); }
    } lent{batch};
    possible_ = alike && agree_on_schema() && begin();
    if (!possible_ || !begun_) return {};
    WithoutGil free;
    translated([&] { batch.keep_lent(acquiring); });
  }
  WithoutGil free;
  translated([&] { batch.receive(acquiring); });
  const auto present = batch.present();
  return {present.begin(), present.end()};
}

bool Gathering::is_there() const {
  return std::all_of(encoded_.begin(), encoded_.end(), std::mem_fn(&codec::Encoded::is_there)) &&
         std::all_of(memory_.begin(), memory_.end(), std::mem_fn(&codec::Lent::is_there));
}

PyObject* Gathering::finish(const Loaded& loaded, const std::vector<uint64_t>& counted) {
  PyObject* made = try_to_finish(loaded, counted);
  if (made && received_) {
    caches_[0]->usual_layout().note(schema_, collation_.batch());
  } else if (as_usual_ && !made) {
    caches_[0]->usual_layout().was_wrong();
  }
  return made;
}

PyObject* Gathering::try_to_finish(const Loaded& loaded, const std::vector<uint64_t>& counted) {
  if (!std::exchange(possible_, false)) return nullptr;
  // In a child, memory that processes share is that of its parent's batch.
  if (shared_ && process_ != getpid()) return nullptr;
  if (!arrive()) return nullptr;
  memory_ = loaded.memory;
  if (!give_absent(loaded) || !is_there() || !begin() || !begun_) return nullptr;
  bool whole = false;
  {
    WithoutGil free;
    whole = translated([&] { return collation_.batch().finish(); }) == bridge::Gathered::Whole;
  }
  if (!whole) return nullptr;
  PyObject* made = collation_.finish();
  if (!made) return nullptr;
  std::vector<uint64_t> rows(caches_.size());
  if (which_.empty()) {
    rows[0] = collation_.batch().rows();
  } else {
    for (const uint32_t store : which_) ++rows[store];
  }
  for (size_t store = 0; store < rows.size(); ++store) {
    const uint64_t known = store < counted.size() ? std::min(counted[store], rows[store]) : 0;
    if (rows[store] > known) caches_[store]->records().note(rows[store] - known, 0);
  }
  encoded_.clear();
  memory_.clear();
  return made;
}

PyObject* pack(PyObject* samples, bool fused) {
  codec::Ref items = codec::checked(PyDict_Items(samples));
  const Py_ssize_t count = PyList_GET_SIZE(items.get());
  std::vector<codec::Encoded> encoded;
  std::unordered_map<std::string_view, Py_ssize_t> places;
  codec::Ref schemas = codec::checked(PyList_New(0));
  codec::Ref rows = codec::checked(PyList_New(count));
  uint64_t bytes = 0;
  encoded.reserve(static_cast<size_t>(count));  // `places` has views of its schemas
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(items.get(), i);
    auto apart = taken_apart(PyTuple_GET_ITEM(item, 1), fused);
    if (!apart) return nullptr;
    encoded.push_back(std::move(*apart));
    const auto& record = encoded.back();
    const auto [place, is_new] =
        places.try_emplace(record.schema, static_cast<Py_ssize_t>(places.size()));
    if (is_new) {
      codec::Ref schema = codec::checked(PyBytes_FromStringAndSize(
          record.schema.data(), static_cast<Py_ssize_t>(record.schema.size())));
      codec::check(PyList_Append(schemas.get(), schema.get()));
    }
    PyObject* row = Py_BuildValue("OnKK", PyTuple_GET_ITEM(item, 0), place->second,
                                  static_cast<unsigned long long>(bytes),
                                  static_cast<unsigned long long>(record.bytes));
    PyList_SET_ITEM(rows.get(), i, codec::checked(row).release());
    bytes += (record.bytes + 15) / 16 * 16;
  }
  // Few different sizes, whose buffers are then used again: to make one costs more than to fill it.
  const at::Tensor packed =
      shared_batch(static_cast<int64_t>(std::bit_ceil(bytes)), caffe2::TypeMeta::Make<uint8_t>());
  // Code of a later sample may have given back the memory of an earlier one.
  if (!std::all_of(encoded.begin(), encoded.end(), std::mem_fn(&codec::Encoded::is_there))) {
    return nullptr;
  }
  {
    WithoutGil free(bytes >= kWorthReleasing);
    auto* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
    for (const auto& record : encoded) {
      uint8_t* at = to;
      for (const auto& part : record.parts) {
        std::memcpy(at, part.iov_base, part.iov_len);
        at += part.iov_len;
      }
      to += (record.bytes + 15) / 16 * 16;
    }
  }
  codec::Ref tensor = codec::checked(to_python(packed));
  return PyTuple_Pack(3, tensor.get(), schemas.get(), rows.get());
}

}  // namespace stocache
