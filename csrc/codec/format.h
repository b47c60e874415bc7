// How schemas and records (codec.h) are written. Who reads them is in Rust
// (rust/core/src/records/schema), which also says what kinds and sizes there are. Nothing here
// knows Python.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "stocache-torch/src/bridge.rs.h"

namespace stocache::codec {

using bridge::Kind;

constexpr char kVersion = 1;  // the first byte of a schema
constexpr uint64_t kRecordLimit = uint64_t{1} << 32;
constexpr size_t kSchemaLimit = 4 << 20;
constexpr int kDepthLimit = 100;
constexpr size_t kTensorDims = 255;
constexpr size_t kArrayDims = 64;
// Payloads up to this size are copied next to each other: cheaper than one more iovec.
constexpr uint64_t kSmall = 512;

constexpr uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) & ~(to - 1); }

inline ::rust::Slice<const uint8_t> as_slice(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

inline std::string_view as_text(::rust::Slice<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// The bytes of `dims` items of `itemsize`; false if no tensor can have these dims.
inline bool multiply(const uint32_t* dims, size_t count, uint64_t itemsize, uint64_t& bytes) {
  return bridge::dims_bytes({dims, count}, itemsize, bytes);
}

inline bool multiply_pixels(uint32_t width, uint32_t height, uint8_t bits, uint64_t& bytes) {
  return bridge::pixels_bytes(width, height, bits, bytes);
}

inline std::optional<bridge::ImageMode> image_mode(std::string_view name) {
  const auto found = bridge::image_mode(as_slice(name));
  return found.bits ? std::optional(found) : std::nullopt;
}

inline bool is_palette_mode(std::string_view name) {
  return bridge::is_palette_mode(as_slice(name));
}

// Whether tensors of this dtype can be stored: who reads them must know the size of an item.
inline bool is_stored(at::ScalarType type) {
  const uint32_t itemsize = bridge::tensor_itemsize(static_cast<int8_t>(type));
  return itemsize != 0 && itemsize == c10::elementSize(type);
}

// A dtype of numpy. The texts are those of `dtype_of`.
struct DType {
  std::string text;
  uint32_t itemsize;  // of one character if it is flexible
  bool flexible;      // the width is a word of the record, behind the dims
};

// Nothing for a text that is not stored: "O" would be an array of pointers.
inline std::optional<DType> parse_dtype(std::string_view text) {
  const auto found = bridge::numpy_dtype(as_slice(text));
  if (!found.itemsize) return std::nullopt;
  return DType{std::string(text), found.itemsize, found.flexible};
}

inline void put_count(std::string& to, uint64_t value) {
  for (; value >= 0x80; value >>= 7) to.push_back(static_cast<char>(value | 0x80));
  to.push_back(static_cast<char>(value));
}

inline void put_text(std::string& to, std::string_view text) {
  put_count(to, text.size());
  to.append(text);
}

template <typename Value>
void put_raw(std::string& to, Value value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

}  // namespace stocache::codec
