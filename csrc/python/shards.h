// Which part of a dataset who keeps, as functions of the module.
#pragma once

#include <Python.h>
// Python.h stays first.
#include <cstdint>
#include <vector>

#include "stocache-torch/src/bridge.rs.h"

namespace stocache::python {

// What a rank visits in one epoch: (count, step, offset, first, held, seed, purpose, part,
// shuffle); false with a Python error if it is something else.
bool to_visits(PyObject* object, bridge::Visits& visits);

// Puts the positions of these visits in their place.
void put_positions(std::vector<int64_t>& numbers, const bridge::Visits& visits);

bool add_shards(PyObject* module);

}  // namespace stocache::python
