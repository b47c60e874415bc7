#include "python/indices.h"

#include <torch/csrc/autograd/python_variable.h>

#include "python/support.h"

namespace stocache::python {
namespace {

// The usual case: a list or tuple of nothing but ints. No code of the user's runs that could change
// it.
bool are_plain(PyObject* object, std::vector<int64_t>& indices) {
  if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object)) return false;
  PyObject** items = PySequence_Fast_ITEMS(object);
  indices.resize(static_cast<size_t>(PySequence_Fast_GET_SIZE(object)));
  for (size_t i = 0; i < indices.size(); ++i) {
    if (!PyLong_CheckExact(items[i])) return false;
    indices[i] = value_of(items[i]);
  }
  return true;
}

// What torch.randperm has drawn.
bool are_numbers(PyObject* object, std::vector<int64_t>& indices) {
  if (!THPVariable_CheckExact(object)) return false;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (tensor.scalar_type() != at::kLong || tensor.dim() != 1 || !tensor.is_cpu() ||
      !tensor.is_contiguous()) {
    return false;
  }
  const auto* numbers = tensor.const_data_ptr<int64_t>();
  indices.assign(numbers, numbers + tensor.numel());
  return true;
}

}  // namespace

bool to_indices(PyObject* object, std::vector<int64_t>& indices) {
  if (are_plain(object, indices) || are_numbers(object, indices)) return true;
  PyObject* items = PySequence_Tuple(object);
  if (!items) return false;
  indices.resize(static_cast<size_t>(PyTuple_GET_SIZE(items)));
  bool good = true;
  for (size_t i = 0; good && i < indices.size(); ++i) {
    good = to_index(PyTuple_GET_ITEM(items, static_cast<Py_ssize_t>(i)), indices[i]);
  }
  Py_DECREF(items);
  return good;
}

}  // namespace stocache::python
