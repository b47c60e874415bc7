// _C.Files: the native half of stocache.FileCache.
#pragma once

#include <Python.h>

namespace stocache::python {

bool add_files(PyObject* module);

}  // namespace stocache::python
