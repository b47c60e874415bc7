// `_C.Gathering`: a batch in the making.
#pragma once

#include <Python.h>
// Python.h stays first.
#include <cstdint>
#include <vector>

#include "python/gathering.h"

namespace stocache::python {

// Adds the type, and MISS: what comes in the place of a sample or a batch that is not there.
bool add_gathering(PyObject* module);

// A new reference: this one, or MISS for nullptr.
PyObject* or_miss(PyObject* object);

// A new one, which goes on by itself and keeps the stores open.
PyObject* make_gathering(Gathering::Caches caches, std::vector<uint32_t> which,
                         const std::vector<int64_t>& indices, int64_t threads, bool shared,
                         Fused fused);

// Has a batch take what is acquired: a list of the samples that it has then.
PyObject* receive(PyObject* batch, bridge::Acquiring& acquiring);

// (pipeline, seed, epoch, numbers or None) or None; false with a Python error for anything else.
bool to_fused(PyObject* object, Fused& fused);

}  // namespace stocache::python
