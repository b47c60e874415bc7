#include "codec.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <optional>
#include <thread>
#include <unordered_map>

#include "python_support.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace stocache::codec {
namespace {

// The format

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
bool multiply(const uint32_t* dims, size_t count, uint64_t itemsize, uint64_t& bytes) {
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

const ImageMode* image_mode(std::string_view name) {
  for (const auto& mode : kImageModes) {
    if (name == mode.name) return &mode;
  }
  return nullptr;
}

bool is_palette_mode(std::string_view name) {
  return name == "RGB" || name == "RGBA" || name == "CMYK";
}

bool multiply_pixels(uint32_t width, uint32_t height, uint8_t bits, uint64_t& bytes) {
  bytes = (uint64_t{width} * bits + 7) / 8;
  if (width == 0 || height == 0) {
    bytes = 0;
    return uint64_t{width} + height <= kEmptyImageLimit;
  }
  return !__builtin_mul_overflow(bytes, uint64_t{height}, &bytes) && bytes < kRecordLimit;
}

// Whether tensors of this dtype can be stored; its size, too.
bool is_stored(at::ScalarType type) {
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

void put_count(std::string& to, uint64_t value) {
  for (; value >= 0x80; value >>= 7) to.push_back(static_cast<char>(value | 0x80));
  to.push_back(static_cast<char>(value));
}

void put_text(std::string& to, std::string_view text) {
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

// Python

// Owns a reference.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  static Ref to(PyObject* borrowed) { return Ref(Py_XNewRef(borrowed)); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

Ref checked(PyObject* owned) {
  if (!owned) throw python_error();
  return Ref(owned);
}

void check(int status) {
  if (status < 0) throw python_error();
}

// A function or class of a module, looked up once and kept for ever.
#define KEPT(module, name)                                            \
  ([]() -> PyObject* {                                                \
    static PyObject* kept = nullptr;                                  \
    if (!kept) {                                                      \
      Ref found = checked(PyImport_ImportModule(module));             \
      Ref value = checked(PyObject_GetAttrString(found.get(), name)); \
      if (!kept) kept = value.release();                              \
    }                                                                 \
    return kept;                                                      \
  }())

// An interned string, kept for ever.
#define NAME(text)                                            \
  ([]() -> PyObject* {                                        \
    static PyObject* kept = PyUnicode_InternFromString(text); \
    if (!kept) throw python_error();                          \
    return kept;                                              \
  }())

// The attribute, or nothing if there is none.
Ref attribute(PyObject* object, PyObject* name) {
  Ref value(PyObject_GetAttr(object, name));
  if (!value) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw python_error();
    PyErr_Clear();
  }
  return value;
}

// The module if it is imported already. Types of other modules cannot occur in a sample.
Ref loaded(PyObject* module_name) {
  Ref module(PyImport_GetModule(module_name));
  if (!module && PyErr_Occurred()) throw python_error();
  return module.get() == Py_None ? Ref() : std::move(module);
}

// A str of these bytes, or nothing if they are not UTF-8.
Ref decode_utf8(std::string_view text) {
  Ref made(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass"));
  if (!made) {
    if (!PyErr_ExceptionMatches(PyExc_UnicodeError)) throw python_error();
    PyErr_Clear();
  }
  return made;
}

Ref text_object(std::string_view text) {
  Ref made = decode_utf8(text);
  if (!made) Reader::malformed("a name is not UTF-8");
  return made;
}

std::string_view utf8(PyObject* text) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text, &size);
  if (!data) throw python_error();
  return {data, static_cast<size_t>(size)};
}

std::string_view bytes_of(PyObject* bytes) {
  return {PyBytes_AS_STRING(bytes), static_cast<size_t>(PyBytes_GET_SIZE(bytes))};
}

// For messages: always one line of plain ASCII that is not too long, never an error.
std::string ascii(PyObject* text, size_t most = 200) {
  Ref bytes(text && PyUnicode_Check(text)
                ? PyUnicode_AsEncodedString(text, "ascii", "backslashreplace")
                : nullptr);
  if (!bytes) {
    PyErr_Clear();
    return "?";
  }
  std::string line(bytes_of(bytes.get()).substr(0, most));
  if (PyBytes_GET_SIZE(bytes.get()) > static_cast<Py_ssize_t>(most)) line += "...";
  for (char& c : line) {
    if (c < ' ' || c > '~') c = ' ';
  }
  return line;
}

std::string type_name(PyTypeObject* type) {
  auto* object = reinterpret_cast<PyObject*>(type);
  Ref module(PyObject_GetAttr(object, NAME("__module__")));
  Ref name(PyObject_GetAttr(object, NAME("__qualname__")));
  if (!module || !name || !PyUnicode_Check(module.get()) || !PyUnicode_Check(name.get())) {
    PyErr_Clear();
    return type->tp_name;
  }
  const std::string prefix = ascii(module.get());
  return (prefix == "builtins" ? "" : prefix + ".") + ascii(name.get());
}

// "a set", "an object"
std::string with_article(const std::string& name) {
  const bool vowel = !name.empty() && std::strchr("aeiouAEIOU", name[0]);
  return (vowel ? "an " : "a ") + name;
}

// Where in the sample an object lies. Lives on the stack; becomes text only in errors.
struct Where {
  const Where* parent = nullptr;  // none: the sample itself
  PyObject* container = nullptr;  // what it lies in
  Py_ssize_t index = 0;
  PyObject* key = nullptr;
  PyObject* attribute = nullptr;
};

std::string text_of(const Where& where) {
  constexpr size_t most = 12;
  std::vector<const Where*> steps;
  for (const Where* step = &where; step->parent; step = step->parent) steps.push_back(step);
  std::reverse(steps.begin(), steps.end());
  std::string text = "sample";
  for (size_t i = 0; i < steps.size(); ++i) {
    if (steps.size() > most && i == most / 2) {
      i = steps.size() - most / 2;
      text += "...";
    }
    const Where& step = *steps[i];
    if (step.attribute) {
      text += "." + ascii(step.attribute);
    } else if (step.key) {
      // A key here is built in, so its repr runs no code of the sample.
      text += "[" + ascii(Ref(PyObject_ASCII(step.key)).get(), 60) + "]";
    } else {
      text += "[" + std::to_string(step.index) + "]";
    }
  }
  return text;
}

template <typename... Words>
[[noreturn]] void refuse_type(const Where& where, const Words&... words) {
  TORCH_CHECK_TYPE(false, text_of(where), words...);
}

template <typename... Words>
[[noreturn]] void refuse_value(const Where& where, const Words&... words) {
  TORCH_CHECK_VALUE(false, text_of(where), words...);
}

[[noreturn]] void changed(const Where& where) {
  TORCH_CHECK(false, text_of(where), " changed while it was being stored");
}

// numpy

// The part of numpy's array interface that is read here. Its layout is fixed by numpy's
// documentation, so its headers are not needed.
struct ArrayInterface {
  int two;
  int nd;
  char typekind;
  int itemsize;
  int flags;
  Py_intptr_t* shape;
  Py_intptr_t* strides;
  void* data;
};

constexpr int kContiguous = 1;

struct Numpy {
  PyObject *ndarray, *memmap, *generic, *str, *bytes, *dtype, *ascontiguousarray;
};

// numpy, or nullptr if nobody imported it yet.
const Numpy* numpy_if_loaded() {
  static const Numpy* kept = nullptr;
  if (kept) return kept;
  Ref module = loaded(NAME("numpy"));
  if (!module) return nullptr;
  std::array<Ref, 7> found;
  size_t i = 0;
  for (const char* name :
       {"ndarray", "memmap", "generic", "str_", "bytes_", "dtype", "ascontiguousarray"}) {
    found[i] = Ref(PyObject_GetAttrString(module.get(), name));
    if (!found[i++]) {  // it is just being imported
      PyErr_Clear();
      return nullptr;
    }
  }
  if (!kept) {
    kept = new Numpy{found[0].release(), found[1].release(), found[2].release(), found[3].release(),
                     found[4].release(), found[5].release(), found[6].release()};
  }
  return kept;
}

const Numpy& numpy() {
  if (const auto* found = numpy_if_loaded()) return *found;
  checked(PyImport_ImportModule("numpy"));
  const auto* found = numpy_if_loaded();
  TORCH_CHECK(found, "numpy is not usable here: it is just being imported");
  return *found;
}

std::string attribute_text(PyObject* object, PyObject* name) {
  Ref value = checked(PyObject_GetAttr(object, name));
  return PyUnicode_Check(value.get()) ? std::string(utf8(value.get())) : std::string();
}

Ref make_dtype(const DType& type, uint32_t width) {
  const std::string text = type.flexible ? type.text + std::to_string(width) : type.text;
  Ref name = text_object(text);
  Ref made = checked(PyObject_CallOneArg(numpy().dtype, name.get()));
  Ref size = checked(PyObject_GetAttr(made.get(), NAME("itemsize")));
  const uint64_t expected = uint64_t{type.itemsize} * (type.flexible ? width : 1);
  TORCH_CHECK_VALUE(PyLong_AsUnsignedLongLong(size.get()) == expected && !PyErr_Occurred(),
                    "numpy's dtype ", text, " is not of ", expected, " bytes here");
  return made;
}

// A cache that forgets everything when it is full: so nothing that is stored grows for ever.
template <typename Value>
class Memory {
 public:
  std::shared_ptr<const Value> find(PyObject* key) const {
    const auto found = known_.find(key);
    return found == known_.end() ? nullptr : found->second.second;
  }
  void add(PyObject* key, std::shared_ptr<const Value> value) {
    // What is dropped may run code that comes back here: drop it last.
    decltype(known_) dropped;
    if (known_.size() >= 256) dropped.swap(known_);
    known_.insert_or_assign(key, std::make_pair(Ref::to(key), std::move(value)));
  }

 private:
  std::unordered_map<PyObject*, std::pair<Ref, std::shared_ptr<const Value>>> known_;
};

// What is written for a dtype of numpy, or nullptr for one that is not stored.
std::shared_ptr<const DType> dtype_of(PyObject* dtype) {
  static auto& memory = *new Memory<DType>;
  if (auto found = memory.find(dtype)) return found;
  const std::string kind = attribute_text(dtype, NAME("kind"));
  const std::string code = attribute_text(dtype, NAME("char"));
  const std::string order = attribute_text(dtype, NAME("byteorder"));
  if (kind.size() != 1 || !std::strchr("biufcmMSU", kind[0])) return nullptr;
  std::string text;
  if (kind == "m" || kind == "M") {
    text = attribute_text(dtype, NAME("str"));
  } else {
    // The code, because long and long long are two types with one `str`.
    text = (order == "=" || order == "|" ? "" : order) + code;
  }
  auto parsed = parse_dtype(text);
  if (!parsed) return nullptr;
  uint32_t width = 0;
  if (parsed->flexible) {
    Ref size = checked(PyObject_GetAttr(dtype, NAME("itemsize")));
    width = static_cast<uint32_t>(PyLong_AsUnsignedLong(size.get()) / parsed->itemsize);
    if (PyErr_Occurred()) throw python_error();
  }
  // A dtype of somebody else's making may carry the code of another.
  Ref again = make_dtype(*parsed, width);
  const int same = PyObject_RichCompareBool(again.get(), dtype, Py_EQ);
  check(same);
  if (!same) return nullptr;
  auto made = std::make_shared<const DType>(*std::move(parsed));
  memory.add(dtype, made);
  return made;
}

// Types that are stored, apart from those of the fast path

// What was found out about a type.
struct Known {
  Kind kind;
  Ref type;
  // Of a namedtuple, a dataclass or an Enum:
  Ref module;                // its name
  std::vector<Ref> path;     // the qualified name, split at the dots
  std::vector<Ref> names;    // the fields, then the slots that are no fields
  size_t fields = 0;         // how many of these are fields
  std::string place;         // module and qualified name, as in the schema
  std::string fields_bytes;  // what the schema says of `names`

  PyTypeObject* pytype() const { return reinterpret_cast<PyTypeObject*>(type.get()); }
};

std::string dotted(PyObject* module_name, const std::vector<Ref>& path) {
  std::string name = ascii(module_name);
  for (const auto& step : path) name += "." + ascii(step.get());
  return name;
}

// The object of this name in this module, which is imported if need be. ValueError if there is
// none.
Ref find(PyObject* module_name, const std::vector<Ref>& path) {
  Ref found(PyImport_GetModule(module_name));
  if (!found || found.get() == Py_None) {
    if (PyErr_Occurred()) throw python_error();
    found = Ref(PyImport_Import(module_name));
  }
  for (size_t i = 0; found && i < path.size(); ++i) {
    found = Ref(PyObject_GetAttr(found.get(), path[i].get()));
  }
  if (found) return found;
  if (!PyErr_ExceptionMatches(PyExc_Exception)) throw python_error();
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Ref own_type(type), own_value(value), own_traceback(traceback);
  Ref said(PyObject_Str(value));
  PyErr_Clear();
  const std::string why =
      type_name(reinterpret_cast<PyTypeObject*>(type)) + (said ? ": " + ascii(said.get()) : "");
  TORCH_CHECK_VALUE(false, "the class ", dotted(module_name, path),
                    ", of which a sample was stored, is not found (", why, ")");
}

Ref interned(std::string_view text) {
  PyObject* made = text_object(text).release();
  PyUnicode_InternInPlace(&made);
  return Ref(made);
}

std::vector<Ref> split(std::string_view qualified) {
  std::vector<Ref> path;
  while (true) {
    const size_t dot = qualified.find('.');
    path.push_back(interned(qualified.substr(0, dot)));
    if (dot == std::string_view::npos) return path;
    qualified.remove_prefix(dot + 1);
  }
}

bool is_subtype(PyTypeObject* type, PyObject* of) {
  return of && PyType_Check(of) && PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(of));
}

// Whether object.__new__ makes instances of this type: no base has a layout of its own.
bool is_plain_object(PyTypeObject* type) {
  PyObject* bases = type->tp_mro;
  for (Py_ssize_t i = 0; bases && i < PyTuple_GET_SIZE(bases); ++i) {
    auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(bases, i));
    if (base == &PyBaseObject_Type) continue;
    Ref dict = checked(PyObject_GetAttr(reinterpret_cast<PyObject*>(base), NAME("__dict__")));
    Ref maker(PyObject_GetItem(dict.get(), NAME("__new__")));
    if (!maker) PyErr_Clear();
    if (maker && PyCFunction_Check(maker.get())) return false;
  }
  return true;
}

