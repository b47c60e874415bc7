#include "python/shards.h"

#include <torch/csrc/autograd/python_variable.h>

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

// permuted(numbers, length, seed, purpose, part): what has these positions in the order of that
// key; an int for an int, a tensor for a tensor or a sequence.
PyObject* permuted(PyObject*, PyObject* args) {
  PyObject* numbers = nullptr;
  long long length = 0;
  unsigned long long seed = 0, purpose = 0, part = 0;
  if (!PyArg_ParseTuple(args, "OLKKK", &numbers, &length, &seed, &purpose, &part)) return nullptr;
  return guarded([&]() -> PyObject* {
    const std::array<uint64_t, 3> key{seed, purpose, part};
    const auto permute = [&](int64_t* data, size_t count) {
      translated([&] { bridge::permute({data, count}, length, key); });
    };
    if (PyLong_CheckExact(numbers)) {
      int64_t number = value_of(numbers);
      permute(&number, 1);
      return PyLong_FromLongLong(number);
    }
    std::vector<int64_t> found;
    if (!to_indices(numbers, found)) return nullptr;
    at::Tensor tensor = at::empty({static_cast<int64_t>(found.size())}, at::kLong);
    std::copy(found.begin(), found.end(), tensor.mutable_data_ptr<int64_t>());
    if (!found.empty()) permute(tensor.mutable_data_ptr<int64_t>(), found.size());
    return THPVariable_Wrap(tensor);
  });
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
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_shards(PyObject* module) { return PyModule_AddFunctions(module, functions) == 0; }

}  // namespace stocache::python
