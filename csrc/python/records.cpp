#include "python/records.h"

#include <cstring>
#include <utility>

#include "python/support.h"
#include "tensor/over.h"
#include "tensor/recycled.h"

namespace stocache {
namespace {

using python::WithoutGil;

// How often a copy is tried again while others recycle the memory under it.
constexpr int kTries = 8;

at::Tensor fresh(size_t bytes) {
  const auto size = static_cast<int64_t>(bytes);
  return tensor_over(storage_over(recycled(bytes), bytes), at::IntArrayRef(size),
                     caffe2::TypeMeta::Make<uint8_t>());
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
  return record.defined() ? decode(std::move(record), number, index, allow_pickle) : nullptr;
}

PyObject* RecordCache::made_of(const bridge::RecordAt& found, int64_t index, bool allow_pickle) {
  if (!found.data) return nullptr;
  at::Tensor record = fresh(found.len);
  std::memcpy(record.mutable_data_ptr(), found.data, found.len);
  return decode(std::move(record), found.schema, index, allow_pickle);
}

void RecordCache::open_disk(const bridge::DiskOptions& options) {
  translated([&] {
    WithoutGil free;
    records_->open_disk(options);
  });
  has_below_ = true;
}

void RecordCache::open_cluster(const bridge::ClusterOptions& options) {
  translated([&] { records_->open_cluster(options); });
  has_below_ = true;
}

// What is still to be written may take as long as the disk does.
RecordCache::~RecordCache() {
  const WithoutGil free(has_below_ && PyGILState_Check());
  const auto gone = std::move(records_);
}

PyObject* RecordCache::decode(at::Tensor record, uint16_t number, int64_t index,
                              bool allow_pickle) {
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

std::string RecordCache::news() {
  std::string why = told_ ? "" : std::string(records_->cut_off());
  told_ = told_ || !why.empty();
  return why;
}

std::optional<bool> RecordCache::differs(int64_t index, PyObject* sample, bool allow_pickle) {
  uint16_t number = 0;
  const at::Tensor record = copy(index, number);
  if (!record.defined() && !has_below_) return std::nullopt;
  const auto encoded = codec::encode(sample, allow_pickle);
  if (!record.defined()) {
    number_of(encoded.schema);  // from now on its classes may come from below
    return std::nullopt;
  }
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
