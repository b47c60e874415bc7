// Samples to records: the walk, containers, numbers and texts.
#include "codec/encoder.h"

namespace stocache::codec {

void Encoder::enter(PyObject* object, const Path& where, int depth) const {
  if (depth < kDepthLimit) return;
  for (const Path* step = &where; step->parent; step = step->parent) {
    if (step->container == object) refuse(where, " contains itself");
  }
  refuse(where, " is nested more than ", kDepthLimit, " levels deep");
}

void Encoder::object(PyObject* object, const Path& where, int depth) {
  PyTypeObject* type = Py_TYPE(object);
  if (type == tensor_type()) {
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
  } else if (type == size_type()) {
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
      case Kind::Object:
        return parts(object, *known, where, depth) ? void() : other(object, where);
      default:
        return enum_member(object, *known, where);
    }
  } else {
    other(object, where);
  }
}

void Encoder::integer(PyObject* object, const Path& where) {
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

void Encoder::text(Kind kind, PyObject* object, const Path& where) {
  put(kind);
  if (PyUnicode_IS_COMPACT_ASCII(object)) {
    const auto size = static_cast<uint64_t>(PyUnicode_GET_LENGTH(object));
    add_length(size, where);
    return add_owned(Ref::to(object), PyUnicode_DATA(object), size);
  }
  add_bytes(checked(PyUnicode_AsEncodedString(object, "utf-8", "surrogatepass")), where);
}

// A list of int alone or of float alone. Runs no code of the sample, so the list stays as it is.
bool Encoder::number_list(PyObject* list, const Path& where) {
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

// Whether a key is part of the schema. Others are stored as any object is.
bool is_plain_key(PyObject* key, int depth = 0) {
  PyTypeObject* type = Py_TYPE(key);
  if (type == &PyUnicode_Type || type == &PyBool_Type || type == &PyFloat_Type ||
      type == &PyBytes_Type || key == Py_None) {
    return true;
  }
  if (type == &PyLong_Type) {
    int overflow = 0;
    PyLong_AsLongLongAndOverflow(key, &overflow);
    return !overflow;
  }
  if (type != &PyTuple_Type || depth >= kDepthLimit) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(key); ++i) {
    if (!is_plain_key(PyTuple_GET_ITEM(key, i), depth + 1)) return false;
  }
  return true;
}

bool has_plain_keys(PyObject* dict) {
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *value = nullptr;
  while (PyDict_Next(dict, &position, &key, &value)) {
    if (!is_plain_key(key)) return false;
  }
  return true;
}

// A key for which `is_plain_key` holds.
void Encoder::key(PyObject* key, const Path& where, int depth) {
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
    schema_.push_back('i');
    put_raw(schema_, PyLong_AsLongLong(key));
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
  } else {
    if (depth >= kDepthLimit) refuse(where, " has a key that is nested too deep");
    schema_.push_back('(');
    put_count(schema_, PyTuple_GET_SIZE(key));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(key); ++i) {
      this->key(PyTuple_GET_ITEM(key, i), where, depth + 1);
    }
  }
}

void Encoder::dict(PyObject* object, const Path& where, int depth) {
  enter(object, where, depth);
  if (!has_plain_keys(object)) return pairs(object, where, depth);
  const Py_ssize_t count = PyDict_GET_SIZE(object);
  put(Kind::Dict);
  put_count(schema_, count);
  Py_ssize_t position = 0, seen = 0;
  PyObject *name = nullptr, *value = nullptr;
  while (PyDict_Next(object, &position, &name, &value)) {
    Ref own_name = Ref::to(name), own_value = Ref::to(value);
    key(name, where, depth);
    this->object(value, Path{&where, object, 0, name}, depth + 1);
    ++seen;
    if (PyDict_GET_SIZE(object) != count) changed(where);
  }
  if (seen != count) changed(where);
}

void Encoder::pairs(PyObject* object, const Path& where, int depth) {
  // Copied first: keys may have code, which may change the dict.
  Ref items = checked(PyDict_Items(object));
  const Py_ssize_t count = PyList_GET_SIZE(items.get());
  put(Kind::Pairs);
  put_count(schema_, count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(items.get(), i);
    const Path keys{&where, object, 0, nullptr, NAME("keys")};
    this->object(PyTuple_GET_ITEM(item, 0), Path{&keys, nullptr, i}, depth + 1);
    const Path values{&where, object, 0, nullptr, NAME("values")};
    this->object(PyTuple_GET_ITEM(item, 1), Path{&values, nullptr, i}, depth + 1);
  }
}

void Encoder::ordered_dict(PyObject* object, const Path& where, int depth) {
  enter(object, where, depth);
  Ref dict = dict_of(object);
  if (dict && PyDict_GET_SIZE(dict.get())) return other(object, where, "with attributes");
  if (!has_plain_keys(object)) return other(object, where, "with keys of other kinds");
  // Its own order, which PyDict_Next does not know.
  Ref items = checked(PyMapping_Items(object));
  const Py_ssize_t count = PyList_GET_SIZE(items.get());
  put(Kind::OrderedDict);
  put_count(schema_, count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(items.get(), i);
    PyObject* name = PyTuple_GET_ITEM(item, 0);
    key(name, where, depth);
    this->object(PyTuple_GET_ITEM(item, 1), Path{&where, object, 0, name}, depth + 1);
  }
}

void Encoder::torch_size(PyObject* object, const Path& where) {
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

Encoded encode(PyObject* sample, bool allow_pickle) {
  Encoder encoder(allow_pickle);
  encoder.object(sample, Path{}, 0);
  return encoder.finish();
}

}  // namespace stocache::codec
