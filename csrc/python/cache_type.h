// stocache._C.Cache, the native half of SharedCache.
#pragma once

#include <Python.h>

namespace stocache::python {

// Adds the type to the module. False with a Python error if that failed.
bool add_cache(PyObject* module);

}  // namespace stocache::python