void add_names(Known& known, PyObject* names) {
  Ref items = checked(PySequence_Tuple(names));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.get()); ++i) {
    PyObject* name = PyTuple_GET_ITEM(items.get(), i);
    TORCH_CHECK_TYPE(PyUnicode_CheckExact(name), type_name(known.pytype()),
                     " has a field whose name is no str");
    auto same = [&](const Ref& other) { return PyUnicode_Compare(other.get(), name) == 0; };
    if (std::any_of(known.names.begin(), known.names.end(), same)) continue;
    known.names.push_back(interned(utf8(name)));
  }
}

// What kind of class this is: NamedTuple, DataClass, Enum, or none of them.
std::optional<Kind> class_kind(PyTypeObject* type) {
  auto* object = reinterpret_cast<PyObject*>(type);
  Ref enum_module = loaded(NAME("enum"));
  Ref enum_class = enum_module ? attribute(enum_module.get(), NAME("Enum")) : Ref();
  if (is_subtype(type, enum_class.get())) return Kind::Enum;
  if (PyType_IsSubtype(type, &PyTuple_Type)) {
    Ref fields = attribute(object, NAME("_fields"));
    const bool good = fields && PyTuple_CheckExact(fields.get()) &&
                      PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) &&
                      type->tp_alloc == PyType_GenericAlloc &&
                      type->tp_itemsize == PyTuple_Type.tp_itemsize;
    return good ? std::optional(Kind::NamedTuple) : std::nullopt;
  }
  Ref fields = attribute(object, NAME("__dataclass_fields__"));
  return fields && is_plain_object(type) ? std::optional(Kind::DataClass) : std::nullopt;
}

std::shared_ptr<const Known> study_class(PyTypeObject* type, Kind kind) {
  auto* object = reinterpret_cast<PyObject*>(type);
  auto known = std::make_shared<Known>();
  known->kind = kind;
  known->type = Ref::to(object);
  Ref module = checked(PyObject_GetAttr(object, NAME("__module__")));
  Ref name = checked(PyObject_GetAttr(object, NAME("__qualname__")));
  TORCH_CHECK_TYPE(PyUnicode_Check(module.get()) && PyUnicode_Check(name.get()), type->tp_name,
                   " does not say in which module it is");
  std::string_view module_text = utf8(module.get());
  // What a spawned process calls the program that its parent calls __main__; it has both names.
  if (module_text == "__mp_main__") module_text = "__main__";
  known->module = interned(module_text);
  known->path = split(utf8(name.get()));
  put_text(known->place, module_text);
  put_text(known->place, utf8(name.get()));
  if (kind == Kind::NamedTuple) {
    Ref fields = checked(PyObject_GetAttr(object, NAME("_fields")));
    add_names(*known, fields.get());
    TORCH_CHECK_TYPE(known->names.size() == static_cast<size_t>(PyObject_Length(fields.get())),
                     type_name(type), " has two fields of one name");
    known->fields = known->names.size();
  } else if (kind == Kind::DataClass) {
    Ref fields = checked(PyObject_CallOneArg(KEPT("dataclasses", "fields"), object));
    Ref names = checked(PyList_New(0));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fields.get()); ++i) {
      Ref field = checked(PyObject_GetAttr(PyTuple_GET_ITEM(fields.get(), i), NAME("name")));
      check(PyList_Append(names.get(), field.get()));
    }
    add_names(*known, names.get());
    known->fields = known->names.size();
    Ref slots = checked(PyObject_CallOneArg(KEPT("copyreg", "_slotnames"), object));
    add_names(*known, slots.get());
  }
  put_count(known->fields_bytes, known->fields);
  put_count(known->fields_bytes, known->names.size() - known->fields);
  for (const auto& field : known->names) put_text(known->fields_bytes, utf8(field.get()));
  return known;
}

// What is known of a type, or nullptr if it is not stored.
std::shared_ptr<const Known> study(PyTypeObject* type) {
  static auto& memory = *new Memory<Known>;
  auto* object = reinterpret_cast<PyObject*>(type);
  if (auto found = memory.find(object)) return found;

  auto simple = [&](Kind kind) {
    auto known = std::make_shared<Known>();
    known->kind = kind;
    known->type = Ref::to(object);
    return known;
  };
  std::shared_ptr<const Known> made;
  const Numpy* np = numpy_if_loaded();
  if (np && (object == np->ndarray || object == np->memmap)) {
    made = simple(Kind::Array);
  } else if (np && object == np->str) {
    made = simple(Kind::NumpyStr);
  } else if (np && object == np->bytes) {
    made = simple(Kind::NumpyBytes);
  } else if (np && is_subtype(type, np->generic)) {
    // Only types of numpy itself; those that add something look like the one they derive from.
    Ref dtype(PyObject_CallOneArg(np->dtype, object));
    Ref its_type = dtype ? attribute(dtype.get(), NAME("type")) : Ref();
    PyErr_Clear();
    if (its_type.get() == object) made = simple(Kind::NumpyScalar);
  } else if (const auto kind = class_kind(type)) {
    made = study_class(type, *kind);
  } else {
    Ref images = loaded(NAME("PIL.Image"));
    Ref files = loaded(NAME("PIL.ImageFile"));
    Ref image = images ? attribute(images.get(), NAME("Image")) : Ref();
    Ref file = files ? attribute(files.get(), NAME("ImageFile")) : Ref();
    if (object == image.get() || is_subtype(type, file.get())) made = simple(Kind::Image);
  }
  if (made) memory.add(object, made);
  return made;
}

// Encoding

class Encoder {
 public:
  explicit Encoder(bool allow_pickle) : allow_pickle_(allow_pickle) { schema_.push_back(kVersion); }

  void object(PyObject* object, const Where& where, int depth);
  Encoded finish();

 private:
  void put(Kind kind) { schema_.push_back(static_cast<char>(kind)); }

