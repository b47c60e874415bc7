// What the Python types of this extension share.
#pragma once

#include <Python.h>
// Python.h stays first.
#include <stocache/errors.h>
#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <string>

namespace stocache::python {

// Releases the GIL for its lifetime, if that is worth it.
class WithoutGil {
 public:
  explicit WithoutGil(bool really = true) : state_(really ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Runs `act`; what it throws becomes the Python exception of the same meaning.
template <typename Act>
PyObject* guarded(Act&& act) {
  HANDLE_TH_ERRORS
  try {
    return act();
  } catch (const SpaceError& error) {
    PyErr_SetString(PyExc_MemoryError, error.what_without_backtrace());
    return nullptr;
  } catch (const SystemError& error) {
    PyErr_SetString(PyExc_OSError, error.what_without_backtrace());
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

// Any integer: int, numpy integer, 0-d integer tensor. What does not fit is outside any dataset.
inline bool to_index(PyObject* object, int64_t& index) {
  PyObject* number = PyLong_CheckExact(object) ? Py_NewRef(object) : PyNumber_Index(object);
  if (!number) return false;
  int overflow = 0;
  index = PyLong_AsLongLongAndOverflow(number, &overflow);
  Py_DECREF(number);
  if (overflow) index = overflow < 0 ? INT64_MIN : INT64_MAX;
  return true;
}

// All of the text, also what follows a NUL.
inline bool to_text(PyObject* object, std::string& text) {
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(object, &size);
  if (bytes) text.assign(bytes, static_cast<size_t>(size));
  return bytes != nullptr;
}

template <typename Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace stocache::python
