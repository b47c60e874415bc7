// Functions of _C for folders of disk levels, and for records that are packed.
#pragma once

#include <Python.h>

namespace stocache::python {

bool add_disk_folders(PyObject* module);

}  // namespace stocache::python