  void add_word(uint64_t word, const Where& where) {
    if (word > UINT32_MAX) refuse_value(where, " has a size of ", word, "; the limit is 2^32 - 1");
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
  void add_length(uint64_t size, const Where& where) {
    if (size >= kRecordLimit) too_large(size);
    add_word(size, where);
  }
  void add_owned(Ref object, const void* data, uint64_t size) {
    if (!add_payload(data, size)) out_.objects.push_back(object.release());
  }
  void add_bytes(Ref bytes, const Where& where) {
    const auto data = bytes_of(bytes.get());
    add_length(data.size(), where);
    add_owned(std::move(bytes), data.data(), data.size());
  }
  [[noreturn]] static void too_large(uint64_t bytes) {
    TORCH_CHECK_VALUE(false, "the sample takes ", bytes >> 20,
                      " MiB; one sample may take at most 4 GiB");
  }

  void enter(PyObject* object, const Where& where, int depth) const;
  void child(PyObject* object, Py_ssize_t index, PyObject* value, const Where& where, int depth) {
    this->object(value, Where{&where, object, index}, depth + 1);
  }
  void tensor(PyObject* object, const Where& where);
  void add_tensor(const at::Tensor& tensor, const Where& where);
  // What keeps this tensor from being stored as it is; empty if `made` can be stored instead.
  std::string plain(const at::Tensor& given, const Where& where, at::Tensor& made) const;
  void integer(PyObject* object, const Where& where);
  void text(Kind kind, PyObject* object, const Where& where);
  bool number_list(PyObject* list, const Where& where);
  void key(PyObject* key, const Where& where, int depth);
  void dict(PyObject* object, const Where& where, int depth);
  void ordered_dict(PyObject* object, const Where& where, int depth);
  void torch_size(PyObject* object, const Where& where);
  void array(PyObject* object, const Where& where);
  void numpy_scalar(PyObject* object, const Where& where);
  void image(PyObject* object, const Where& where, int depth);
  void put_class(const Known& known, const Where& where);
  void named_tuple(PyObject* object, const Known& known, const Where& where, int depth);
  void data_class(PyObject* object, const Known& known, const Where& where, int depth);
  void enum_member(PyObject* object, const Known& known, const Where& where);
  // A leaf for pickle, or the error that says why not and what to do.
  void other(PyObject* object, const Where& where, const std::string& why = "");

  const bool allow_pickle_;
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

bool Encoder::add_payload(const void* data, uint64_t size) {
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

Encoded Encoder::finish() {
  TORCH_CHECK_VALUE(schema_.size() <= kSchemaLimit, "the sample has too many parts (",
                    schema_.size(), " bytes to describe them; the limit is ", kSchemaLimit,
                    "): store long lists as tensors, arrays or one bytes");
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

void Encoder::enter(PyObject* object, const Where& where, int depth) const {
  if (depth < kDepthLimit) return;
  for (const Where* step = &where; step->parent; step = step->parent) {
    if (step->container == object) refuse_value(where, " contains itself");
  }
  refuse_value(where, " is nested more than ", kDepthLimit, " levels deep");
}

void Encoder::object(PyObject* object, const Where& where, int depth) {
  PyTypeObject* type = Py_TYPE(object);
  if (type == reinterpret_cast<PyTypeObject*>(THPVariableClass)) {
    tensor(object, where);
  } else if (type == &PyLong_Type) {
    integer(object, where);
  } else if (type == &PyTuple_Type) {
    enter(object, where, depth);
    const Py_ssize_t count = PyTuple_GET_SIZE(object);
    put(Kind::Tuple);
    put_count(schema_, count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      child(object, i, PyTuple_GET_ITEM(object, i), where, depth);
    }
  } else if (type == &PyUnicode_Type) {
    text(Kind::Str, object, where);
  } else if (type == &PyDict_Type) {
    dict(object, where, depth);
  } else if (type == &PyFloat_Type) {
    put(Kind::Float);
    add_number(PyFloat_AS_DOUBLE(object));
  } else if (type == &PyBool_Type) {
    put(Kind::Bool);
    add_number(uint64_t{object == Py_True});
  } else if (object == Py_None) {
    put(Kind::None);
  } else if (type == &PyList_Type) {
    enter(object, where, depth);
    if (number_list(object, where)) return;
    const Py_ssize_t count = PyList_GET_SIZE(object);
    put(Kind::List);
    put_count(schema_, count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (i >= PyList_GET_SIZE(object)) changed(where);
      Ref item = Ref::to(PyList_GET_ITEM(object, i));
      child(object, i, item.get(), where, depth);
    }
    if (PyList_GET_SIZE(object) != count) changed(where);
  } else if (type == &PyBytes_Type) {
    put(Kind::Bytes);
    add_bytes(Ref::to(object), where);
  } else if (type == &PyByteArray_Type) {
    put(Kind::ByteArray);
    // A copy, because its owner may resize it before the record is written.
    add_bytes(checked(PyBytes_FromStringAndSize(PyByteArray_AS_STRING(object),
                                                PyByteArray_GET_SIZE(object))),
              where);
  } else if (type == &PyComplex_Type) {
    const Py_complex value = PyComplex_AsCComplex(object);
    put(Kind::Complex);
    add_number(value.real);
    add_number(value.imag);
  } else if (type == &PyODict_Type) {
    ordered_dict(object, where, depth);
  } else if (type == &THPSizeType) {
    torch_size(object, where);
  } else if (const auto known = study(type)) {
    switch (known->kind) {
      case Kind::Array:
        return array(object, where);
      case Kind::NumpyScalar:
        return numpy_scalar(object, where);
      case Kind::NumpyStr:
        return text(Kind::NumpyStr, object, where);
      case Kind::NumpyBytes:
        put(Kind::NumpyBytes);
        return add_bytes(Ref::to(object), where);
      case Kind::Image:
        return image(object, where, depth);
      case Kind::NamedTuple:
        return named_tuple(object, *known, where, depth);
      case Kind::DataClass:
        return data_class(object, *known, where, depth);
      default:
        return enum_member(object, *known, where);
    }
  } else {
    other(object, where);
  }
}

// Keys that tensors in plain memory may have. Wrappers, fakes and other layouts have others.
const uint64_t kPlainKeys =
    c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU,
                         c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutocastCPU})
        .raw_repr();
// Keys of tensors whose values need a computation first.
const uint64_t kLazyKeys =
    c10::DispatchKeySet(
        {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor})
        .raw_repr();

void Encoder::tensor(PyObject* object, const Where& where) {
  const at::Tensor& given = THPVariable_Unpack(object);
  const auto* impl = given.unsafeGetTensorImpl();
  if (!(impl->key_set().raw_repr() & ~kPlainKeys) && impl->is_contiguous()) [[likely]] {
    return add_tensor(given, where);
  }
  at::Tensor made;
  const std::string why = plain(given, where, made);
  if (!why.empty()) return other(object, where, why);
  add_tensor(made, where);
}

std::string Encoder::plain(const at::Tensor& given, const Where& where, at::Tensor& made) const {
  if (!given.defined()) refuse_value(where, " is an undefined tensor");
  const auto device = given.device();
  if (device.is_meta()) refuse_value(where, " is a tensor without data (on the device meta)");
  if (!device.is_cpu()) {
    refuse_value(where, " is a tensor on ", device.str(), "; only CPU tensors are stored: use ",
                 "x.cpu()");
  }
  if (given.is_nested()) return "(nested); use x.unbind() or torch.nested.to_padded_tensor";
  if (given.layout() != at::kStrided) return "(sparse or mkldnn); use x.to_dense()";
  if (given.is_quantized()) return "(quantized); use x.dequantize() or x.int_repr()";
  if (given.key_set().raw_repr() & ~(kPlainKeys | kLazyKeys)) {
    return "that wraps another one, as inside torch.func or torch.compile; store it outside";
  }
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (given._is_zerotensor()) {
    made = at::zeros(given.sizes(), given.scalar_type());
    return "";
  }
  const auto* impl = given.unsafeGetTensorImpl();
  const uint64_t extent = at::detail::computeStorageNbytes(
      impl->sizes(), impl->strides(), impl->itemsize(), impl->storage_offset());
  if (given.numel() && given.storage().nbytes() < extent) {
    refuse_value(where, " is a tensor whose memory was freed");
  }
  made = given.resolve_conj().resolve_neg();
  // As bytes of the same size: not every dtype can be copied element by element.
  const auto type = made.scalar_type();
  if (!made.is_contiguous()) {
    made = made.view(c10::opaqueScalarType(type)).contiguous().view(type);
  }
  if (made.unsafeGetTensorImpl()->key_set().raw_repr() & ~kPlainKeys) {
    return "that becomes another kind of tensor when it is copied here";
  }
  return "";
}

void Encoder::add_tensor(const at::Tensor& tensor, const Where& where) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto sizes = impl->sizes();
  const auto type = tensor.scalar_type();
  if (sizes.size() > kTensorDims || !is_stored(type)) {
    refuse_value(where, " is a tensor with ", sizes.size(), " dimensions of dtype ", type,
                 "; this cannot be stored");
  }
  const auto first = words_.size();
  for (const int64_t size : sizes) {
    if (size > UINT32_MAX) {
      refuse_value(where, " is a tensor of shape ", sizes, "; each dim must be below 2^32");
    }
    words_.push_back(static_cast<uint32_t>(size));
  }
  uint64_t bytes = 0;
  if (!multiply(words_.data() + first, sizes.size(), impl->itemsize(), bytes)) {
    refuse_value(where, " is a tensor of shape ", sizes, ", which is too large");
  }
  put(Kind::Tensor);
  schema_.push_back(static_cast<char>(type));
  put_count(schema_, sizes.size());
  if (bytes == 0) return;
  const auto& storage = impl->unsafe_storage();
  if (!storage || storage.nbytes() < impl->storage_offset() * impl->itemsize() + bytes ||
      !storage.data()) {
    refuse_value(where, " is a tensor whose memory was freed");
  }
  if (!add_payload(impl->data(), bytes)) out_.tensors.push_back(tensor);
}

void Encoder::integer(PyObject* object, const Where& where) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (!overflow) {
    put(Kind::Int);
    return add_number(value);
  }
  put(Kind::BigInt);
  Ref bits = checked(PyObject_CallMethodNoArgs(object, NAME("bit_length")));
  const size_t size = PyLong_AsSize_t(bits.get()) / 8 + 1;
  Ref method = checked(PyObject_GetAttr(object, NAME("to_bytes")));
  Ref args = checked(Py_BuildValue("(ns)", static_cast<Py_ssize_t>(size), "little"));
  Ref options = checked(Py_BuildValue("{s:O}", "signed", Py_True));
  add_bytes(checked(PyObject_Call(method.get(), args.get(), options.get())), where);
}

void Encoder::text(Kind kind, PyObject* object, const Where& where) {
  put(kind);
  if (PyUnicode_IS_COMPACT_ASCII(object)) {
    const auto size = static_cast<uint64_t>(PyUnicode_GET_LENGTH(object));
    add_length(size, where);
    return add_owned(Ref::to(object), PyUnicode_DATA(object), size);
  }
  add_bytes(checked(PyUnicode_AsEncodedString(object, "utf-8", "surrogatepass")), where);
}

// A list of int alone or of float alone. Runs no code of the sample, so the list stays as it is.
bool Encoder::number_list(PyObject* list, const Where& where) {
  const Py_ssize_t count = PyList_GET_SIZE(list);
  if (count == 0) return false;
  PyTypeObject* type = Py_TYPE(PyList_GET_ITEM(list, 0));
  if (type != &PyLong_Type && type != &PyFloat_Type) return false;
  for (Py_ssize_t i = 1; i < count; ++i) {
    if (Py_TYPE(PyList_GET_ITEM(list, i)) != type) return false;
  }
  const uint64_t bytes = 8 * static_cast<uint64_t>(count);
  uint8_t few[kSmall];
  std::unique_ptr<uint8_t[]> many;
  if (bytes > kSmall) many.reset(new uint8_t[bytes]);
  uint8_t* values = many ? many.get() : few;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(list, i);
    if (type == &PyFloat_Type) {
      const double value = PyFloat_AS_DOUBLE(item);
      std::memcpy(values + 8 * i, &value, 8);
    } else {
      int overflow = 0;
      const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
      if (overflow) return false;
      std::memcpy(values + 8 * i, &value, 8);
    }
  }
  put(type == &PyFloat_Type ? Kind::Floats : Kind::Ints);
  if (bytes >= kRecordLimit) too_large(bytes);
  add_word(count, where);
  if (!add_payload(values, bytes)) out_.copies.push_back(std::move(many));
  return true;
}

void Encoder::key(PyObject* key, const Where& where, int depth) {
  PyTypeObject* type = Py_TYPE(key);
  if (type == &PyUnicode_Type) {
    schema_.push_back('s');
    if (PyUnicode_IS_COMPACT_ASCII(key)) {
      return put_text(schema_, {static_cast<const char*>(PyUnicode_DATA(key)),
                                static_cast<size_t>(PyUnicode_GET_LENGTH(key))});
    }
    Ref bytes = checked(PyUnicode_AsEncodedString(key, "utf-8", "surrogatepass"));
    put_text(schema_, bytes_of(bytes.get()));
  } else if (type == &PyLong_Type) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(key, &overflow);
    if (overflow) refuse_value(where, " has a key beyond 64 bits");
    schema_.push_back('i');
    put_raw(schema_, value);
  } else if (type == &PyBool_Type) {
    schema_.push_back(key == Py_True ? '1' : '0');
  } else if (key == Py_None) {
    schema_.push_back('n');
  } else if (type == &PyFloat_Type) {
    schema_.push_back('f');
    put_raw(schema_, PyFloat_AS_DOUBLE(key));
  } else if (type == &PyBytes_Type) {
    schema_.push_back('y');
    put_text(schema_, bytes_of(key));
  } else if (type == &PyTuple_Type) {
    if (depth >= kDepthLimit) refuse_value(where, " has a key that is nested too deep");
    schema_.push_back('(');
    put_count(schema_, PyTuple_GET_SIZE(key));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(key); ++i) {
      this->key(PyTuple_GET_ITEM(key, i), where, depth + 1);
    }
  } else {
    refuse_type(where, " has a key that is ", with_article(type_name(type)),
                "; keys may be str, int, float, bool, None, bytes or tuples of these");
  }
}

void Encoder::dict(PyObject* object, const Where& where, int depth) {
  enter(object, where, depth);
  const Py_ssize_t count = PyDict_GET_SIZE(object);
  put(Kind::Dict);
  put_count(schema_, count);
  Py_ssize_t position = 0, seen = 0;
  PyObject *name = nullptr, *value = nullptr;
  while (PyDict_Next(object, &position, &name, &value)) {
    Ref own_name = Ref::to(name), own_value = Ref::to(value);
    key(name, where, depth);
    this->object(value, Where{&where, object, 0, name}, depth + 1);
    ++seen;
    if (PyDict_GET_SIZE(object) != count) changed(where);
  }
  if (seen != count) changed(where);
}

void Encoder::ordered_dict(PyObject* object, const Where& where, int depth) {
  enter(object, where, depth);
  // Its own order, which PyDict_Next does not know.
  Ref items = checked(PyMapping_Items(object));
  const Py_ssize_t count = PyList_GET_SIZE(items.get());
  put(Kind::OrderedDict);
  put_count(schema_, count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(items.get(), i);
    PyObject* name = PyTuple_GET_ITEM(item, 0);
    key(name, where, depth);
    this->object(PyTuple_GET_ITEM(item, 1), Where{&where, object, 0, name}, depth + 1);
  }
}

void Encoder::torch_size(PyObject* object, const Where& where) {
  const Py_ssize_t count = PyTuple_GET_SIZE(object);
  c10::SmallVector<long long, 8> values;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyTuple_GET_ITEM(object, i);
    int overflow = 1;
    if (PyLong_CheckExact(item)) values.push_back(PyLong_AsLongLongAndOverflow(item, &overflow));
    if (overflow) return other(object, where, "with an item that is no int of 64 bits");
  }
  put(Kind::Size);
  put_count(schema_, count);
  for (const long long value : values) add_number(value);
}

