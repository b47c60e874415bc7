#include "records.h"

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "crew.h"
#include "python_support.h"
#include "shared_batches.h"

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
// Rows are handed to threads in parts of about this size.
constexpr uint64_t kBytesPerPart = 128 << 10;

// Fresh bytes without a trip through the dispatcher.
at::Tensor fresh(size_t bytes) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       c10::GetCPUAllocator()->allocate(bytes),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                   c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                   caffe2::TypeMeta::Make<uint8_t>());
  const auto size = static_cast<int64_t>(bytes);
  impl->set_sizes_contiguous(at::IntArrayRef(size));
  return at::Tensor(std::move(impl));
}

std::string_view view(const ::rust::Vec<uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
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

// Copies all rows, on up to that many threads; whether they are a batch.
bool copy_rows(const codec::Collation& batch, size_t threads) {
  const size_t parts = std::clamp<size_t>(batch.bytes() / kBytesPerPart, 1, batch.rows());
  const size_t share_of = (batch.rows() + parts - 1) / parts;
  std::atomic<bool> alike = true;
  share((batch.rows() + share_of - 1) / share_of, threads, [&](size_t part) {
    const size_t first = part * share_of;
    if (!batch.copy(first, std::min(first + share_of, batch.rows()))) alike = false;
  });
  return alike;
}

}  // namespace

RecordCache::RecordCache(const bridge::RecordOptions& options)
    : records_(translated([&] {
        WithoutGil free;
        return bridge::open_records(options);
      })) {}

at::Tensor RecordCache::copy(int64_t index, uint16_t& schema) {
  for (int i = 0; i < kTries; ++i) {
    const uint64_t before = records_->epoch();
    const auto found = records_->find(index);
    if (!found.data) return {};
    at::Tensor record = fresh(found.len);
    {
      WithoutGil free(found.len >= kWorthReleasing);
      std::memcpy(record.mutable_data_ptr(), found.data, found.len);
    }
    schema = found.schema;
    if (records_->unmoved(before)) return record;
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
  PyObject* sample = schema->decode(record, allow_pickle);
  records_->note(1, 0);
  return sample;
}

bridge::Filled RecordCache::put(int64_t index, PyObject* sample, bool allow_pickle) {
  codec::Encoded encoded;
  uint16_t number = 0;
  try {
    encoded = codec::encode(sample, allow_pickle);
    number = number_of(encoded.schema);
  } catch (...) {
    records_->abandon(index);
    throw;
  }
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
    return records_->fill(index, number, {parts.data(), parts.size()});
  });
}

PyObject* RecordCache::collate(const std::vector<int64_t>& indices, int64_t threads, bool shared,
                               uint64_t counted) {
  if (indices.empty()) return nullptr;
  std::vector<std::pair<const uint8_t*, uint64_t>> rows(indices.size());
  const codec::Schema::Allocate allocate = [&](at::IntArrayRef sizes, at::ScalarType dtype) {
    return shared ? shared_batch(sizes, c10::scalarTypeToTypeMeta(dtype))
                  : buffers_.take(sizes, c10::scalarTypeToTypeMeta(dtype));
  };
  for (int i = 0; i < kTries; ++i) {
    const uint64_t before = records_->epoch();
    uint16_t number = 0;
    for (size_t row = 0; row < indices.size(); ++row) {
      const auto found = records_->find(indices[row]);
      const bool first = row == 0;
      if (!found.data || found.schema == kInline || (!first && found.schema != number)) {
        return nullptr;
      }
      number = found.schema;
      rows[row] = {found.data, found.len};
    }
    const Schema schema = schema_of(number);
    if (!schema || !schema->collatable()) return nullptr;
    std::unique_ptr<codec::Collation> batch;
    {
      WithoutGil free;
      batch = codec::Collation::plan(schema, rows, allocate);
      if (batch && !copy_rows(*batch, static_cast<size_t>(std::max<int64_t>(1, threads)))) {
        batch = nullptr;
      }
    }
    const bool whole = records_->unmoved(before);
    if (whole && !batch) return nullptr;
    if (whole) {
      PyObject* made = batch->finish();
      records_->note(indices.size() - std::min<uint64_t>(counted, indices.size()), 0);
      return made;
    }
  }
  return nullptr;
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
