// What the Python types of this extension share.
#pragma once

#include "tensor/python.h"
// Python.h stays first.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "api/errors.h"

namespace stocache::python {

// Releases the GIL for its lifetime, if that is worth it.
class WithoutGil {
 public:
  explicit WithoutGil(bool really = true) {
    if (really) here = state_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state_) take_back();
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

  // Handles signals, if this thread gave up the GIL and is the one that does. True if a handler
  // raised, as that of Ctrl-C does: then the error is pending, and the call is to end.
  static bool is_interrupted() {
    PyThreadState* const state = here;
    if (!state) return false;
    here = nullptr;  // while a handler runs
    take(state);
    const bool raised = PyErr_Occurred() || PyErr_CheckSignals() != 0;
    here = PyEval_SaveThread();
    return raised;
  }

 private:
  void take_back() {
    here = nullptr;
    take(state_);
  }

  // While the interpreter ends, no other thread gets the GIL any more. Up to Python 3.13 who asks
  // for it is ended by pthread_exit, which unwinds the stack: through functions that let nothing
  // through, C++'s destructors and Rust's, which ends the process with a message and without its
  // exit handlers. So the thread stays here instead, as from Python 3.14 on, until the process has
  // ended.
  static void take(PyThreadState* state) noexcept {
    try {
      PyEval_RestoreThread(state);
    } catch (...) {
      while (true) pause();
    }
  }

  PyThreadState* state_ = nullptr;
  // That of this thread, while it has given up the GIL here.
  static inline thread_local PyThreadState* here = nullptr;
};

// The use of an object by one thread at a time, while this lives: calls give up the GIL.
template <typename Object>
class InUse {
 public:
  InUse(Object* object, const char* what) : object_(object) {
    TORCH_CHECK(!object->busy, what, " by another thread");
    object->busy = true;
  }
  ~InUse() { object_->busy = false; }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;

  Object* operator->() const { return object_; }

 private:
  Object* object_;
};

// The value of an int. What does not fit is outside any dataset.
inline int64_t value_of(PyObject* number) {
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(number, &overflow);
  return overflow == 0 ? value : overflow < 0 ? INT64_MIN : INT64_MAX;
}

// Nanoseconds of a time in seconds, as far as it makes sense.
inline uint64_t to_nanoseconds(double seconds) {
  return seconds > 0 ? static_cast<uint64_t>(std::min(seconds, 1e9) * 1e9) : 0;
}

// Any integer: int, numpy integer, 0-d integer tensor.
inline bool to_index(PyObject* object, int64_t& index) {
  if (PyLong_CheckExact(object)) {
    index = value_of(object);
    return true;
  }
  PyObject* number = PyNumber_Index(object);
  if (!number) return false;
  index = value_of(number);
  Py_DECREF(number);
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
