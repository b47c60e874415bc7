#include "codec_format.h"

namespace stocache::codec {

std::optional<DType> parse_dtype(std::string_view text) {
  DType made{std::string(text), 0, false, at::ScalarType::Undefined};
  bool native = true;
  if (!text.empty() && std::strchr("<>|", text[0])) {
    native = text[0] != '>';
    text.remove_prefix(1);
  }
  if (text.size() == 1) {
    using at::ScalarType;
    struct Code {
      char code;
      uint32_t itemsize;
      ScalarType torch;
    };
    static constexpr Code codes[] = {
        {'?', 1, ScalarType::Bool},
        {'b', 1, ScalarType::Char},
        {'B', 1, ScalarType::Byte},
        {'h', 2, ScalarType::Short},
        {'H', 2, ScalarType::UInt16},
        {'i', 4, ScalarType::Int},
        {'I', 4, ScalarType::UInt32},
        {'l', sizeof(long), ScalarType::Long},
        {'L', sizeof(long), ScalarType::UInt64},
        {'q', sizeof(long long), ScalarType::Long},
        {'Q', sizeof(long long), ScalarType::Undefined},
        {'e', 2, ScalarType::Half},
        {'f', 4, ScalarType::Float},
        {'d', 8, ScalarType::Double},
        {'g', sizeof(long double), ScalarType::Undefined},
        {'F', 8, ScalarType::ComplexFloat},
        {'D', 16, ScalarType::ComplexDouble},
        {'G', 2 * sizeof(long double), ScalarType::Undefined},
    };
    for (const auto& code : codes) {
      if (text[0] != code.code) continue;
      made.itemsize = code.itemsize;
      if (native) made.torch = code.torch;
      return made;
    }
    if (text[0] != 'S' && text[0] != 'U') return std::nullopt;
    made.itemsize = text[0] == 'S' ? 1 : 4;
    made.flexible = true;
    return made;
  }
  // Dates and durations: M8, M8[ns], M8[25s].
  if (text.size() < 2 || (text[0] != 'M' && text[0] != 'm') || text[1] != '8') return std::nullopt;
  made.itemsize = 8;
  text.remove_prefix(2);
  if (text.empty()) return made;
  if (text.size() < 3 || text.front() != '[' || text.back() != ']') return std::nullopt;
  text = text.substr(1, text.size() - 2);
  size_t digits = 0;
  while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
  if (digits > 9) return std::nullopt;
  text.remove_prefix(digits);
  for (const char* unit : {"Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"}) {
    if (text == unit) return made;
  }
  return std::nullopt;
}

}  // namespace stocache::codec
