// The schema and the record of one sample, written part by part.
#pragma once

#include "codec/codec.h"
// Python.h stays first.
#include <c10/util/SmallVector.h>

#include <cstring>

#include "codec/format.h"
#include "codec/path.h"

namespace stocache::codec {

class RecordWriter {
 public:
  RecordWriter() { schema_.push_back(kVersion); }
  Encoded finish();

 protected:
  void put(Kind kind) { schema_.push_back(static_cast<char>(kind)); }

  void add_word(uint64_t word, const Path& where) {
    if (word > UINT32_MAX) refuse(where, " has a size of ", word, "; the limit is 2^32 - 1");
    words_.push_back(static_cast<uint32_t>(word));
  }

  template <typename Value>
  void add_number(Value value) {
    static_assert(sizeof(value) == 8);
    uint64_t bits;
    std::memcpy(&bits, &value, 8);
    numbers_.push_back(bits);
  }

  // Whether the bytes were copied. If not, they must be kept alive.
  bool add_payload(const void* data, uint64_t size);
  void add_storage(const c10::Storage& storage) {
    out_.storages.push_back({storage, pieces_.back().data, pieces_.back().size});
  }
  void add_length(uint64_t size, const Path& where) {
    if (size >= kRecordLimit) too_large(size);
    add_word(size, where);
  }
  void add_owned(Ref object, const void* data, uint64_t size) {
    if (!add_payload(data, size)) out_.objects.push_back(object.release());
  }
  void add_bytes(Ref bytes, const Path& where) {
    const auto data = bytes_of(bytes.get());
    add_length(data.size(), where);
    add_owned(std::move(bytes), data.data(), data.size());
  }
  [[noreturn]] static void too_large(uint64_t bytes) {
    throw_unsupported("sample", c10::str("the sample takes ", bytes >> 20,
                                         " MiB; one sample may take at most 4 GiB"));
  }

  std::string schema_;
  c10::SmallVector<uint32_t, 24> words_;
  c10::SmallVector<uint64_t, 8> numbers_;
  struct Piece {
    const void* data;  // nullptr: the next bytes of `small_`
    uint64_t size;
  };
  c10::SmallVector<Piece, 8> pieces_;
  std::string small_;
  uint64_t payloads_ = 0;  // their bytes so far
  Encoded out_;
};

}  // namespace stocache::codec
