// _C.Pipeline: the native half of stocache.Pipeline, steps that were fused.
#pragma once

#include <Python.h>

#include <memory>

#include "stocache-torch/src/bridge.rs.h"

namespace stocache::python {

using Pipeline = ::rust::Box<bridge::Pipeline>;

bool add_pipeline(PyObject* module);

// That of a _C.Pipeline; null, and no exception, for any other object.
std::shared_ptr<Pipeline> pipeline_of(PyObject* object);

}  // namespace stocache::python
