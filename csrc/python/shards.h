// Which part of a dataset who keeps, as functions of the module.
#pragma once

#include <Python.h>

namespace stocache::python {

bool add_shards(PyObject* module);

}  // namespace stocache::python