// The C struct that describes an array or a numpy scalar. Valid as long as `capsule`.
const ArrayInterface& interface_of(PyObject* object, Ref& capsule) {
  capsule = checked(PyObject_GetAttr(object, NAME("__array_struct__")));
  const auto* found =
      static_cast<const ArrayInterface*>(PyCapsule_GetPointer(capsule.get(), nullptr));
  if (!found) throw python_error();
  TORCH_CHECK_VALUE(found->two == 2, "numpy's array interface is not as documented");
  return *found;
}

void Encoder::array(PyObject* object, const Where& where) {
  Ref dtype = checked(PyObject_GetAttr(object, NAME("dtype")));
  const auto type = dtype_of(dtype.get());
  if (!type) {
    return other(object, where,
                 "of dtype " + ascii(Ref(PyObject_Str(dtype.get())).get()) +
                     "; arrays of numbers, dates and fixed-width strings are stored");
  }
  Ref array = Ref::to(object), capsule;
  const ArrayInterface* found = &interface_of(object, capsule);
  if (!(found->flags & kContiguous)) {
    array = checked(PyObject_CallOneArg(numpy().ascontiguousarray, object));
    found = &interface_of(array.get(), capsule);
  }
  const auto itemsize = static_cast<uint32_t>(found->itemsize);
  TORCH_CHECK_VALUE(
      (found->flags & kContiguous) && found->nd >= 0 && found->nd <= int{kArrayDims} &&
          (type->flexible ? itemsize % type->itemsize == 0 : itemsize == type->itemsize),
      text_of(where), " is an array that does not have the layout its dtype says");
  const auto first = words_.size();
  for (int i = 0; i < found->nd; ++i) add_word(found->shape[i], where);
  uint64_t bytes = 0;
  if (!multiply(words_.data() + first, found->nd, itemsize, bytes)) {
    refuse_value(where, " is an array of a shape that is too large");
  }
  if (type->flexible) words_.push_back(itemsize / type->itemsize);
  put(Kind::Array);
  put_text(schema_, type->text);
  put_count(schema_, found->nd);
  add_owned(std::move(array), found->data, bytes);
}

void Encoder::numpy_scalar(PyObject* object, const Where& where) {
  Ref dtype = checked(PyObject_GetAttr(object, NAME("dtype")));
  const auto type = dtype_of(dtype.get());
  if (!type || type->flexible) return other(object, where);
  Ref capsule;
  const auto& found = interface_of(object, capsule);
  TORCH_CHECK_VALUE(found.nd == 0 && static_cast<uint32_t>(found.itemsize) == type->itemsize,
                    text_of(where), " is a numpy scalar that does not have the size of its dtype");
  put(Kind::NumpyScalar);
  put_text(schema_, type->text);
  for (uint32_t at = 0; at < type->itemsize; at += 8) {
    uint64_t bits = 0;
    std::memcpy(&bits, static_cast<const uint8_t*>(found.data) + at,
                std::min(type->itemsize - at, 8u));
    numbers_.push_back(bits);
  }
}

void Encoder::image(PyObject* object, const Where& where, int depth) {
  checked(PyObject_CallMethodNoArgs(object, NAME("load")));
  const std::string mode_name = attribute_text(object, NAME("mode"));
  const auto* mode = image_mode(mode_name);
  if (!mode) return other(object, where, "of mode " + mode_name);
  Ref size = checked(PyObject_GetAttr(object, NAME("size")));
  long long width = 0, height = 0;
  if (!PyTuple_Check(size.get())) return other(object, where, "without a size");
  if (!PyArg_ParseTuple(size.get(), "LL", &width, &height)) throw python_error();
  Ref pixels = checked(PyObject_CallMethodNoArgs(object, NAME("tobytes")));
  Ref palette;
  std::string palette_mode;
  if (mode->palette) {
    Ref holder = checked(PyObject_GetAttr(object, NAME("palette")));
    if (holder.get() != Py_None) {
      Ref its_mode = checked(PyObject_GetAttr(holder.get(), NAME("mode")));
      Ref colors = checked(PyObject_CallMethodOneArg(object, NAME("getpalette"), its_mode.get()));
      if (colors.get() != Py_None) {
        palette = checked(PyBytes_FromObject(colors.get()));
        palette_mode = attribute_text(holder.get(), NAME("mode"));
        if (PyBytes_GET_SIZE(palette.get()) == 0) palette_mode.clear();
      }
    }
    if (!palette_mode.empty() && !is_palette_mode(palette_mode)) {
      return other(object, where, "with a palette of mode " + palette_mode);
    }
  }
  const auto first = words_.size();
  add_word(width, where);
  add_word(height, where);
  uint64_t bytes = 0;
  const bool good = multiply_pixels(words_[first], words_[first + 1], mode->bits, bytes) &&
                    PyBytes_CheckExact(pixels.get()) && bytes_of(pixels.get()).size() == bytes;
  if (!good) refuse_value(where, " is an image of ", width, " x ", height, " that is not stored");
  put(Kind::Image);
  put_text(schema_, mode_name);
  put_text(schema_, palette_mode);
  const auto data = bytes_of(pixels.get());
  add_owned(std::move(pixels), data.data(), data.size());
  if (!palette_mode.empty()) add_bytes(std::move(palette), where);
  Ref info = checked(PyObject_GetAttr(object, NAME("info")));
  PyObject* transparency = PyDict_Check(info.get())
                               ? PyDict_GetItemWithError(info.get(), NAME("transparency"))
                               : nullptr;
  if (!transparency) {
    if (PyErr_Occurred()) throw python_error();
    return put(Kind::Missing);
  }
  Ref value = Ref::to(transparency);
  const Where in_image{&where, object, 0, nullptr, NAME("info")};
  enter(object, where, depth);
  this->object(value.get(), Where{&in_image, info.get(), 0, NAME("transparency")}, depth + 1);
}

void Encoder::put_class(const Known& known, const Where& where) {
  for (const auto& step : known.path) {
    if (PyUnicode_CompareWithASCIIString(step.get(), "<locals>") == 0) {
      refuse_type(where, " is ", with_article(type_name(known.pytype())),
                  ", a class inside a function; move it to the top of its module, where other ",
                  "processes find it");
    }
  }
  Ref found;
  try {
    found = find(known.module.get(), known.path);
  } catch (const c10::ValueError&) {
  }
  if (found.get() != known.type.get()) {
    refuse_type(where, " is ", with_article(type_name(known.pytype())), ", but that name leads to ",
                found ? "another object" : "nothing", "; other processes would not find its class");
  }
  put(known.kind);
  schema_.append(known.place);
  schema_.append(known.fields_bytes);
}

// The attributes in its __dict__, if it has one.
Ref dict_of(PyObject* object) {
  Ref dict(PyObject_GenericGetDict(object, nullptr));
  if (!dict) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw python_error();
    PyErr_Clear();
  }
  return dict;
}

void Encoder::named_tuple(PyObject* object, const Known& known, const Where& where, int depth) {
  enter(object, where, depth);
  const auto count = static_cast<size_t>(PyTuple_GET_SIZE(object));
  if (count != known.fields) {
    return other(
        object, where,
        "with " + std::to_string(count) + " items for " + std::to_string(known.fields) + " fields");
  }
  if (Py_TYPE(object)->tp_dictoffset) {
    Ref dict = dict_of(object);
    if (dict && PyDict_GET_SIZE(dict.get())) {
      return other(object, where, "with attributes beside its fields");
    }
  }
  put_class(known, where);
  for (size_t i = 0; i < count; ++i) {
    this->object(PyTuple_GET_ITEM(object, i),
                 Where{&where, object, 0, nullptr, known.names[i].get()}, depth + 1);
  }
}

void Encoder::data_class(PyObject* object, const Known& known, const Where& where, int depth) {
  enter(object, where, depth);
  put_class(known, where);
  // Attributes beside the fields: in its __dict__, in its own order.
  Ref dict = Py_TYPE(object)->tp_dictoffset ? dict_of(object) : Ref();
  std::vector<std::pair<Ref, Ref>> more;
  Py_ssize_t position = 0;
  size_t expected = 0;
  PyObject *name = nullptr, *value = nullptr;
  while (dict && PyDict_Next(dict.get(), &position, &name, &value)) {
    if (expected < known.fields && known.names[expected].get() == name) {
      ++expected;
      continue;
    }
    if (!PyUnicode_CheckExact(name)) return refuse_type(where, " has an attribute without a name");
    auto same = [&](const Ref& other) { return PyUnicode_Compare(other.get(), name) == 0; };
    if (std::any_of(known.names.begin(), known.names.end(), same)) continue;
    // What typing notes on an instance of a generic class.
    if (PyUnicode_CompareWithASCIIString(name, "__orig_class__") == 0) continue;
    more.emplace_back(Ref::to(name), Ref::to(value));
  }
  put_count(schema_, more.size());
  for (const auto& [attribute_name, _] : more) put_text(schema_, utf8(attribute_name.get()));
  for (const auto& field : known.names) {
    Ref set = attribute(object, field.get());
    if (set) {
      this->object(set.get(), Where{&where, object, 0, nullptr, field.get()}, depth + 1);
    } else {
      put(Kind::Missing);
    }
  }
  for (const auto& [attribute_name, set] : more) {
    this->object(set.get(), Where{&where, object, 0, nullptr, attribute_name.get()}, depth + 1);
  }
}

void Encoder::enum_member(PyObject* object, const Known& known, const Where& where) {
  Ref name = checked(PyObject_GetAttr(object, NAME("name")));
  Ref member;
  if (PyUnicode_CheckExact(name.get())) {
    member = Ref(PyObject_GetItem(known.type.get(), name.get()));
    if (!member && !PyErr_ExceptionMatches(PyExc_KeyError)) throw python_error();
    PyErr_Clear();
  }
  if (member.get() != object) return other(object, where, "that has no name of its own");
  put_class(known, where);
  add_bytes(checked(PyUnicode_AsEncodedString(name.get(), "utf-8", "surrogatepass")), where);
}

void Encoder::other(PyObject* object, const Where& where, const std::string& why) {
  if (allow_pickle_) {
    put(Kind::Pickle);
    Ref protocol = checked(PyLong_FromLong(5));
    Ref bytes = checked(
        PyObject_CallFunctionObjArgs(KEPT("pickle", "dumps"), object, protocol.get(), nullptr));
    TORCH_CHECK_TYPE(PyBytes_CheckExact(bytes.get()), "pickle.dumps did not return bytes");
    return add_bytes(std::move(bytes), where);
  }
  PyTypeObject* type = Py_TYPE(object);
  const std::string what = " is " + with_article(type_name(type)) + (why.empty() ? "" : " " + why);
  constexpr const char* remedy = "; or pass allow_pickle=True to store it with pickle";
  if (!why.empty()) refuse_type(where, what, remedy);
  const Numpy* np = numpy_if_loaded();
  if (is_subtype(type, THPVariableClass)) {
    refuse_type(where, what, ", a subclass of torch.Tensor; store a plain tensor (x.detach(), ",
                "x.as_subclass(torch.Tensor))", remedy);
  }
  if (np && is_subtype(type, np->ndarray)) {
    refuse_type(where, what, ", a subclass of numpy.ndarray; store plain arrays (numpy.asarray)",
                remedy);
  }
  for (PyTypeObject* base :
       {&PyLong_Type, &PyFloat_Type, &PyComplex_Type, &PyUnicode_Type, &PyBytes_Type,
        &PyByteArray_Type, &PyTuple_Type, &PyList_Type, &PyDict_Type}) {
    if (PyType_IsSubtype(type, base)) {
      refuse_type(where, what, ", a subclass of ", base->tp_name, "; store a plain ", base->tp_name,
                  remedy);
    }
  }
  refuse_type(where, what,
              "; tensors, arrays, numbers, strings, images, and tuples, lists, dicts and ",
              "dataclasses of these are stored: convert it", remedy);
}

}  // namespace

Encoded& Encoded::operator=(Encoded&& other) noexcept {
  std::swap(schema, other.schema);
  std::swap(parts, other.parts);
  std::swap(bytes, other.bytes);
  std::swap(own, other.own);
  std::swap(copies, other.copies);
  std::swap(tensors, other.tensors);
  std::swap(objects, other.objects);
  return *this;
}

Encoded::~Encoded() {
  for (PyObject* object : objects) Py_DECREF(object);
}

