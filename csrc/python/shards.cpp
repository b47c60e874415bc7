#include "python/shards.h"

#include <ATen/ops/empty.h>

#include <array>
#include <vector>

#include "codec/objects.h"
#include "python/indices.h"
#include "python/support.h"
#include "stocache-torch/src/bridge.rs.h"

namespace stocache::python {
namespace {

// deal_out(samples, chunk, [(weight, capacity), ...], agreed): [(start, length), ...]
PyObject* deal_out(PyObject*, PyObject* args) {
  unsigned long long samples = 0, chunk = 0;
  PyObject* list = nullptr;
  int agreed = 0;
  if (!PyArg_ParseTuple(args, "KKO!p", &samples, &chunk, &PyList_Type, &list, &agreed)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    std::vector<bridge::Holder> holders;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
      unsigned long long weight = 0, capacity = 0;
      const auto item = codec::Ref::to(PyList_GET_ITEM(list, i));
      TORCH_CHECK_TYPE(PyTuple_Check(item.get()), "a holder is a tuple");
      if (!PyArg_ParseTuple(item.get(), "KK", &weight, &capacity)) return nullptr;
      holders.push_back({weight, capacity});
    }
    const auto parts = translated([&] {
      return bridge::deal_out(samples, chunk, {holders.data(), holders.size()}, agreed != 0);
    });
    auto found = codec::checked(PyList_New(static_cast<Py_ssize_t>(parts.size())));
    for (size_t i = 0; i < parts.size(); ++i) {
      auto part = codec::checked(Py_BuildValue("(KK)", parts[i].start, parts[i].len));
      PyList_SET_ITEM(found.get(), static_cast<Py_ssize_t>(i), part.release());
    }
    return found.release();
  });
}

// A negative number is a very large one there, and none of anything.
rust::Slice<uint64_t> slice(int64_t* numbers, size_t count) {
  return {reinterpret_cast<uint64_t*>(numbers), count};
}

// Puts others in the place of numbers: an int for an int, a tensor for a tensor or a sequence.
template <typename Change>
PyObject* changed(PyObject* numbers, Change change) {
  return guarded([&]() -> PyObject* {
    if (PyLong_CheckExact(numbers)) {
      int64_t number = value_of(numbers);
      translated([&] { change(slice(&number, 1)); });
      return PyLong_FromLongLong(number);
    }
    std::vector<int64_t> found;
    if (!to_indices(numbers, found)) return nullptr;
    at::Tensor tensor = at::empty({static_cast<int64_t>(found.size())}, at::kLong);
    if (!found.empty()) {
      translated([&] { change(slice(found.data(), found.size())); });
      std::copy(found.begin(), found.end(), tensor.mutable_data_ptr<int64_t>());
    }
    return to_python(tensor);
  });
}

// permuted(numbers, length, seed, purpose, part): what has these positions in the order of that key
PyObject* permuted(PyObject*, PyObject* args) {
  PyObject* numbers = nullptr;
  unsigned long long length = 0, seed = 0, purpose = 0, part = 0;
  if (!PyArg_ParseTuple(args, "OKKKK", &numbers, &length, &seed, &purpose, &part)) return nullptr;
  const std::array<uint64_t, 3> key{seed, purpose, part};
  return changed(numbers, [&](auto given) { bridge::permute(given, length, key); });
}

// visited(numbers, visits): the positions of these visits of a rank
PyObject* visited(PyObject*, PyObject* args) {
  PyObject *numbers = nullptr, *of = nullptr;
  bridge::Visits visits;
  if (!PyArg_ParseTuple(args, "OO", &numbers, &of) || !to_visits(of, visits)) return nullptr;
  return changed(numbers, [&](auto given) { bridge::visit(given, visits); });
}

// count_for(rank): this process, and those it forks, count for that rank of the node.
PyObject* count_for(PyObject*, PyObject* argument) {
  const unsigned long rank = PyLong_AsUnsignedLong(argument);
  if (PyErr_Occurred()) return nullptr;
  bridge::count_for(static_cast<uint32_t>(rank));
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"count_for", count_for, METH_O, nullptr},
    {"deal_out", deal_out, METH_VARARGS, nullptr},
    {"permuted", permuted, METH_VARARGS, nullptr},
    {"visited", visited, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool to_visits(PyObject* object, bridge::Visits& visits) {
  unsigned long long count = 0, step = 0, offset = 0, first = 0, held = 0, seed = 0, purpose = 0,
                     part = 0;
  int shuffle = 0;
  if (!PyTuple_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "visits are a tuple");
    return false;
  }
  if (!PyArg_ParseTuple(object, "KKKKKKKKp", &count, &step, &offset, &first, &held, &seed, &purpose,
                        &part, &shuffle)) {
    return false;
  }
  visits = {count,       step, offset, first, held, std::array<uint64_t, 3>{seed, purpose, part},
            shuffle != 0};
  return true;
}

void put_positions(std::vector<int64_t>& numbers, const bridge::Visits& visits) {
  translated([&] { bridge::visit(slice(numbers.data(), numbers.size()), visits); });
}

bool add_shards(PyObject* module) { return PyModule_AddFunctions(module, functions) == 0; }

}  // namespace stocache::python
