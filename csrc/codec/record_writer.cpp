#include "codec/record_writer.h"

#include <algorithm>
#include <functional>

namespace stocache::codec {

bool RecordWriter::add_payload(const void* data, uint64_t size) {
  if (size == 0) return true;
  const uint64_t padding = round_up(payloads_, 16) - payloads_;
  payloads_ += padding + size;
  if (payloads_ >= kRecordLimit) too_large(payloads_);
  auto add_small = [&](uint64_t more) {
    if (!pieces_.empty() && !pieces_.back().data) {
      pieces_.back().size += more;
    } else if (more) {
      pieces_.push_back({nullptr, more});
    }
  };
  small_.append(padding, '\0');
  if (size <= kSmall) {
    small_.append(static_cast<const char*>(data), size);
    add_small(padding + size);
    return true;
  }
  add_small(padding);
  pieces_.push_back({data, size});
  return false;
}

Encoded RecordWriter::finish() {
  if (schema_.size() > kSchemaLimit) {
    throw_unsupported("sample", c10::str("the sample has too many parts (", schema_.size(),
                                         " bytes to describe them; the limit is ", kSchemaLimit,
                                         "): store long lists as tensors, arrays or one bytes"));
  }
  const uint64_t words = 4 * words_.size();
  uint64_t head = words;
  if (!numbers_.empty()) head = round_up(words, 8) + 8 * numbers_.size();
  const uint64_t unpadded = head;
  if (payloads_) head = round_up(head, 16);
  out_.bytes = head + payloads_;
  if (out_.bytes >= kRecordLimit) too_large(out_.bytes);

  out_.own.reset(new uint8_t[head + small_.size()]);
  uint8_t* own = out_.own.get();
  if (!words_.empty()) std::memcpy(own, words_.data(), words);
  if (!numbers_.empty()) {
    const uint64_t at = round_up(words, 8);
    std::memset(own + words, 0, at - words);
    std::memcpy(own + at, numbers_.data(), 8 * numbers_.size());
  }
  std::memset(own + unpadded, 0, head - unpadded);
  if (!small_.empty()) std::memcpy(own + head, small_.data(), small_.size());

  // Code of a later part may have given back the memory of an earlier one.
  TORCH_CHECK(out_.is_there(), "a tensor of the sample changed while it was being stored");
  out_.parts.reserve(pieces_.size() + 1);
  if (head) out_.parts.push_back({own, head});
  own += head;
  for (const Piece& piece : pieces_) {
    if (piece.data) {
      out_.parts.push_back({const_cast<void*>(piece.data), piece.size});
      continue;
    }
    // Only the first can follow on the head: small pieces are merged with each other.
    if (out_.parts.size() == 1 && &piece == pieces_.begin()) {
      out_.parts.back().iov_len += piece.size;
    } else {
      out_.parts.push_back({own, piece.size});
    }
    own += piece.size;
  }
  out_.schema = std::move(schema_);
  return std::move(out_);
}

Encoded& Encoded::operator=(Encoded&& other) noexcept {
  std::swap(schema, other.schema);
  std::swap(parts, other.parts);
  std::swap(bytes, other.bytes);
  std::swap(has_gradients, other.has_gradients);
  std::swap(has_strides, other.has_strides);
  std::swap(own, other.own);
  std::swap(copies, other.copies);
  std::swap(storages, other.storages);
  std::swap(objects, other.objects);
  return *this;
}

bool Lent::is_there() const {
  const auto first = reinterpret_cast<uintptr_t>(storage.data());
  const auto at = reinterpret_cast<uintptr_t>(data);
  return first <= at && at + size <= first + storage.nbytes();
}

bool Encoded::is_there() const {
  return std::all_of(storages.begin(), storages.end(), std::mem_fn(&Lent::is_there));
}

Encoded::~Encoded() {
  for (PyObject* object : objects) Py_DECREF(object);
}

}  // namespace stocache::codec