Encoded encode(PyObject* sample, bool allow_pickle) {
  Encoder encoder(allow_pickle);
  encoder.object(sample, Where{}, 0);
  return encoder.finish();
}

// The schema, parsed

struct Schema::Impl {
  struct Node {
    Kind kind;
    at::ScalarType type = at::ScalarType::Undefined;  // of a tensor
    uint32_t count = 0;                               // children; dims of a tensor or array
    uint32_t entry = 0;                               // in `classes`, `dtypes` or `images`
    uint32_t word = 0;                                // its first
    uint32_t number = 0;                              // its first
    uint32_t leaf = 0;                                // its first payload
    uint32_t key = 0;                                 // the key of this child in the dict around it
    uint32_t names = 0;                               // of a dataclass: the first in `names`
    uint32_t more = 0;                                // how many of them
  };
  // A payload. Its size follows from words.
  struct Leaf {
    uint32_t word;
    uint32_t dims;  // how many words to multiply
    uint32_t itemsize;
    uint8_t bits = 0;   // of an image: per pixel
    bool fixed = true;  // the same size in every row of a batch
  };
  struct Extent {
    uint64_t at = 0;
    uint64_t size = 0;
  };
  struct Class {
    Kind kind;
    std::string module, qualified, fields;
    uint32_t count = 0;  // of fields and slots
  };
  struct Image {
    std::string mode, palette;
  };
  // What decoding needs of Python, made at its first use.
  struct Objects {
    std::vector<Ref> keys, names, dtypes;
    struct Path {
      Ref module;
      std::vector<Ref> path;
    };
    std::vector<Path> paths;
    std::vector<std::shared_ptr<const Known>> known;  // by class; those that were found
  };

  std::string text;  // the schema itself
  std::vector<Node> nodes;
  std::vector<Leaf> leaves;
  std::vector<std::pair<size_t, size_t>> keys;  // where they lie in `text`
  std::vector<Class> classes;
  std::vector<DType> dtypes;
  std::vector<Image> images;
  std::vector<std::string> names;
  uint32_t words = 0;
  uint32_t numbers = 0;
  bool needs_pickle = false;
  bool collatable = true;
  bool all_fixed = true;
  mutable std::unique_ptr<Objects> made;

  uint64_t numbers_at() const { return round_up(4 * uint64_t{words}, 8); }
  // Where the words and numbers end.
  uint64_t head() const {
    return numbers ? numbers_at() + 8 * uint64_t{numbers} : 4 * uint64_t{words};
  }

  // Where the payloads lie in a record of `length` bytes with these words. False: there is no such
  // record.
  bool layout(const uint32_t* values, uint64_t length, Extent* extents) const {
    uint64_t at = head();
    if (at > length) return false;
    for (const Leaf& leaf : leaves) {
      const uint32_t* dims = values + leaf.word;
      uint64_t size = 0;
      const bool good = leaf.bits ? multiply_pixels(dims[0], dims[1], leaf.bits, size)
                                  : multiply(dims, leaf.dims, leaf.itemsize, size);
      if (!good) return false;
      if (size) {
        at = round_up(at, 16);
        if (at > length || size > length - at) return false;
        *extents = {at, size};
        at += size;
      }
      ++extents;
    }
    return at == length;
  }

  const Objects& objects() const;
  std::shared_ptr<const Known> resolve(uint32_t entry) const;
};

namespace {

class Parser {
 public:
  explicit Parser(Schema::Impl& impl) : impl_(impl), in_(impl.text) {}

  void schema() {
    if (in_.byte() != kVersion) Reader::malformed("it is of another version");
    node(0, 0, false);
    if (in_.left()) Reader::malformed("bytes follow its end");
  }

 private:
  void node(int depth, uint32_t key, bool may_miss);
  void children(uint32_t count, int depth) {
    for (uint32_t i = 0; i < count; ++i) node(depth + 1, 0, false);
  }
  // A container: its children take at least a byte each.
  uint32_t child_count(int depth) {
    if (depth >= kDepthLimit) Reader::malformed("it is nested too deep");
    const uint32_t count = in_.count();
    if (count > in_.left()) Reader::malformed("it ends early");
    return count;
  }
  void add_leaf(uint32_t dims, uint32_t itemsize, bool fixed, uint8_t bits = 0) {
    impl_.leaves.push_back({impl_.words, dims, itemsize, bits, fixed});
    if (impl_.words + uint64_t{dims} > kRecordLimit / 4) Reader::malformed("too many words");
    impl_.words += dims;
    impl_.all_fixed &= fixed;
  }
  // A few bytes can ask for many: no record has more than fit into it.
  void add_numbers(uint64_t count) {
    if (impl_.numbers + count > kRecordLimit / 8) Reader::malformed("too many numbers");
    impl_.numbers += static_cast<uint32_t>(count);
  }
  uint32_t dims(size_t limit) {
    const uint32_t count = in_.count();
    if (count > limit) Reader::malformed("too many dimensions");
    return count;
  }
  uint32_t dtype() {
    auto parsed = parse_dtype(in_.text());
    if (!parsed) Reader::malformed("an unknown dtype");
    impl_.dtypes.push_back(*std::move(parsed));
    return static_cast<uint32_t>(impl_.dtypes.size() - 1);
  }
  uint32_t read_class(Kind kind);
  void key(int depth);

  Schema::Impl& impl_;
  Reader in_;
};

uint32_t Parser::read_class(Kind kind) {
  Schema::Impl::Class made{kind, {}, {}, {}};
  made.module = in_.text();
  made.qualified = in_.text();
  const size_t first = in_.at();
  const uint32_t fields = in_.count(), slots = in_.count();
  if ((kind != Kind::DataClass && slots) || (kind == Kind::Enum && fields)) {
    Reader::malformed("a class has fields of another kind");
  }
  for (const uint32_t count : {fields, slots}) {
    if (count > in_.left()) Reader::malformed("it ends early");
    for (uint32_t i = 0; i < count; ++i) in_.text();
  }
  made.count = fields + slots;
  made.fields = impl_.text.substr(first, in_.at() - first);
  impl_.classes.push_back(std::move(made));
  return static_cast<uint32_t>(impl_.classes.size() - 1);
}

void Parser::key(int depth) {
  switch (in_.byte()) {
    case 'n':
    case '0':
    case '1':
      return;
    case 'i':
      in_.raw<int64_t>();
      return;
    case 'f':
      // A NaN is found only by identity, so default_collate does not find it in the other samples.
      if (std::isnan(in_.raw<double>())) impl_.collatable = false;
      return;
    case 's':
    case 'y':
      in_.text();
      return;
    case '(': {
      const uint32_t count = child_count(depth);
      for (uint32_t i = 0; i < count; ++i) key(depth + 1);
      return;
    }
    default:
      Reader::malformed("an unknown kind of key");
  }
}

void Parser::node(int depth, uint32_t key, bool may_miss) {
  Schema::Impl::Node made{static_cast<Kind>(in_.byte())};
  made.key = key;
  made.word = impl_.words;
  made.number = impl_.numbers;
  made.leaf = static_cast<uint32_t>(impl_.leaves.size());
  const size_t self = impl_.nodes.size();
  impl_.nodes.push_back(made);
  switch (made.kind) {
    case Kind::Bool:
    case Kind::Int:
    case Kind::Float:
      add_numbers(1);
      break;
    case Kind::None:
      impl_.collatable = false;
      break;
    case Kind::Complex:
      add_numbers(2);
      impl_.collatable = false;
      break;
    case Kind::Str:
    case Kind::Bytes:
      add_leaf(1, 1, false);
      break;
    case Kind::BigInt:
    case Kind::ByteArray:
    case Kind::NumpyStr:
    case Kind::NumpyBytes:
      add_leaf(1, 1, false);
      impl_.collatable = false;
      break;
    case Kind::Pickle:
      add_leaf(1, 1, false);
      impl_.collatable = false;
      impl_.needs_pickle = true;
      break;
    case Kind::Ints:
    case Kind::Floats:
      add_leaf(1, 8, true);
      break;
    case Kind::Tensor: {
      made.type = static_cast<at::ScalarType>(in_.byte());
      if (!is_stored(made.type)) Reader::malformed("an unknown dtype");
      made.count = dims(kTensorDims);
      add_leaf(made.count, static_cast<uint32_t>(c10::elementSize(made.type)), true);
      break;
    }
    case Kind::Array: {
      made.entry = dtype();
      const DType& type = impl_.dtypes.back();
      made.count = dims(kArrayDims);
      made.type = type.torch;
      impl_.collatable &= type.torch != at::ScalarType::Undefined;
      add_leaf(made.count + type.flexible, type.itemsize, true);
      break;
    }
    case Kind::NumpyScalar: {
      made.entry = dtype();
      const DType& type = impl_.dtypes.back();
      if (type.flexible) Reader::malformed("an unknown dtype");
      made.type = type.torch;
      // torch.as_tensor refuses a list of numpy.uint64.
      impl_.collatable &=
          type.torch != at::ScalarType::Undefined && type.torch != at::ScalarType::UInt64;
      add_numbers((type.itemsize + 7) / 8);
      break;
    }
    case Kind::Image: {
      if (depth >= kDepthLimit) Reader::malformed("it is nested too deep");
      Schema::Impl::Image image{std::string(in_.text()), std::string(in_.text())};
      const auto* mode = image_mode(image.mode);
      if (!mode || (!image.palette.empty() && !(mode->palette && is_palette_mode(image.palette)))) {
        Reader::malformed("an unknown mode of an image");
      }
      add_leaf(2, 0, true, mode->bits);
      if (!image.palette.empty()) add_leaf(1, 1, false);
      impl_.collatable = false;
      made.entry = static_cast<uint32_t>(impl_.images.size());
      impl_.images.push_back(std::move(image));
      impl_.nodes[self] = made;
      node(depth + 1, 0, true);
      break;
    }
    case Kind::Tuple:
    case Kind::List:
      made.count = child_count(depth);
      impl_.nodes[self] = made;
      children(made.count, depth);
      break;
    case Kind::Size:
      made.count = in_.count();
      add_numbers(made.count);
      break;
    case Kind::Dict:
    case Kind::OrderedDict:
      made.count = child_count(depth);
      impl_.nodes[self] = made;
      for (uint32_t i = 0; i < made.count; ++i) {
        const size_t first = in_.at();
        this->key(depth);
        const auto index = static_cast<uint32_t>(impl_.keys.size());
        impl_.keys.emplace_back(first, in_.at() - first);
        node(depth + 1, index, false);
      }
      break;
    case Kind::NamedTuple:
      if (depth >= kDepthLimit) Reader::malformed("it is nested too deep");
      made.entry = read_class(made.kind);
      made.count = impl_.classes.back().count;
      impl_.nodes[self] = made;
      children(made.count, depth);
      break;
    case Kind::DataClass: {
      if (depth >= kDepthLimit) Reader::malformed("it is nested too deep");
      impl_.collatable = false;
      made.entry = read_class(made.kind);
      made.count = impl_.classes.back().count;
      made.names = static_cast<uint32_t>(impl_.names.size());
      made.more = child_count(depth);
      for (uint32_t i = 0; i < made.more; ++i) impl_.names.emplace_back(in_.text());
      impl_.nodes[self] = made;
      for (uint32_t i = 0; i < made.count; ++i) node(depth + 1, 0, true);
      children(made.more, depth);
      break;
    }
    case Kind::Enum:
      made.entry = read_class(made.kind);
      add_leaf(1, 1, false);
      impl_.collatable = false;
      break;
    case Kind::Missing:
      if (!may_miss) Reader::malformed("a part is missing");
      break;
    default:
      Reader::malformed("an unknown kind of part");
  }
  impl_.nodes[self] = made;
}

// A key, which was parsed before.
Ref make_key(Reader& in) {
  const char kind = in.byte();
  switch (kind) {
    case 'n':
      return Ref::to(Py_None);
    case '0':
      return Ref::to(Py_False);
    case '1':
      return Ref::to(Py_True);
    case 'i':
      return checked(PyLong_FromLongLong(in.raw<int64_t>()));
    case 'f':
      return checked(PyFloat_FromDouble(in.raw<double>()));
    case 's':
      return interned(in.text());
    case 'y': {
      const auto bytes = in.text();
      return checked(PyBytes_FromStringAndSize(bytes.data(), bytes.size()));
    }
    default: {
      const uint32_t count = in.count();
      Ref tuple = checked(PyTuple_New(count));
      for (uint32_t i = 0; i < count; ++i) {
        PyTuple_SET_ITEM(tuple.get(), i, make_key(in).release());
      }
      return tuple;
    }
  }
}

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

using python::WithoutGil;

}  // namespace

