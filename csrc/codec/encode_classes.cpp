// Samples to records: named tuples, dataclasses and enums, and what is left to pickle.
#include <algorithm>

#include "codec/encoder.h"

namespace stocache::codec {

Ref dict_of(PyObject* object) {
  Ref dict(PyObject_GenericGetDict(object, nullptr));
  if (!dict) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw PythonError();
    PyErr_Clear();
  }
  return dict;
}

void Encoder::put_class(const Known& known, const Path& where) {
  for (const auto& step : known.path) {
    if (PyUnicode_CompareWithASCIIString(step.get(), "<locals>") == 0) {
      refuse(where, " is ", with_article(type_name(known.pytype())),
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
    refuse(where, " is ", with_article(type_name(known.pytype())), ", but that name leads to ",
           found ? "another object" : "nothing", "; other processes would not find its class");
  }
  put(known.kind);
  schema_.append(known.place);
  schema_.append(known.fields_bytes);
}

void Encoder::named_tuple(PyObject* object, const Known& known, const Path& where, int depth) {
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
                 Path{&where, object, 0, nullptr, known.names[i].get()}, depth + 1);
  }
}

void Encoder::data_class(PyObject* object, const Known& known, const Path& where, int depth) {
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
    if (!PyUnicode_CheckExact(name)) refuse(where, " has an attribute without a name");
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
      this->object(set.get(), Path{&where, object, 0, nullptr, field.get()}, depth + 1);
    } else {
      put(Kind::Missing);
    }
  }
  for (const auto& [attribute_name, set] : more) {
    this->object(set.get(), Path{&where, object, 0, nullptr, attribute_name.get()}, depth + 1);
  }
}

void Encoder::enum_member(PyObject* object, const Known& known, const Path& where) {
  Ref name = checked(PyObject_GetAttr(object, NAME("name")));
  Ref member;
  if (PyUnicode_CheckExact(name.get())) {
    member = Ref(PyObject_GetItem(known.type.get(), name.get()));
    if (!member && !PyErr_ExceptionMatches(PyExc_KeyError)) throw PythonError();
    PyErr_Clear();
  }
  if (member.get() != object) return other(object, where, "that has no name of its own");
  put_class(known, where);
  add_bytes(checked(PyUnicode_AsEncodedString(name.get(), "utf-8", "surrogatepass")), where);
}

bool Encoder::parts(PyObject* object, const Known& known, const Path& where, int depth) {
  enter(object, where, depth);
  Ref given(PyObject_CallOneArg(known.to_parts.get(), object));
  if (!given) {
    // Out of memory says nothing about the object. What is not to be stored is not pickled either.
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError) ||
        PyErr_ExceptionMatches(unsupported_type())) {
      throw PythonError();
    }
    if (allow_pickle_) {
      PyErr_Clear();
      return false;
    }
    const std::string why = pending_error();
    refuse(where, " is ", with_article(type_name(known.pytype())),
           ", which could not be taken apart (", why, ")");
  }
  if (given.get() == Py_NotImplemented) return false;
  if (!PyTuple_CheckExact(given.get())) {
    refuse(where, " is ", with_article(type_name(known.pytype())), ", of which to_parts gave ",
           with_article(type_name(Py_TYPE(given.get()))), "; a tuple is needed");
  }
  put_class(known, where);
  const size_t stacked_at = schema_.size();
  schema_.push_back(static_cast<char>(known.stacked));
  const Py_ssize_t count = PyTuple_GET_SIZE(given.get());
  put_count(schema_, count);
  const size_t first_at = schema_.size();
  const Path inside{&where, object, 0, nullptr, NAME("parts")};
  for (Py_ssize_t i = 0; i < count; ++i) {
    this->object(PyTuple_GET_ITEM(given.get(), i), Path{&inside, nullptr, i}, depth + 1);
  }
  // Only tensors in plain memory are columns.
  const bool plain =
      schema_.size() > first_at && schema_[first_at] == static_cast<char>(Kind::Tensor);
  if (!plain) schema_[stacked_at] = 0;
  return true;
}

void Encoder::pickle(PyObject* object, const Path& where) {
  put(Kind::Pickle);
  Ref bytes(PyObject_CallOneArg(KEPT("stocache._pickling", "dumps"), object));
  if (!bytes) {
    // Out of memory says nothing about the object.
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)) {
      throw PythonError();
    }
    const std::string why = pending_error();
    throw_unsupported(text_of(where), text_of(where) + " is " +
                                          with_article(type_name(Py_TYPE(object))) +
                                          ", which pickle cannot store (" + why + "); convert it");
  }
  TORCH_CHECK_TYPE(PyBytes_CheckExact(bytes.get()), "pickling did not give bytes");
  add_bytes(std::move(bytes), where);
}

void Encoder::other(PyObject* object, const Path& where, const std::string& why) {
  PyTypeObject* type = Py_TYPE(object);
  if (!why.empty()) {  // its type has a kind of its own, which does not hold this one
    int depth = 0;
    for (const Path* step = &where; step->parent; step = step->parent) ++depth;
    const auto known = study_parts(type);
    if (known && parts(object, *known, where, depth)) return;
  }
  if (allow_pickle_) return pickle(object, where);
  const std::string what = " is " + with_article(type_name(type)) + (why.empty() ? "" : " " + why);
  if (!why.empty()) refuse(where, what, "; or pass allow_pickle=True to store it with pickle");
  constexpr const char* remedy =
      ", say how with stocache.register_type, or pass allow_pickle=True to store it with pickle";
  const Numpy* np = numpy_if_loaded();
  if (PyType_IsSubtype(type, tensor_type())) {
    refuse(where, what, ", a subclass of torch.Tensor; store a plain tensor (x.detach(), ",
           "x.as_subclass(torch.Tensor))", remedy);
  }
  if (np && is_subtype(type, np->ndarray)) {
    refuse(where, what, ", a subclass of numpy.ndarray; store plain arrays (numpy.asarray)",
           remedy);
  }
  for (PyTypeObject* base :
       {&PyLong_Type, &PyFloat_Type, &PyComplex_Type, &PyUnicode_Type, &PyBytes_Type,
        &PyByteArray_Type, &PyTuple_Type, &PyList_Type, &PyDict_Type}) {
    if (PyType_IsSubtype(type, base)) {
      refuse(where, what, ", a subclass of ", base->tp_name, "; store a plain ", base->tp_name,
             remedy);
    }
  }
  refuse(where, what, "; tensors, arrays, numbers, strings, images, and tuples, lists, dicts and ",
         "dataclasses of these are stored: convert it", remedy);
}

}  // namespace stocache::codec
