// Samples to records: Encoder walks a sample and writes schema, words, numbers and payloads.
#include "codec.h"
// Python.h stays first.
#include <ATen/Functions.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>

#include "codec_classes.h"

namespace stocache::codec {
namespace {

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

}  // namespace stocache::codec