const Schema::Impl::Objects& Schema::Impl::objects() const {
  if (made) return *made;
  auto objects = std::make_unique<Objects>();
  for (const auto& [first, size] : keys) {
    Reader in(std::string_view(text).substr(first, size));
    objects->keys.push_back(make_key(in));
  }
  for (const auto& name : names) objects->names.push_back(interned(name));
  for (const auto& dtype : dtypes) {
    objects->dtypes.push_back(dtype.flexible ? Ref() : make_dtype(dtype, 0));
  }
  for (const auto& entry : classes) {
    objects->paths.push_back({interned(entry.module), split(entry.qualified)});
  }
  objects->known.resize(classes.size());
  // Another thread may have been here: importing numpy lets others run.
  if (!made) made = std::move(objects);
  return *made;
}

// The class as it is now. Looked up each time, because a module may be reloaded; studied once.
std::shared_ptr<const Known> Schema::Impl::resolve(uint32_t entry) const {
  const Objects& python = objects();
  const auto& place = python.paths[entry];
  Ref found = find(place.module.get(), place.path);
  auto known = python.known[entry];
  if (known && known->type.get() == found.get()) return known;
  const Class& expected = classes[entry];
  const char* kind = expected.kind == Kind::NamedTuple  ? "a namedtuple"
                     : expected.kind == Kind::DataClass ? "a dataclass"
                                                        : "an Enum";
  known = PyType_Check(found.get()) ? study(reinterpret_cast<PyTypeObject*>(found.get())) : nullptr;
  TORCH_CHECK_VALUE(known && known->kind == expected.kind, "a sample was stored with ", kind, " ",
                    dotted(place.module.get(), place.path), ", which is now something else");
  TORCH_CHECK_VALUE(known->fields_bytes == expected.fields, "a sample was stored with ", kind, " ",
                    dotted(place.module.get(), place.path), ", which now has other fields");
  made->known[entry] = known;
  return known;
}

namespace {

// Memory of a record as numpy and PIL take it.
struct Slice {
  PyObject_HEAD c10::StorageImpl* owner;
  void* data;
  Py_ssize_t size;
};

void slice_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  c10::raw::intrusive_ptr::decref(reinterpret_cast<Slice*>(self)->owner);
  type->tp_free(self);
  Py_DECREF(type);
}

int slice_buffer(PyObject* self, Py_buffer* view, int flags) {
  auto* slice = reinterpret_cast<Slice*>(self);
  return PyBuffer_FillInfo(view, self, slice->data, slice->size, /*readonly=*/0, flags);
}

PyTypeObject* slice_type() {
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(slice_dealloc)},
      {Py_bf_getbuffer, reinterpret_cast<void*>(slice_buffer)},
      {0, nullptr},
  };
  static PyType_Spec spec = {"stocache._C.Slice", sizeof(Slice), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static PyObject* type = nullptr;
  if (!type) type = checked(PyType_FromSpec(&spec)).release();
  return reinterpret_cast<PyTypeObject*>(type);
}

void drop_owner(void* owner) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(owner));
}

[[noreturn]] void damaged(const char* why) { TORCH_CHECK_VALUE(false, "damaged record: ", why); }

Ref make_text(const uint8_t* data, uint64_t size) {
  Ref made = decode_utf8({reinterpret_cast<const char*>(data), static_cast<size_t>(size)});
  if (!made) damaged("a string is not UTF-8");
  return made;
}

Ref make_bytes(const uint8_t* data, uint64_t size) {
  return checked(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(data),
                                           static_cast<Py_ssize_t>(size)));
}

// A dict of this node, whose values `make` makes one after the other; `next` is the node of the
// value that it makes next.
template <typename Make>
Ref make_dict(const Schema::Impl& impl, const Schema::Impl::Node& node, const size_t& next,
              Make&& make) {
  const auto& keys = impl.objects().keys;
  const bool ordered = node.kind == Kind::OrderedDict;
  Ref dict = checked(ordered ? PyODict_New() : PyDict_New());
  for (uint32_t i = 0; i < node.count; ++i) {
    PyObject* key = keys[impl.nodes[next].key].get();
    Ref value = make();
    check(ordered ? PyODict_SetItem(dict.get(), key, value.get())
                  : PyDict_SetItem(dict.get(), key, value.get()));
  }
  if (PyDict_GET_SIZE(dict.get()) != Py_ssize_t{node.count}) {
    Reader::malformed("a dict has a key twice");
  }
  return dict;
}

class Decoder {
 public:
  // The record was checked to be of the form that `decode` asks for, and is aligned to 16.
  Decoder(const Schema::Impl& impl, const at::Tensor& record)
      : impl_(impl),
        owner_(record.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()),
        base_(static_cast<uint8_t*>(record.mutable_data_ptr())) {
    const auto length = static_cast<uint64_t>(record.numel());
    if (length < impl.head()) damaged("it is too short");
    words_.resize(impl.words);
    extents_.resize(impl.leaves.size());
    if (!words_.empty()) std::memcpy(words_.data(), base_, 4 * words_.size());
    if (!impl.layout(words_.data(), length, extents_.data())) {
      damaged("its length is not that of its parts");
    }
  }

  // The next node and all below it.
  Ref node();

 private:
  using Node = Schema::Impl::Node;
  using Extent = Schema::Impl::Extent;

  uint8_t* number_at(const Node& node) const {
    return base_ + impl_.numbers_at() + 8 * uint64_t{node.number};
  }
  template <typename Value>
  Value number(const Node& node, size_t index = 0) const {
    Value value;
    static_assert(sizeof(value) == 8);
    std::memcpy(&value, number_at(node) + 8 * index, 8);
    return value;
  }
  const uint8_t* payload(const Node& node) const { return base_ + extents_[node.leaf].at; }
  uint64_t size(const Node& node) const { return extents_[node.leaf].size; }

  Ref slice(uint8_t* data, uint64_t size) const;
  Ref tensor(const Node& node) const;
  Ref array(const Node& node) const;
  Ref number_list(const Node& node) const;
  Ref named_tuple(const Node& node);
  Ref data_class(const Node& node);
  Ref enum_member(const Node& node) const;
  Ref image(const Node& node);

  const Schema::Impl& impl_;
  c10::StorageImpl* owner_;
  uint8_t* base_;
  c10::SmallVector<uint32_t, 24> words_;
  c10::SmallVector<Extent, 8> extents_;
  size_t next_ = 0;
};

Ref Decoder::slice(uint8_t* data, uint64_t size) const {
  PyTypeObject* type = slice_type();
  Ref made = checked(type->tp_alloc(type, 0));
  auto* slice = reinterpret_cast<Slice*>(made.get());
  c10::raw::intrusive_ptr::incref(owner_);
  slice->owner = owner_;
  slice->data = data;
  slice->size = static_cast<Py_ssize_t>(size);
  return made;
}

Ref Decoder::tensor(const Node& node) const {
  c10::SmallVector<int64_t, 8> sizes;
  for (uint32_t i = 0; i < node.count; ++i) sizes.push_back(words_[node.word + i]);
  const Extent& extent = extents_[node.leaf];
  c10::DataPtr memory(nullptr, c10::Device(c10::DeviceType::CPU));
  if (extent.size) {
    c10::raw::intrusive_ptr::incref(owner_);
    memory =
        c10::DataPtr(base_ + extent.at, owner_, &drop_owner, c10::Device(c10::DeviceType::CPU));
  }
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), extent.size, std::move(memory), c10::GetCPUAllocator(),
      /*resizable=*/true);
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                   c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                   c10::scalarTypeToTypeMeta(node.type));
  impl->set_sizes_contiguous(sizes);
  return checked(THPVariable_Wrap(at::Tensor(std::move(impl))));
}

Ref Decoder::array(const Node& node) const {
  const DType& type = impl_.dtypes[node.entry];
  Ref dtype = type.flexible ? make_dtype(type, words_[node.word + node.count])
                            : Ref::to(impl_.objects().dtypes[node.entry].get());
  Ref shape = checked(PyTuple_New(node.count));
  for (uint32_t i = 0; i < node.count; ++i) {
    PyTuple_SET_ITEM(shape.get(), i,
                     checked(PyLong_FromUnsignedLong(words_[node.word + i])).release());
  }
  if (!size(node)) {
    PyObject* arguments[] = {shape.get(), dtype.get()};
    return checked(PyObject_Vectorcall(numpy().ndarray, arguments, 2, nullptr));
  }
  Ref memory = slice(base_ + extents_[node.leaf].at, size(node));
  PyObject* arguments[] = {shape.get(), dtype.get(), memory.get()};
  return checked(PyObject_Vectorcall(numpy().ndarray, arguments, 3, nullptr));
}

