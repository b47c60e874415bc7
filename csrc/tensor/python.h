// Tensors as Python has them: all that is taken of libtorch_python. Its headers take longer to
// compile than what most files are about, so one file has them. Everything here needs the GIL.
#pragma once

#include <Python.h>
// Python.h stays first.
#include <ATen/core/Tensor.h>

#include <exception>
#include <type_traits>

namespace stocache {

// Python's error is pending, and says what is wrong.
class PythonError : public std::exception {};

// In a handler: whether what was thrown is an error of Python's, by us or by torch. It is then
// pending.
bool is_python_error();

// torch.Tensor, or a subclass of it.
bool is_tensor(PyObject* object);
// torch.Tensor itself.
bool is_plain_tensor(PyObject* object);
// What such an object is; there for as long as the object.
const at::Tensor& tensor_in(PyObject* object);
// A new reference.
PyObject* to_python(at::Tensor tensor);
// As an object of a subclass.
PyObject* to_python(const at::Tensor& tensor, PyTypeObject* type);
PyTypeObject* tensor_type();

// torch.dtype
PyTypeObject* dtype_type();
at::ScalarType dtype_in(PyObject* object);
// Borrowed: it is there for ever.
PyObject* dtype_object(at::ScalarType dtype);

// torch.Size
PyTypeObject* size_type();

// Calls it; what it throws becomes the Python exception of the same meaning.
PyObject* call_guarded(PyObject* (*act)(void*), void* context);

template <typename Act>
PyObject* guarded(Act&& act) {
  using Plain = std::remove_reference_t<Act>;
  return call_guarded([](void* context) -> PyObject* { return (*static_cast<Plain*>(context))(); },
                      &act);
}

}  // namespace stocache
