// Walks a sample and writes what it finds.
#pragma once

#include "codec/record_writer.h"
// Python.h stays first.
#include <ATen/core/Tensor.h>

#include "codec/classes.h"

namespace stocache::codec {

// The attributes in an object's __dict__, if it has one.
Ref dict_of(PyObject* object);

class Encoder : public RecordWriter {
 public:
  explicit Encoder(bool allow_pickle) : allow_pickle_(allow_pickle) {}

  void object(PyObject* object, const Path& where, int depth);

 private:
  void enter(PyObject* object, const Path& where, int depth) const;
  void child(PyObject* object, Py_ssize_t index, PyObject* value, const Path& where, int depth) {
    this->object(value, Path{&where, object, index}, depth + 1);
  }
  void integer(PyObject* object, const Path& where);
  void text(Kind kind, PyObject* object, const Path& where);
  bool number_list(PyObject* list, const Path& where);
  void key(PyObject* key, const Path& where, int depth);
  void dict(PyObject* object, const Path& where, int depth);
  void pairs(PyObject* object, const Path& where, int depth);
  void ordered_dict(PyObject* object, const Path& where, int depth);
  void torch_size(PyObject* object, const Path& where);

  // Tensors, arrays and images, in encode_arrays.cpp.
  void tensor(PyObject* object, const Path& where);
  void add_tensor(const at::Tensor& tensor, const Path& where);
  // What keeps this tensor from being stored as it is; empty if `made` can be stored instead.
  std::string plain(const at::Tensor& given, const Path& where, at::Tensor& made) const;
  void array(PyObject* object, const Path& where);
  void numpy_scalar(PyObject* object, const Path& where);
  void image(PyObject* object, const Path& where, int depth);

  // Classes, and what is left to pickle, in encode_classes.cpp.
  void put_class(const Known& known, const Path& where);
  void named_tuple(PyObject* object, const Known& known, const Path& where, int depth);
  void data_class(PyObject* object, const Known& known, const Path& where, int depth);
  void enum_member(PyObject* object, const Known& known, const Path& where);
  // False, and nothing is written, if its type says that this one is not stored.
  bool parts(PyObject* object, const Known& known, const Path& where, int depth);
  void pickle(PyObject* object, const Path& where);
  // What its kind does not hold: by its parts, as a leaf for pickle, or the error that says why not
  // and what to do.
  void other(PyObject* object, const Path& where, const std::string& why = "");

  const bool allow_pickle_;
};

}  // namespace stocache::codec
