// Numbers of samples, in whatever Python has them.
#pragma once

#include <Python.h>
// Python.h stays first.
#include <cstdint>
#include <vector>

namespace stocache::python {

// Of a list, tuple, tensor or any other sequence; false with a Python error if one is no number.
bool to_indices(PyObject* object, std::vector<int64_t>& indices);

}  // namespace stocache::python
