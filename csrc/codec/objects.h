// What the codec needs of Python and numpy. Everything here needs the GIL.
#pragma once

#include "tensor/python.h"
// Python.h stays first.
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "codec/format.h"

namespace stocache::codec {

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

inline Ref checked(PyObject* owned) {
  if (!owned) throw PythonError();
  return Ref(owned);
}

inline void check(int status) {
  if (status < 0) throw PythonError();
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
    if (!kept) throw PythonError();                           \
    return kept;                                              \
  }())

// The attribute, or nothing if there is none.
Ref attribute(PyObject* object, PyObject* name);
// The same if it is a str, else nothing; it must be there.
std::string attribute_text(PyObject* object, PyObject* name);
// The module if it is imported already. Types of other modules cannot occur in a sample.
Ref loaded(PyObject* module_name);
// A str of these bytes, or nothing if they are not UTF-8.
Ref decode_utf8(std::string_view text);
// A str of these bytes of a schema, which is malformed if they are not UTF-8.
Ref text_object(std::string_view text);
Ref interned(std::string_view text);
std::string_view utf8(PyObject* text);
std::string_view bytes_of(PyObject* bytes);

// For messages: always one line of plain ASCII that is not too long, never an error.
std::string ascii(PyObject* text, size_t most = 200);
std::string type_name(PyTypeObject* type);

// The pending Python error, as "KeyError: 'x'"; it stays pending.
std::string pending_error();

bool is_subtype(PyTypeObject* type, PyObject* of);

// stocache.UnsupportedSample, a TypeError and a ValueError: a sample that cannot be stored. Kept
// for ever; nullptr with a Python error if it cannot be made.
PyObject* unsupported_type();
// Raises it. Its attribute `place` says where in the sample the trouble lies. A Python error that
// is pending becomes its cause. Without a C++ backtrace: every sample of a dataset may come here.
[[noreturn]] void throw_unsupported(const std::string& place, const std::string& text);

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

// numpy

struct Numpy {
  PyObject *ndarray, *memmap, *generic, *str, *bytes, *dtype, *ascontiguousarray;
};

// numpy, or nullptr if nobody imported it yet.
const Numpy* numpy_if_loaded();
const Numpy& numpy();
Ref make_dtype(const DType& type, uint32_t width);
// What is written for a dtype of numpy, or nullptr for one that is not stored.
std::shared_ptr<const DType> dtype_of(PyObject* dtype);

}  // namespace stocache::codec
