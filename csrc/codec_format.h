// The format of schemas and records (codec.h), as those who write it and those who read it share
// it. Nothing here knows Python.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

namespace stocache::codec {

constexpr char kVersion = 1;  // the first byte of a schema
constexpr uint64_t kRecordLimit = uint64_t{1} << 32;
constexpr size_t kSchemaLimit = 4 << 20;
constexpr int kDepthLimit = 100;
constexpr size_t kTensorDims = 255;
constexpr size_t kArrayDims = 64;
// Images without pixels still cost PIL memory per row.
constexpr uint64_t kEmptyImageLimit = 1 << 20;
// Payloads up to this size are copied next to each other: cheaper than one more iovec.
constexpr uint64_t kSmall = 512;

// The first byte of a node in the schema.
enum class Kind : char {
  None = 'n',
  Bool = '?',
  Int = 'i',     // of 64 bits
  BigInt = 'I',  // two's complement in as many bytes as it takes
  Float = 'f',
  Complex = 'c',
  Str = 's',
  Bytes = 'y',
  ByteArray = 'Y',
  Tensor = 'T',       // dtype, number of dims
  Array = 'A',        // dtype, number of dims
  NumpyScalar = 'a',  // dtype
  NumpyStr = 'u',
  NumpyBytes = 'v',
  Image = 'M',        // mode, mode of the palette; its child is the transparency
  Tuple = '(',        // count
  List = '[',         // count
  Ints = 'l',         // a list of int alone: its length is a word, not part of the schema
  Floats = 'd',       // the same of float
  Size = 'Z',         // torch.Size; count
  Dict = '{',         // count; before each child its key
  OrderedDict = 'O',  // the same
  NamedTuple = 'P',   // class with fields
  DataClass = 'D',    // class with fields and other slots, names of other attributes
  Enum = 'E',         // class; the payload is the name of the member
  Pickle = 'p',       //
  Missing = 'x',      // an attribute that is not set, or a transparency that is not there
};

constexpr uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) & ~(to - 1); }

// The bytes of `dims` items of `itemsize`; false if no tensor can have these dims.
inline bool multiply(const uint32_t* dims, size_t count, uint64_t itemsize, uint64_t& bytes) {
  uint64_t extent = itemsize;
  bool empty = itemsize == 0;
  for (size_t i = 0; i < count; ++i) {
    empty |= dims[i] == 0;
    // Zero counts as one: strides are products of all dims, and must not overflow either.
    if (__builtin_mul_overflow(extent, uint64_t{std::max(dims[i], 1u)}, &extent)) return false;
    if (extent >> 62) return false;
  }
  bytes = empty ? 0 : extent;
  return true;
}

struct ImageMode {
  const char* name;
  uint8_t bits;  // per pixel; rows are whole bytes
  bool palette;
};

constexpr ImageMode kImageModes[] = {
    {"1", 1, false},      {"L", 8, false},      {"P", 8, true},      {"RGB", 24, false},
    {"RGBA", 32, false},  {"CMYK", 32, false},  {"LA", 16, false},   {"PA", 16, true},
    {"I", 32, false},     {"F", 32, false},     {"I;16", 16, false}, {"I;16L", 16, false},
    {"I;16B", 16, false}, {"YCbCr", 24, false}, {"HSV", 24, false},  {"LAB", 24, false},
    {"La", 16, false},    {"RGBa", 32, false},  {"RGBX", 32, false},
};

inline const ImageMode* image_mode(std::string_view name) {
  for (const auto& mode : kImageModes) {
    if (name == mode.name) return &mode;
  }
  return nullptr;
}

inline bool is_palette_mode(std::string_view name) {
  return name == "RGB" || name == "RGBA" || name == "CMYK";
}

inline bool multiply_pixels(uint32_t width, uint32_t height, uint8_t bits, uint64_t& bytes) {
  bytes = (uint64_t{width} * bits + 7) / 8;
  if (width == 0 || height == 0) {
    bytes = 0;
    return uint64_t{width} + height <= kEmptyImageLimit;
  }
  return !__builtin_mul_overflow(bytes, uint64_t{height}, &bytes) && bytes < kRecordLimit;
}

// Whether tensors of this dtype can be stored; its size, too.
inline bool is_stored(at::ScalarType type) {
  return type >= at::ScalarType::Byte && type < at::ScalarType::Undefined && !c10::isQIntType(type);
}

// What the text of a numpy dtype says. The texts are those of `dtype_of`.
struct DType {
  std::string text;
  uint32_t itemsize;     // of one character if it is flexible
  bool flexible;         // the width is a word of the record, behind the dims
  at::ScalarType torch;  // what torch.as_tensor makes of it; Undefined if it refuses
};

// Any other text is refused here, before numpy sees it: "O" would be an array of pointers.
std::optional<DType> parse_dtype(std::string_view text);

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

// Reads a schema. Whatever the bytes are, it stays within them.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  [[noreturn]] static void malformed(const char* why) {
    TORCH_CHECK_VALUE(false, "malformed schema: ", why);
  }

  size_t at() const { return at_; }
  size_t left() const { return bytes_.size() - at_; }

  char byte() {
    if (!left()) malformed("it ends early");
    return bytes_[at_++];
  }

  uint32_t count() {
    uint64_t value = 0;
    for (int shift = 0; shift < 35; shift += 7) {
      const auto part = static_cast<uint8_t>(byte());
      value |= uint64_t{part & 0x7fu} << shift;
      if (part < 0x80) {
        if (value > UINT32_MAX) break;
        return static_cast<uint32_t>(value);
      }
    }
    malformed("a number is too large");
  }

  std::string_view text() {
    const size_t size = count();
    if (size > left()) malformed("it ends early");
    const auto found = bytes_.substr(at_, size);
    at_ += size;
    return found;
  }

  template <typename Value>
  Value raw() {
    Value value;
    if (left() < sizeof(value)) malformed("it ends early");
    std::memcpy(&value, bytes_.data() + at_, sizeof(value));
    at_ += sizeof(value);
    return value;
  }

 private:
  std::string_view bytes_;
  size_t at_ = 0;
};

}  // namespace stocache::codec