Ref Decoder::number_list(const Node& node) const {
  const uint8_t* values = payload(node);
  const auto count = static_cast<Py_ssize_t>(size(node) / 8);
  Ref list = checked(PyList_New(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = nullptr;
    if (node.kind == Kind::Ints) {
      int64_t value;
      std::memcpy(&value, values + 8 * i, 8);
      item = PyLong_FromLongLong(value);
    } else {
      double value;
      std::memcpy(&value, values + 8 * i, 8);
      item = PyFloat_FromDouble(value);
    }
    PyList_SET_ITEM(list.get(), i, checked(item).release());
  }
  return list;
}

Ref Decoder::named_tuple(const Node& node) {
  const auto known = impl_.resolve(node.entry);
  c10::SmallVector<Ref, 8> items;
  for (uint32_t i = 0; i < node.count; ++i) items.push_back(this->node());
  PyTypeObject* type = known->pytype();
  Ref made = checked(type->tp_alloc(type, node.count));
  for (uint32_t i = 0; i < node.count; ++i) {
    PyTuple_SET_ITEM(made.get(), i, items[i].release());
  }
  return made;
}

Ref Decoder::data_class(const Node& node) {
  const auto known = impl_.resolve(node.entry);
  static PyObject* maker = nullptr;
  if (!maker) {
    maker =
        checked(PyObject_GetAttrString(reinterpret_cast<PyObject*>(&PyBaseObject_Type), "__new__"))
            .release();
  }
  Ref made = checked(PyObject_CallOneArg(maker, known->type.get()));
  auto set = [&](PyObject* name) {
    if (impl_.nodes[next_].kind == Kind::Missing) {
      ++next_;
      return;
    }
    Ref value = this->node();
    // Past a __setattr__ of its own, which in a frozen class refuses.
    check(PyObject_GenericSetAttr(made.get(), name, value.get()));
  };
  for (const auto& name : known->names) set(name.get());
  const auto& names = impl_.objects().names;
  for (uint32_t i = 0; i < node.more; ++i) set(names[node.names + i].get());
  return made;
}

Ref Decoder::enum_member(const Node& node) const {
  const auto known = impl_.resolve(node.entry);
  Ref name = make_text(payload(node), size(node));
  Ref member(PyObject_GetItem(known->type.get(), name.get()));
  if (!member) {
    if (!PyErr_ExceptionMatches(PyExc_KeyError)) throw python_error();
    PyErr_Clear();
    TORCH_CHECK_VALUE(false, "a sample was stored with the member ", ascii(name.get()), " of ",
                      type_name(known->pytype()), ", which has no such member now");
  }
  return member;
}

Ref Decoder::image(const Node& node) {
  const auto& image = impl_.images[node.entry];
  Ref pixels = slice(base_ + extents_[node.leaf].at, size(node));
  Ref made =
      checked(PyObject_CallFunction(KEPT("PIL.Image", "frombytes"), "s(II)O", image.mode.c_str(),
                                    words_[node.word], words_[node.word + 1], pixels.get()));
  if (!image.palette.empty()) {
    const Extent& extent = extents_[node.leaf + 1];
    Ref palette = make_bytes(base_ + extent.at, extent.size);
    checked(
        PyObject_CallMethod(made.get(), "putpalette", "Os", palette.get(), image.palette.c_str()));
  }
  if (impl_.nodes[next_].kind == Kind::Missing) {
    ++next_;
    return made;
  }
  Ref transparency = this->node();
  Ref info = checked(PyObject_GetAttr(made.get(), NAME("info")));
  check(PyObject_SetItem(info.get(), NAME("transparency"), transparency.get()));
  return made;
}

Ref Decoder::node() {
  const Node& node = impl_.nodes[next_++];
  switch (node.kind) {
    case Kind::Tensor:
      return tensor(node);
    case Kind::Int:
      return checked(PyLong_FromLongLong(number<int64_t>(node)));
    case Kind::Tuple: {
      Ref tuple = checked(PyTuple_New(node.count));
      for (uint32_t i = 0; i < node.count; ++i) {
        PyTuple_SET_ITEM(tuple.get(), i, this->node().release());
      }
      return tuple;
    }
    case Kind::List: {
      Ref list = checked(PyList_New(node.count));
      for (uint32_t i = 0; i < node.count; ++i) {
        PyList_SET_ITEM(list.get(), i, this->node().release());
      }
      return list;
    }
    case Kind::Dict:
    case Kind::OrderedDict:
      return make_dict(impl_, node, next_, [&] { return this->node(); });
    case Kind::Str:
      return make_text(payload(node), size(node));
    case Kind::Float:
      return checked(PyFloat_FromDouble(number<double>(node)));
    case Kind::Bool:
      return Ref::to(number<uint64_t>(node) ? Py_True : Py_False);
    case Kind::None:
      return Ref::to(Py_None);
    case Kind::Complex:
      return checked(PyComplex_FromDoubles(number<double>(node), number<double>(node, 1)));
    case Kind::Bytes:
      return make_bytes(payload(node), size(node));
    case Kind::ByteArray:
      return checked(PyByteArray_FromStringAndSize(reinterpret_cast<const char*>(payload(node)),
                                                   static_cast<Py_ssize_t>(size(node))));
    case Kind::BigInt: {
      Ref bytes = make_bytes(payload(node), size(node));
      Ref method =
          checked(PyObject_GetAttr(reinterpret_cast<PyObject*>(&PyLong_Type), NAME("from_bytes")));
      Ref arguments = checked(Py_BuildValue("(Os)", bytes.get(), "little"));
      Ref options = checked(Py_BuildValue("{s:O}", "signed", Py_True));
      return checked(PyObject_Call(method.get(), arguments.get(), options.get()));
    }
    case Kind::Array:
      return array(node);
    case Kind::NumpyScalar: {
      Ref memory = slice(number_at(node), impl_.dtypes[node.entry].itemsize);
      Ref shape = checked(PyTuple_New(0));
      PyObject* arguments[] = {shape.get(), impl_.objects().dtypes[node.entry].get(), memory.get()};
      Ref array = checked(PyObject_Vectorcall(numpy().ndarray, arguments, 3, nullptr));
      return checked(PyObject_GetItem(array.get(), shape.get()));
    }
    case Kind::NumpyStr: {
      Ref text = make_text(payload(node), size(node));
      return checked(PyObject_CallOneArg(numpy().str, text.get()));
    }
    case Kind::NumpyBytes: {
      Ref bytes = make_bytes(payload(node), size(node));
      return checked(PyObject_CallOneArg(numpy().bytes, bytes.get()));
    }
    case Kind::Ints:
    case Kind::Floats:
      return number_list(node);
    case Kind::Size: {
      Ref sizes = checked(PyTuple_New(node.count));
      for (uint32_t i = 0; i < node.count; ++i) {
        PyTuple_SET_ITEM(sizes.get(), i,
                         checked(PyLong_FromLongLong(number<int64_t>(node, i))).release());
      }
      return checked(PyObject_CallOneArg(reinterpret_cast<PyObject*>(&THPSizeType), sizes.get()));
    }
    case Kind::NamedTuple:
      return named_tuple(node);
    case Kind::DataClass:
      return data_class(node);
    case Kind::Enum:
      return enum_member(node);
    case Kind::Image:
      return image(node);
    case Kind::Pickle: {
      Ref bytes = make_bytes(payload(node), size(node));
      return checked(PyObject_CallOneArg(KEPT("pickle", "loads"), bytes.get()));
    }
    case Kind::Missing:
      break;
  }
  Reader::malformed("an unknown kind of part");
}

}  // namespace

Schema::Schema(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}

Schema::~Schema() {
  if (!impl_->made) return;
  if (!Py_IsInitialized() || is_finalizing()) {
    impl_.release();  // too late to give references back
    return;
  }
  const PyGILState_STATE gil = PyGILState_Ensure();
  impl_.reset();
  PyGILState_Release(gil);
}

std::shared_ptr<const Schema> Schema::parse(std::string_view bytes) {
  TORCH_CHECK_VALUE(bytes.size() <= kSchemaLimit, "malformed schema: it is too long");
  auto impl = std::make_unique<Impl>();
  impl->text = bytes;
  Parser(*impl).schema();
  return std::shared_ptr<const Schema>(new Schema(std::move(impl)));
}

bool Schema::collatable() const { return impl_->collatable; }

bool Schema::needs_pickle() const { return impl_->needs_pickle; }

PyObject* Schema::decode(const at::Tensor& record, bool allow_pickle) const {
  TORCH_CHECK_VALUE(record.defined() && record.device().is_cpu() &&
                        record.layout() == at::kStrided && record.scalar_type() == at::kByte &&
                        record.dim() == 1 && record.is_contiguous(),
                    "a record is a contiguous CPU tensor of bytes with one dimension");
  TORCH_CHECK_VALUE(allow_pickle || !impl_->needs_pickle,
                    "the sample holds objects stored with pickle, which can run any code when ",
                    "loaded; pass allow_pickle=True if you trust who wrote it");
  if (reinterpret_cast<uintptr_t>(record.const_data_ptr()) % 16) {
    return Decoder(*impl_, record.clone()).node().release();
  }
  return Decoder(*impl_, record).node().release();
}

PyObject* Schema::collate(Records records, const Allocate& allocate) const {
  auto collation = Collation::plan(shared_from_this(), records, allocate);
  if (!collation) return nullptr;
  bool alike = false;
  {
    WithoutGil free(collation->bytes() >= (64 << 10));  // costs more than a small copy
    alike = collation->copy(0, collation->rows());
  }
  return alike ? collation->finish() : nullptr;
}

// Collating

// A column of this size is out of the processor's caches before anybody reads it.
constexpr uint64_t kBeyondCaches = 16 << 20;
constexpr uint64_t kPage = 4096;

// As memcpy, but past the caches: memory that is only written is not read first.
void stream(uint8_t* to, const uint8_t* from, size_t size) {
#ifdef __SSE2__
  const size_t head = -reinterpret_cast<uintptr_t>(to) % 16;
  std::memcpy(to, from, head);
  to += head;
  from += head;
  size -= head;
  for (; size >= 64; to += 64, from += 64, size -= 64) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();  // others see what was written once they see that this thread is done
#endif
  std::memcpy(to, from, size);
}

struct Collation::Impl {
  using Extent = Schema::Impl::Extent;

  // One tensor of the batch.
  struct Column {
    at::Tensor batch;
    uint8_t* to;
    uint64_t row_bytes;
    int64_t leaf;     // the payload it lies in; -1: at the same place in every record
    uint64_t offset;  // in that payload, or in the record
    bool truth;       // of bool: a number of 8 bytes becomes one byte
  };
  // One string of one row, in the arena.
  struct Text {
    uint64_t at;
    uint64_t size;
  };

  std::shared_ptr<const Schema> schema;
  std::vector<std::pair<const uint8_t*, uint64_t>> records;
  // The words of the first record, read once: in the record they may change.
  std::vector<uint32_t> words;
  std::vector<Extent> extents;  // of one row, or of all if they differ
  size_t stride = 0;            // from one row to the next
  std::vector<Column> columns;
  std::vector<uint32_t> text_leaves;
  std::vector<Text> texts;  // row by row
  std::unique_ptr<uint8_t[]> arena;
  uint64_t bytes = 0;
  // Of `finish`:
  size_t next_node = 0, next_column = 0, next_text = 0;

  const Schema::Impl& parsed() const { return *schema->impl_; }
  bool lay_out();
  void make_columns(const Schema::Allocate& allocate);
  void make_texts();

  const uint8_t* source(const Column& column, size_t row) const {
    const uint64_t at = column.leaf < 0 ? 0 : extents[row * stride + column.leaf].at;
    return records[row].first + at + column.offset;
  }
  template <size_t size>
  void copy_fixed(const Column& column, size_t first, size_t last) const {
    uint8_t* to = column.to + first * size;
    for (size_t row = first; row < last; ++row, to += size) {
      std::memcpy(to, source(column, row), size);
    }
  }
  // Whether these rows have the shapes of the first one; they are as long as it.
  bool are_alike(size_t first, size_t last) const {
    const auto alike = [&](const auto& record) {
      return std::memcmp(record.first, words.data(), 4 * words.size()) == 0;
    };
    return words.empty() || std::all_of(records.begin() + first, records.begin() + last, alike);
  }
  void copy_column(const Column& column, size_t first, size_t last) const;
  void copy_texts(size_t first, size_t last) const;

  PyObject* wrap(Column& column) { return THPVariable_Wrap(std::move(column.batch)); }
  Ref node(bool in_sequence);
  Ref strings(bool text, bool as_tuple);
};

// Checks every record, and finds out where its payloads lie.
bool Collation::Impl::lay_out() {
  const auto& schema = parsed();
  const size_t leaves = schema.leaves.size();
  auto read = [&](size_t row, std::vector<uint32_t>& to) {
    if (records[row].second < schema.head()) return false;
    to.resize(schema.words);
    if (!to.empty()) std::memcpy(to.data(), records[row].first, 4 * to.size());
    return true;
  };
  if (!read(0, words)) return false;
  extents.resize(leaves);
  if (!schema.layout(words.data(), records[0].second, extents.data())) return false;
  if (schema.all_fixed) {
    // All are alike or there is no batch. `copy` looks at the words: where records are small, a
    // look at each of them costs about as much as its copy, and `copy` has threads.
    const auto as_long = [&](const auto& record) { return record.second == records[0].second; };
    return std::all_of(records.begin(), records.end(), as_long);
  }
  std::vector<uint32_t> other;
  for (size_t row = 1; row < records.size(); ++row) {
    if (!read(row, other)) return false;
    const bool same = other == words && records[row].second == records[0].second;
    if (same && !stride) continue;
    if (!stride) {
      stride = leaves;
      extents.resize(leaves * records.size());
      for (size_t before = 1; before < row; ++before) {
        std::copy_n(extents.begin(), leaves, extents.begin() + before * leaves);
      }
    }
    for (const auto& leaf : schema.leaves) {
      const auto first = words.begin() + leaf.word;
      if (leaf.fixed && !std::equal(first, first + leaf.dims, other.begin() + leaf.word)) {
        return false;
      }
    }
    if (!schema.layout(other.data(), records[row].second, extents.data() + row * leaves)) {
      return false;
    }
  }
  return true;
}

void Collation::Impl::make_columns(const Schema::Allocate& allocate) {
  const auto& schema = parsed();
  std::vector<int64_t> sizes;
  auto add = [&](at::ScalarType type, uint64_t row_bytes, int64_t leaf, uint64_t offset,
                 bool truth = false) {
    at::Tensor batch = allocate(sizes, type);
    TORCH_CHECK(batch.defined() && batch.device().is_cpu() && batch.scalar_type() == type &&
                    batch.sizes() == at::IntArrayRef(sizes) && batch.is_contiguous(),
                "a batch was allocated with another shape, dtype or layout than asked for");
    auto* to = static_cast<uint8_t*>(batch.mutable_data_ptr());
    bytes += row_bytes * records.size();
    columns.push_back({std::move(batch), to, row_bytes, leaf, offset, truth});
  };
  for (const auto& node : schema.nodes) {
    const uint64_t number = schema.numbers_at() + 8 * uint64_t{node.number};
    sizes.assign(1, static_cast<int64_t>(records.size()));
    switch (node.kind) {
      case Kind::Int:
        add(at::kLong, 8, -1, number);
        break;
      case Kind::Float:
        add(at::kDouble, 8, -1, number);
        break;
      case Kind::Bool:
        add(at::kBool, 1, -1, number, true);
        break;
      case Kind::NumpyScalar:
        add(node.type, c10::elementSize(node.type), -1, number);
        break;
      case Kind::Size:
        for (uint32_t i = 0; i < node.count; ++i) add(at::kLong, 8, -1, number + 8 * uint64_t{i});
        break;
      case Kind::Tensor:
      case Kind::Array:
        for (uint32_t i = 0; i < node.count; ++i) sizes.push_back(words[node.word + i]);
        add(node.type, extents[node.leaf].size, node.leaf, 0);
        break;
      case Kind::Ints:
      case Kind::Floats:
        for (uint64_t at = 0; at < extents[node.leaf].size; at += 8) {
          add(node.kind == Kind::Ints ? at::kLong : at::kDouble, 8, node.leaf, at);
        }
        break;
      case Kind::Str:
      case Kind::Bytes:
        text_leaves.push_back(node.leaf);
        break;
      default:
        break;
    }
  }
}

