// `_C.Acquiring`: samples that somebody wants. What it claims ends with it.
#pragma once

#include <Python.h>
// Python.h stays first.
#include <memory>
#include <vector>

#include "python/records.h"

namespace stocache::python {

// Adds the type and the enum `Put`.
bool add_acquiring(PyObject* module);

// A new one over this store, which it keeps open; it holds no claim yet.
PyObject* make_acquiring(std::shared_ptr<RecordCache> cache, const std::vector<int64_t>& indices,
                         double patience);

}  // namespace stocache::python
