#include "tensor/python.h"

#include <stocache/errors.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "api/errors.h"

namespace stocache {
namespace {

// torch makes objects of a subclass itself, from 2.11 on.
template <typename Tensor>
concept Wrapped =
    requires(const Tensor& tensor, PyTypeObject* type) { THPVariable_Wrap(tensor, type); };

template <typename Tensor>
PyObject* wrapped_as(const Tensor& tensor, PyTypeObject* type) {
  if constexpr (Wrapped<Tensor>) {
    return THPVariable_Wrap(tensor, type);
  } else {
    PyObject* plain = THPVariable_Wrap(tensor);
    if (!plain) return nullptr;
    PyObject* made = PyObject_CallMethod(plain, "as_subclass", "O", type);
    Py_DECREF(plain);
    return made;
  }
}

}  // namespace

bool is_python_error() {
  try {
    throw;
  } catch (const PythonError&) {
    return true;
  } catch (python_error& error) {
    error.restore();
    return true;
  } catch (...) {
    return false;
  }
}

bool is_tensor(PyObject* object) { return THPVariable_Check(object); }

bool is_plain_tensor(PyObject* object) { return THPVariable_CheckExact(object); }

const at::Tensor& tensor_in(PyObject* object) { return THPVariable_Unpack(object); }

PyObject* to_python(at::Tensor tensor) { return THPVariable_Wrap(std::move(tensor)); }

PyObject* to_python(const at::Tensor& tensor, PyTypeObject* type) {
  return wrapped_as(tensor, type);
}

PyTypeObject* tensor_type() { return reinterpret_cast<PyTypeObject*>(THPVariableClass); }

PyTypeObject* dtype_type() { return &THPDtypeType; }

at::ScalarType dtype_in(PyObject* object) {
  return reinterpret_cast<THPDtype*>(object)->scalar_type;
}

PyObject* dtype_object(at::ScalarType dtype) {
  return reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype));
}

PyTypeObject* size_type() { return &THPSizeType; }

PyObject* call_guarded(PyObject* (*act)(void*), void* context) {
  HANDLE_TH_ERRORS
  try {
    return act(context);
  } catch (const PythonError&) {
  } catch (const SpaceError& error) {
    PyErr_SetString(PyExc_MemoryError, error.what_without_backtrace());
  } catch (const Interrupted&) {
    if (!PyErr_Occurred()) PyErr_SetNone(PyExc_KeyboardInterrupt);
  } catch (const SystemError& error) {
    PyErr_SetString(PyExc_OSError, error.what_without_backtrace());
  }
  // Not returned from here: torch, which tells its warnings then, has to know that there is an
  // error.
  throw python_error();
  END_HANDLE_TH_ERRORS
}

}  // namespace stocache
