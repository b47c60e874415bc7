#include "codec/objects.h"

#include <array>

namespace stocache::codec {

Ref attribute(PyObject* object, PyObject* name) {
  Ref value(PyObject_GetAttr(object, name));
  if (!value) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw PythonError();
    PyErr_Clear();
  }
  return value;
}

Ref loaded(PyObject* module_name) {
  Ref module(PyImport_GetModule(module_name));
  if (!module && PyErr_Occurred()) throw PythonError();
  return module.get() == Py_None ? Ref() : std::move(module);
}

Ref decode_utf8(std::string_view text) {
  Ref made(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass"));
  if (!made) {
    if (!PyErr_ExceptionMatches(PyExc_UnicodeError)) throw PythonError();
    PyErr_Clear();
  }
  return made;
}

Ref text_object(std::string_view text) {
  Ref made = decode_utf8(text);
  TORCH_CHECK_VALUE(made, "malformed schema: a name is not UTF-8");
  return made;
}

std::string_view utf8(PyObject* text) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text, &size);
  if (!data) throw PythonError();
  return {data, static_cast<size_t>(size)};
}

std::string_view bytes_of(PyObject* bytes) {
  return {PyBytes_AS_STRING(bytes), static_cast<size_t>(PyBytes_GET_SIZE(bytes))};
}

std::string ascii(PyObject* text, size_t most) {
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

std::string pending_error() {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Ref said(PyObject_Str(value));
  PyErr_Clear();
  const std::string text =
      type_name(reinterpret_cast<PyTypeObject*>(type)) + (said ? ": " + ascii(said.get()) : "");
  PyErr_Restore(type, value, traceback);
  return text;
}

PyObject* unsupported_type() {
  static PyObject* kept = nullptr;
  if (kept) return kept;
  Ref bases(PyTuple_Pack(2, PyExc_TypeError, PyExc_ValueError));
  if (!bases) return nullptr;
  constexpr const char* about =
      "A sample that cannot be stored: it holds a type or a value that the cache does not take. "
      "`place` says where in the sample.";
  kept = PyErr_NewExceptionWithDoc("stocache.UnsupportedSample", about, bases.get(), nullptr);
  return kept;
}

void throw_unsupported(const std::string& place, const std::string& text) {
  PyObject *type = nullptr, *cause = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &cause, &traceback);
  if (type) PyErr_NormalizeException(&type, &cause, &traceback);
  Ref own_type(type), own_cause(cause), own_traceback(traceback);
  Ref words =
      checked(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
  Ref error = checked(PyObject_CallOneArg(unsupported_type(), words.get()));
  Ref where =
      checked(PyUnicode_FromStringAndSize(place.data(), static_cast<Py_ssize_t>(place.size())));
  check(PyObject_SetAttr(error.get(), NAME("place"), where.get()));
  if (own_cause) PyException_SetCause(error.get(), own_cause.release());
  PyErr_SetObject(unsupported_type(), error.get());
  throw PythonError();
}

Ref interned(std::string_view text) {
  PyObject* made = text_object(text).release();
  PyUnicode_InternInPlace(&made);
  return Ref(made);
}

bool is_subtype(PyTypeObject* type, PyObject* of) {
  return of && PyType_Check(of) && PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(of));
}

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

std::shared_ptr<const DType> dtype_of(PyObject* dtype) {
  static auto& memory = *new Memory<DType>;
  if (auto found = memory.find(dtype)) return found;
  const std::string kind = attribute_text(dtype, NAME("kind"));
  const std::string code = attribute_text(dtype, NAME("char"));
  const std::string order = attribute_text(dtype, NAME("byteorder"));
  if (kind.size() != 1 || !std::strchr("biufcmMSU", kind[0])) return nullptr;
  // What somebody noted in it is no part of its code: it is stored by parts.
  if (Ref noted = attribute(dtype, NAME("metadata")); noted && noted.get() != Py_None) {
    return nullptr;
  }
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
    if (PyErr_Occurred()) throw PythonError();
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

}  // namespace stocache::codec
