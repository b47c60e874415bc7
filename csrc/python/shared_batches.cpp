#include "python/shared_batches.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/alloc_cpu.h>

#include <cstring>
#include <vector>

#include "api/errors.h"
#include "python/support.h"
#include "stocache-torch/src/bridge.rs.h"
#include "tensor/over.h"

namespace stocache {
namespace {

// Smaller ones are cheaper to copy into the message than to map.
constexpr size_t kSmallest = 16 << 10;

void drop_batch(void* data) { bridge::drop_batch(static_cast<uint8_t*>(data)); }

// Marks the small ones.
void free_small(void* data) { c10::free_cpu(data); }

}  // namespace

at::Tensor shared_batch(at::IntArrayRef sizes, caffe2::TypeMeta dtype) {
  const size_t bytes = c10::multiply_integers(sizes) * dtype.itemsize();
  if (bytes < kSmallest) {
    auto* data = static_cast<uint8_t*>(c10::alloc_cpu(std::max<size_t>(1, bytes)));
    return tensor_over(storage_over(memory_of(data, data, &free_small), bytes), sizes, dtype);
  }
  uint8_t* data = bridge::take_batch(bytes);
  if (!data) return at::empty(sizes, at::TensorOptions().dtype(dtype));
  return tensor_over(storage_over(memory_of(data, data, &drop_batch), bytes), sizes, dtype);
}

namespace python {
namespace {

PyObject* to_list(at::IntArrayRef numbers) {
  PyObject* list = PyTuple_New(static_cast<Py_ssize_t>(numbers.size()));
  for (size_t i = 0; list && i < numbers.size(); ++i) {
    PyTuple_SET_ITEM(list, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(numbers[i]));
  }
  return list;
}

bool to_vector(PyObject* tuple, std::vector<int64_t>& numbers) {
  numbers.resize(static_cast<size_t>(PyTuple_GET_SIZE(tuple)));
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (!to_index(PyTuple_GET_ITEM(tuple, static_cast<Py_ssize_t>(i)), numbers[i])) return false;
  }
  return true;
}

// Whether so many elements hold the last one of such a tensor, whatever the message says: no step
// of the sum may wrap.
bool lies_within(uint64_t elements, at::IntArrayRef sizes, at::IntArrayRef strides,
                 int64_t offset) {
  if (offset < 0 || sizes.size() != strides.size()) return false;
  int64_t last = offset, count = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    int64_t step = 0;
    if (sizes[i] < 1 || strides[i] < 0 || __builtin_mul_overflow(sizes[i] - 1, strides[i], &step) ||
        __builtin_add_overflow(last, step, &last) ||
        __builtin_mul_overflow(count, sizes[i], &count)) {
      return false;
    }
  }
  return static_cast<uint64_t>(last) < elements;
}

PyObject* batch_ticket(PyObject*, PyObject* argument) {
  if (!is_tensor(argument)) Py_RETURN_NONE;
  return guarded([&]() -> PyObject* {
    const at::Tensor& tensor = tensor_in(argument);
    if (!tensor.has_storage() || tensor.requires_grad() || tensor.is_conj() || tensor.is_neg()) {
      Py_RETURN_NONE;
    }
    PyObject* dtype = dtype_object(tensor.scalar_type());
    // Our deleter says that the memory under the storage is still ours.
    const auto deleter = tensor.storage().data_ptr().get_deleter();
    if (deleter == &free_small && tensor.is_contiguous()) {
      // Without elements torch gives no address, which would become None.
      const void* contents = tensor.numel() ? tensor.const_data_ptr() : "";
      return Py_BuildValue("y#ON", static_cast<const char*>(contents),
                           static_cast<Py_ssize_t>(tensor.nbytes()), dtype,
                           to_list(tensor.sizes()));
    }
    if (deleter != &drop_batch || tensor.numel() == 0) Py_RETURN_NONE;
    const auto ticket = bridge::send_batch(static_cast<const uint8_t*>(tensor.storage().data()));
    if (ticket.bytes == 0) Py_RETURN_NONE;
    return Py_BuildValue("IiKKKONNL", ticket.pid, ticket.fd, ticket.instance, ticket.bytes,
                         ticket.serial, dtype, to_list(tensor.sizes()), to_list(tensor.strides()),
                         static_cast<long long>(tensor.storage_offset()));
  });
}

PyObject* batch_tensor(PyObject*, PyObject* args) {
  bridge::Ticket ticket;
  unsigned long long instance = 0, bytes = 0, serial = 0;
  long long offset = 0;
  PyObject *dtype = nullptr, *sizes_object = nullptr, *strides_object = nullptr;
  std::vector<int64_t> sizes, strides;
  if (!PyArg_ParseTuple(args, "IiKKKO!O!O!L", &ticket.pid, &ticket.fd, &instance, &bytes, &serial,
                        dtype_type(), &dtype, &PyTuple_Type, &sizes_object, &PyTuple_Type,
                        &strides_object, &offset) ||
      !to_vector(sizes_object, sizes) || !to_vector(strides_object, strides)) {
    return nullptr;
  }
  ticket.instance = instance;
  ticket.bytes = bytes;
  ticket.serial = serial;
  return guarded([&] {
    const auto type = c10::scalarTypeToTypeMeta(dtype_in(dtype));
    TORCH_CHECK_VALUE(lies_within(bytes / type.itemsize(), sizes, strides, offset),
                      "the message describes a batch that does not fit its memory");
    uint8_t* data = translated([&] { return bridge::receive_batch(ticket); });
    auto storage = storage_over(memory_of(data, data, &drop_batch), bytes);
    return to_python(tensor_over(std::move(storage), sizes, type, strides, offset));
  });
}

PyObject* batch_copy(PyObject*, PyObject* args) {
  const char* contents = nullptr;
  Py_ssize_t bytes = 0;
  PyObject *dtype = nullptr, *sizes_object = nullptr;
  std::vector<int64_t> sizes;
  if (!PyArg_ParseTuple(args, "y#O!O!", &contents, &bytes, dtype_type(), &dtype, &PyTuple_Type,
                        &sizes_object) ||
      !to_vector(sizes_object, sizes)) {
    return nullptr;
  }
  return guarded([&] {
    const at::Tensor copy = at::empty(sizes, at::TensorOptions().dtype(dtype_in(dtype)));
    TORCH_CHECK_VALUE(copy.nbytes() == static_cast<size_t>(bytes),
                      "the message describes a batch that does not fit its bytes");
    if (bytes > 0) std::memcpy(copy.mutable_data_ptr(), contents, static_cast<size_t>(bytes));
    return to_python(copy);
  });
}

PyObject* batch_sweep(PyObject*, PyObject*) {
  bridge::give_back_batches();
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef batch_methods[] = {
    {"batch_ticket", batch_ticket, METH_O, nullptr},
    {"batch_tensor", batch_tensor, METH_VARARGS, nullptr},
    {"batch_copy", batch_copy, METH_VARARGS, nullptr},
    {"batch_sweep", batch_sweep, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace python
}  // namespace stocache
