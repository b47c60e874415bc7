#include "python/records.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

#include "codec/objects.h"
#include "python/shared_batches.h"
#include "python/support.h"
#include "tensor/over.h"

namespace stocache {
namespace {

using python::WithoutGil;

// The schema number of a record that brings its own: a length, the schema, and zeros up to a
// multiple of 16, before the record proper.
constexpr uint16_t kInline = UINT16_MAX;
// How often a copy is tried again while others recycle the memory under it.
constexpr int kTries = 8;
// Below this, giving up the GIL costs more than it saves others.
constexpr size_t kWorthReleasing = 256 << 10;

// Memory for a record. It is not torch's allocator, which asks for memory aligned to 64 bytes:
// glibc then needs a hole that is larger than the record. The hole that a record of this size has
// left, below a label that somebody keeps, would not do, and the process would grow by every
// record.
at::Tensor fresh(size_t bytes) {
  static_assert(alignof(std::max_align_t) >= 16);  // as the decoder needs it
  void* data = std::malloc(std::max<size_t>(bytes, 1));
  if (!data) throw std::bad_alloc();
  const auto size = static_cast<int64_t>(bytes);
  return tensor_over(storage_over(memory_of(data, data, &std::free), bytes), at::IntArrayRef(size),
                     caffe2::TypeMeta::Make<uint8_t>());
}

std::string_view view(const ::rust::Vec<uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Whether batches of such samples are gathered here.
bool is_gathered(const std::shared_ptr<const codec::Schema>& schema) {
  return schema && schema->collatable() && !codec::is_collated_otherwise(*schema);
}

// What stands before a record that brings its schema.
std::string inline_schema(const std::string& schema) {
  const auto length = static_cast<uint32_t>(schema.size());
  std::string head(4, '\0');
  std::memcpy(head.data(), &length, 4);
  head += schema;
  head.resize((head.size() + 15) / 16 * 16);
  return head;
}

}  // namespace

RecordCache::RecordCache(const bridge::RecordOptions& options)
    : records_(translated([&] {
        WithoutGil free;
        return bridge::open_records(options);
      })) {}

at::Tensor RecordCache::copy(int64_t index, uint16_t& schema) {
  for (int i = 0; i < kTries; ++i) {
    const auto found = records_->find(index);
    if (!found.data) return {};
    at::Tensor record = fresh(found.len);
    {
      WithoutGil free(found.len >= kWorthReleasing);
      std::memcpy(record.mutable_data_ptr(), found.data, found.len);
    }
    schema = found.schema;
    if (records_->is_whole(found.region, found.generation)) return record;
  }
  return {};
}

PyObject* RecordCache::get(int64_t index, bool allow_pickle) {
  uint16_t number = 0;
  at::Tensor record = copy(index, number);
  if (!record.defined()) return nullptr;
  Schema schema;
  if (number == kInline) {
    const auto* bytes = static_cast<const char*>(record.const_data_ptr());
    const auto size = static_cast<size_t>(record.numel());
    uint32_t length = 0;
    TORCH_CHECK_VALUE(size >= 4, "the record of sample ", index, " is damaged");
    std::memcpy(&length, bytes, 4);
    const size_t head = (size_t{4} + length + 15) / 16 * 16;
    TORCH_CHECK_VALUE(head <= size, "the record of sample ", index, " is damaged");
    schema = codec::Schema::parse({bytes + 4, length});
    record =
        record.narrow(0, static_cast<int64_t>(head), static_cast<int64_t>(size - head)).clone();
  } else {
    schema = schema_of(number);
    TORCH_CHECK_VALUE(schema, "the record of sample ", index, " is damaged");
  }
  return schema->decode(record, allow_pickle);
}

bridge::Put RecordCache::put(bridge::Acquiring& acquiring, int64_t index, PyObject* sample,
                             bool allow_pickle) {
  // The claim ends here whatever goes wrong, and once: another thread of this process may claim the
  // sample at once, under the same lease.
  struct Claimed {
    bridge::Acquiring* acquiring;
    int64_t index;
    ~Claimed() {
      if (acquiring) acquiring->abandon(index);
    }
  } claimed{&acquiring, index};
  const auto encoded = codec::encode(sample, allow_pickle);
  const uint16_t number = number_of(encoded.schema);
  std::string head;
  std::vector<bridge::Part> parts;
  parts.reserve(encoded.parts.size() + 1);
  if (number == kInline) {
    head = inline_schema(encoded.schema);
    parts.push_back({reinterpret_cast<const uint8_t*>(head.data()), head.size()});
  }
  for (const auto& part : encoded.parts) {
    parts.push_back({static_cast<const uint8_t*>(part.iov_base), part.iov_len});
  }
  return translated([&] {
    WithoutGil free;
    claimed.acquiring = nullptr;  // `fill` ends it in any case
    return acquiring.fill(index, number, {parts.data(), parts.size()});
  });
}

PyObject* RecordCache::collate(const std::vector<int64_t>& indices, int64_t threads, bool shared,
                               uint64_t counted, const Loaded& loaded) {
  auto batch = bridge::find_batch(*records_, {indices.data(), indices.size()});
  std::vector<codec::Encoded> encoded;  // outlives the batch, which points into it
  if (batch->rows() == 0 || !give_absent(*batch, loaded, encoded)) return nullptr;
  const Schema schema = schema_of(batch->schema());
  if (!is_gathered(schema)) return nullptr;
  codec::Collation collation(schema, std::move(batch));
  const codec::Collation::Allocate allocate = [&](at::IntArrayRef sizes, at::ScalarType dtype) {
    return shared ? shared_batch(sizes, c10::scalarTypeToTypeMeta(dtype))
                  : buffers_.take(sizes, c10::scalarTypeToTypeMeta(dtype));
  };
  bool whole = false;
  {
    WithoutGil free;
    whole = collation.plan(allocate) &&
            collation.copy(static_cast<size_t>(std::max<int64_t>(1, threads))) ==
                bridge::Gathered::Whole;
  }
  if (!whole) return nullptr;
  PyObject* made = collation.finish();
  records_->note(indices.size() - std::min<uint64_t>(counted, indices.size()), 0);
  return made;
}

bool RecordCache::give_absent(bridge::Batch& batch, const Loaded& loaded,
                              std::vector<codec::Encoded>& encoded) {
  for (int64_t row; (row = batch.absent()) >= 0;) {
    const auto record = loaded.records.find(row);
    if (record != loaded.records.end()) {
      const auto& [schema, data, bytes] = record->second;
      const bridge::Part part{data, bytes};
      if (!batch.give(schema, {&part, 1})) return false;
      continue;
    }
    if (!loaded.samples) return false;
    codec::Ref key = codec::checked(PyLong_FromLongLong(row));
    PyObject* sample = PyDict_GetItemWithError(loaded.samples, key.get());
    if (!sample && PyErr_Occurred()) throw python_error();
    if (!sample) return false;
    codec::Ref kept = codec::Ref::to(sample);
    auto apart = taken_apart(sample);
    if (!apart) return false;
    std::vector<bridge::Part> pieces;
    for (const auto& part : apart->first.parts) {
      pieces.push_back({static_cast<const uint8_t*>(part.iov_base), part.iov_len});
    }
    encoded.push_back(std::move(apart->first));
    if (!batch.give(apart->second, {pieces.data(), pieces.size()})) return false;
  }
  return true;
}

std::optional<std::pair<codec::Encoded, uint16_t>> RecordCache::taken_apart(PyObject* sample) {
  try {
    // A pickle stands for an object that default_collate must see itself.
    auto encoded = codec::encode(sample, false);
    const uint16_t number = number_of(encoded.schema);
    if (number == kInline) return std::nullopt;
    if (!is_gathered(schema_of(number))) return std::nullopt;
    return std::make_pair(std::move(encoded), number);
  } catch (python_error& error) {
    error.restore();
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw python_error();  // Ctrl-C
    PyErr_Clear();
  } catch (const c10::Error&) {
  }
  return std::nullopt;
}

PyObject* RecordCache::pack(PyObject* samples) {
  codec::Ref items = codec::checked(PyDict_Items(samples));
  const Py_ssize_t count = PyList_GET_SIZE(items.get());
  std::vector<codec::Encoded> encoded;
  codec::Ref rows = codec::checked(PyList_New(count));
  uint64_t bytes = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(items.get(), i);
    auto apart = taken_apart(PyTuple_GET_ITEM(item, 1));
    if (!apart) return nullptr;
    const auto& [record, schema] = *apart;
    PyObject* row = Py_BuildValue("OHKK", PyTuple_GET_ITEM(item, 0), schema,
                                  static_cast<unsigned long long>(bytes),
                                  static_cast<unsigned long long>(record.bytes));
    PyList_SET_ITEM(rows.get(), i, codec::checked(row).release());
    bytes += (record.bytes + 15) / 16 * 16;
    encoded.push_back(std::move(apart->first));
  }
  const at::Tensor packed =
      shared_batch(static_cast<int64_t>(bytes), caffe2::TypeMeta::Make<uint8_t>());
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
  codec::Ref tensor = codec::checked(THPVariable_Wrap(packed));
  return PyTuple_Pack(2, tensor.get(), rows.get());
}

std::string RecordCache::news() {
  std::string why = told_ ? "" : std::string(records_->cut_off());
  told_ = told_ || !why.empty();
  return why;
}

std::optional<bool> RecordCache::differs(int64_t index, PyObject* sample, bool allow_pickle) {
  uint16_t number = 0;
  const at::Tensor record = copy(index, number);
  if (!record.defined()) return std::nullopt;
  const auto encoded = codec::encode(sample, allow_pickle);
  const std::string head = number == kInline ? inline_schema(encoded.schema) : "";
  const auto* stored = static_cast<const uint8_t*>(record.const_data_ptr());
  const auto size = static_cast<uint64_t>(record.numel());
  if (number != kInline && number != number_of(encoded.schema)) return true;
  if (size != head.size() + encoded.bytes || std::memcmp(stored, head.data(), head.size()) != 0) {
    return true;
  }
  size_t at = head.size();
  for (const auto& part : encoded.parts) {
    if (std::memcmp(stored + at, part.iov_base, part.iov_len) != 0) return true;
    at += part.iov_len;
  }
  return false;
}

uint16_t RecordCache::number_of(const std::string& schema) {
  const auto known = numbers_.find(schema);
  if (known != numbers_.end()) return known->second;
  const uint16_t number =
      records_->intern({reinterpret_cast<const uint8_t*>(schema.data()), schema.size()});
  // INLINE is not remembered: it may have been for want of a lock.
  if (number != kInline) numbers_.emplace(schema, number);
  return number;
}

RecordCache::Schema RecordCache::schema_of(uint16_t number) {
  if (number < schemas_.size() && schemas_[number]) return schemas_[number];
  const auto bytes = records_->schema(number);
  if (bytes.empty()) return nullptr;
  if (number >= schemas_.size()) schemas_.resize(number + size_t{1});
  schemas_[number] = codec::Schema::parse(view(bytes));
  return schemas_[number];
}

}  // namespace stocache
