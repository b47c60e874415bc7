#include "python/indices.h"

#include "codec/objects.h"
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
  if (!is_plain_tensor(object)) return false;
  const at::Tensor& tensor = tensor_in(object);
  if (tensor.scalar_type() != at::kLong || tensor.dim() != 1 || !tensor.is_cpu() ||
      !tensor.is_contiguous() || tensor.is_neg() || tensor._is_zerotensor() ||
      !tensor.has_storage()) {
    return false;
  }
  // Its memory may have been given back.
  const auto last = static_cast<size_t>(tensor.storage_offset() + tensor.numel());
  if (tensor.storage().nbytes() < last * sizeof(int64_t)) return false;
  const auto* numbers = tensor.const_data_ptr<int64_t>();
  indices.assign(numbers, numbers + tensor.numel());
  return true;
}

}  // namespace

bool to_indices(PyObject* object, std::vector<int64_t>& indices) {
  PyObject* done = guarded([&]() -> PyObject* {
    if (are_plain(object, indices) || are_numbers(object, indices)) return Py_None;
    const auto items = codec::checked(PySequence_Tuple(object));
    indices.resize(static_cast<size_t>(PyTuple_GET_SIZE(items.get())));
    for (size_t i = 0; i < indices.size(); ++i) {
      PyObject* item = PyTuple_GET_ITEM(items.get(), static_cast<Py_ssize_t>(i));
      if (!to_index(item, indices[i])) return nullptr;
    }
    return Py_None;
  });
  return done != nullptr;
}

}  // namespace stocache::python
