// `_C.Records`, the native half of stocache.CachedDataset.
#pragma once

#include <Python.h>

namespace stocache::python {

// Adds the type, and `MISS`, which stands for a sample that is not there.
bool add_records(PyObject* module);

}  // namespace stocache::python