void Collation::Impl::make_texts() {
  uint64_t size = 0;
  texts.reserve(text_leaves.size() * records.size());
  for (size_t row = 0; row < records.size() && !text_leaves.empty(); ++row) {
    for (const uint32_t leaf : text_leaves) {
      texts.push_back({size, extents[row * stride + leaf].size});
      size += texts.back().size;
    }
  }
  arena.reset(new uint8_t[size]);
  bytes += size;
}

void Collation::Impl::copy_column(const Column& column, size_t first, size_t last) const {
  if (column.truth) {
    for (size_t row = first; row < last; ++row) {
      uint64_t value;
      std::memcpy(&value, source(column, row), 8);
      column.to[row] = value != 0;
    }
    return;
  }
  switch (column.row_bytes) {
    case 0:
      return;
    case 1:
      return copy_fixed<1>(column, first, last);
    case 2:
      return copy_fixed<2>(column, first, last);
    case 4:
      return copy_fixed<4>(column, first, last);
    case 8:
      return copy_fixed<8>(column, first, last);
    case 16:
      return copy_fixed<16>(column, first, last);
    case 32:
      return copy_fixed<32>(column, first, last);
    case 64:
      return copy_fixed<64>(column, first, last);
    default:
      break;
  }
  const uint64_t size = column.row_bytes;
  uint8_t* to = column.to + first * size;
  if (size < 64) {
    for (size_t row = first; row < last; ++row, to += size) {
      const uint8_t* from = source(column, row);
      uint64_t at = 0;
      for (; at + 8 <= size; at += 8) std::memcpy(to + at, from + at, 8);
      for (; at < size; ++at) to[at] = from[at];
    }
    return;
  }
  const bool beyond_caches = size >= kPage && size * records.size() >= kBeyondCaches;
  for (size_t row = first; row < last; ++row, to += size) {
    if (beyond_caches) {
      stream(to, source(column, row), size);
    } else {
      std::memcpy(to, source(column, row), size);
    }
  }
}

void Collation::Impl::copy_texts(size_t first, size_t last) const {
  const size_t count = text_leaves.size();
  for (size_t row = first; row < last && count; ++row) {
    for (size_t i = 0; i < count; ++i) {
      const Text& text = texts[row * count + i];
      if (text.size == 0) continue;
      const auto& extent = extents[row * stride + text_leaves[i]];
      std::memcpy(arena.get() + text.at, records[row].first + extent.at, text.size);
    }
  }
}

// The strings of a column, in what default_collate puts them: zip makes tuples, the rest lists.
Ref Collation::Impl::strings(bool text, bool as_tuple) {
  const size_t column = next_text++;
  const auto rows = static_cast<Py_ssize_t>(records.size());
  Ref made = checked(as_tuple ? PyTuple_New(rows) : PyList_New(rows));
  for (Py_ssize_t row = 0; row < rows; ++row) {
    const Text& found = texts[row * text_leaves.size() + column];
    const uint8_t* data = arena.get() + found.at;
    PyObject* item = (text ? make_text(data, found.size) : make_bytes(data, found.size)).release();
    if (as_tuple) {
      PyTuple_SET_ITEM(made.get(), row, item);
    } else {
      PyList_SET_ITEM(made.get(), row, item);
    }
  }
  return made;
}

Ref Collation::Impl::node(bool in_sequence) {
  const auto& schema = parsed();
  const auto& node = schema.nodes[next_node++];
  // Tuples become lists, as in default_collate.
  auto list = [&](size_t count, auto&& next) {
    Ref made = checked(PyList_New(static_cast<Py_ssize_t>(count)));
    for (size_t i = 0; i < count; ++i) {
      PyList_SET_ITEM(made.get(), static_cast<Py_ssize_t>(i), next().release());
    }
    return made;
  };
  auto column = [&] { return checked(wrap(columns[next_column++])); };
  switch (node.kind) {
    case Kind::Str:
      return strings(true, in_sequence);
    case Kind::Bytes:
      return strings(false, in_sequence);
    case Kind::Tuple:
    case Kind::List:
      return list(node.count, [&] { return this->node(true); });
    case Kind::Size:
      return list(node.count, column);
    case Kind::Ints:
    case Kind::Floats:
      return list(extents[node.leaf].size / 8, column);
    case Kind::Dict:
    case Kind::OrderedDict:
      return make_dict(schema, node, next_node, [&] { return this->node(false); });
    case Kind::NamedTuple: {
      const auto known = schema.resolve(node.entry);
      Ref items = checked(PyTuple_New(node.count));
      for (uint32_t i = 0; i < node.count; ++i) {
        PyTuple_SET_ITEM(items.get(), i, this->node(true).release());
      }
      return checked(PyObject_Call(known->type.get(), items.get(), nullptr));
    }
    default:
      return column();
  }
}

Collation::Collation(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Collation::~Collation() = default;

std::unique_ptr<Collation> Collation::plan(std::shared_ptr<const Schema> schema,
                                           Schema::Records records,
                                           const Schema::Allocate& allocate) {
  if (records.empty() || !schema->collatable()) return nullptr;
  auto impl = std::make_unique<Impl>();
  impl->schema = std::move(schema);
  impl->records.assign(records.begin(), records.end());
  if (!impl->lay_out()) return nullptr;
  impl->make_columns(allocate);
  impl->make_texts();
  return std::unique_ptr<Collation>(new Collation(std::move(impl)));
}

size_t Collation::rows() const { return impl_->records.size(); }

uint64_t Collation::bytes() const { return impl_->bytes; }

bool Collation::copy(size_t first_row, size_t last_row) const noexcept {
  // A few rows at a time: what a record's columns share is then still in the processor's cache.
  constexpr size_t block = 64;
  const bool unchecked = impl_->parsed().all_fixed;
  for (size_t first = first_row; first < last_row; first += block) {
    const size_t last = std::min(first + block, last_row);
    if (unchecked && !impl_->are_alike(first, last)) return false;
    for (const auto& column : impl_->columns) impl_->copy_column(column, first, last);
    impl_->copy_texts(first, last);
  }
  return true;
}

PyObject* Collation::finish() {
  TORCH_CHECK(impl_->next_node == 0, "a batch is finished once");
  return impl_->node(false).release();
}

// For Python

namespace {

// The bytes of any object that has some. Keeps them as they are for its lifetime.
class Bytes {
 public:
  explicit Bytes(PyObject* object) {
    if (PyObject_GetBuffer(object, &view_, PyBUF_SIMPLE) != 0) throw python_error();
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  const uint8_t* data() const { return static_cast<const uint8_t*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

// The schema of these bytes; the last ones are remembered.
std::shared_ptr<const Schema> schema_of(PyObject* object) {
  using Schemas = std::unordered_map<std::string, std::shared_ptr<const Schema>>;
  static Schemas& memory = *new Schemas;
  const Bytes bytes(object);
  const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const auto found = memory.find(text);
  if (found != memory.end()) return found->second;
  auto parsed = Schema::parse(text);
  Schemas dropped;
  if (memory.size() >= 64) dropped.swap(memory);
  memory.insert_or_assign(text, parsed);
  return parsed;
}

PyObject* codec_encode(PyObject*, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"sample", "allow_pickle", nullptr};
  PyObject* sample = nullptr;
  int allow_pickle = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p:codec_encode", const_cast<char**>(names),
                                   &sample, &allow_pickle)) {
    return nullptr;
  }
  const Encoded encoded = encode(sample, allow_pickle);
  Ref schema = checked(PyBytes_FromStringAndSize(encoded.schema.data(),
                                                 static_cast<Py_ssize_t>(encoded.schema.size())));
  Ref record = checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(encoded.bytes)));
  char* to = PyBytes_AS_STRING(record.get());
  for (const auto& part : encoded.parts) {
    std::memcpy(to, part.iov_base, part.iov_len);
    to += part.iov_len;
  }
  return Py_BuildValue("NN", schema.release(), record.release());
  END_HANDLE_TH_ERRORS
}

PyObject* codec_decode(PyObject*, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"schema", "record", "allow_pickle", nullptr};
  PyObject *schema = nullptr, *record = nullptr;
  int allow_pickle = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|p:codec_decode", const_cast<char**>(names),
                                   &schema, &record, &allow_pickle)) {
    return nullptr;
  }
  const auto parsed = schema_of(schema);
  if (THPVariable_Check(record)) return parsed->decode(THPVariable_Unpack(record), allow_pickle);
  const Bytes bytes(record);
  const at::Tensor copy = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  if (bytes.size()) std::memcpy(copy.mutable_data_ptr(), bytes.data(), bytes.size());
  return parsed->decode(copy, allow_pickle);
  END_HANDLE_TH_ERRORS
}

PyObject* codec_collate(PyObject*, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"schema", "records", "threads", nullptr};
  PyObject *schema = nullptr, *records = nullptr;
  unsigned int threads = 1;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|I:codec_collate", const_cast<char**>(names),
                                   &schema, &records, &threads)) {
    return nullptr;
  }
  TORCH_CHECK_VALUE(threads >= 1 && threads <= 64, "threads is ", threads, "; 1 to 64 are allowed");
  const auto parsed = schema_of(schema);
  Ref items = checked(PySequence_Tuple(records));
  std::vector<std::unique_ptr<Bytes>> held;
  std::vector<std::pair<const uint8_t*, uint64_t>> rows;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.get()); ++i) {
    held.push_back(std::make_unique<Bytes>(PyTuple_GET_ITEM(items.get(), i)));
    rows.emplace_back(held.back()->data(), held.back()->size());
  }
  auto allocate = [](at::IntArrayRef sizes, at::ScalarType type) { return at::empty(sizes, type); };
  if (threads == 1) {
    PyObject* batch = parsed->collate(rows, allocate);
    return batch ? batch : Py_NewRef(Py_NotImplemented);
  }
  std::unique_ptr<Collation> collation;
  {
    WithoutGil free;
    collation = Collation::plan(parsed, rows, allocate);
    std::atomic<bool> alike = collation != nullptr;
    std::vector<std::thread> workers;
    for (size_t i = 0; collation && i < threads; ++i) {
      workers.emplace_back([&alike, &collation, count = rows.size(), threads, i] {
        if (!collation->copy(i * count / threads, (i + 1) * count / threads)) alike = false;
      });
    }
    for (auto& worker : workers) worker.join();
    if (!alike) collation = nullptr;
  }
  return collation ? collation->finish() : Py_NewRef(Py_NotImplemented);
  END_HANDLE_TH_ERRORS
}

template <typename Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

PyMethodDef codec_methods[] = {
    {"codec_encode", as_method(codec_encode), METH_VARARGS | METH_KEYWORDS,
     "codec_encode(sample, allow_pickle=False)\n--\n\nThe schema and the record of a sample."},
    {"codec_decode", as_method(codec_decode), METH_VARARGS | METH_KEYWORDS,
     "codec_decode(schema, record, allow_pickle=False)\n--\n\nThe sample in a record."},
    {"codec_collate", as_method(codec_collate), METH_VARARGS | METH_KEYWORDS,
     "codec_collate(schema, records, threads=1)\n--\n\n"
     "The batch that default_collate makes of these samples, or NotImplemented."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace stocache::codec
