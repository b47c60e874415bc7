// `_C.Loading`: claims on samples that end with the object that holds them.
#pragma once

#include <Python.h>
// Python.h stays first.
#include <memory>

#include "python/records.h"

namespace stocache::python {

// Adds the type and the enums `Claim` and `Put`.
bool add_loading(PyObject* module);

// A new one over this store, which it keeps open; it holds no claim yet.
PyObject* make_loading(std::shared_ptr<RecordCache> cache);

}  // namespace stocache::python
