#include "shared_batches.h"

#include <ATen/Functions.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <vector>

#include "python_support.h"
#include "rust_errors.h"
#include "stocache-torch/src/bridge.rs.h"

namespace stocache {
namespace {

// Smaller ones are cheaper to send as torch does it.
constexpr size_t kSmallest = 16 << 10;

void drop_batch(void* data) { bridge::drop_batch(static_cast<uint8_t*>(data)); }

c10::Storage storage_over(uint8_t* data, size_t bytes) {
  c10::DataPtr memory(data, data, &drop_batch, c10::Device(c10::DeviceType::CPU));
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                            bytes, std::move(memory),
                                                            /*allocator=*/nullptr,
                                                            /*resizable=*/false));
}

at::Tensor tensor_over(uint8_t* data, size_t bytes, caffe2::TypeMeta dtype, at::IntArrayRef sizes,
                       at::IntArrayRef strides, int64_t offset) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      storage_over(data, bytes), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype);
  impl->set_sizes_and_strides(sizes, strides);
  impl->set_storage_offset(offset);
  return at::Tensor(std::move(impl));
}

std::vector<int64_t> contiguous_strides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(1, sizes[i]);
  }
  return strides;
}

}  // namespace

at::Tensor shared_batch(at::IntArrayRef sizes, caffe2::TypeMeta dtype) {
  const size_t bytes = c10::multiply_integers(sizes) * dtype.itemsize();
  uint8_t* data = bytes >= kSmallest ? bridge::take_batch(bytes) : nullptr;
  if (!data) return at::empty(sizes, at::TensorOptions().dtype(dtype));
  return tensor_over(data, bytes, dtype, sizes, contiguous_strides(sizes), 0);
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

PyObject* batch_ticket(PyObject*, PyObject* argument) {
  if (!THPVariable_Check(argument)) Py_RETURN_NONE;
  return guarded([&]() -> PyObject* {
    const at::Tensor& tensor = THPVariable_Unpack(argument);
    // Our deleter says that the memory under the storage is still the batch buffer.
    if (!tensor.has_storage() || tensor.storage().data_ptr().get_deleter() != &drop_batch ||
        tensor.requires_grad() || tensor.is_conj() || tensor.is_neg()) {
      Py_RETURN_NONE;
    }
    const auto ticket = bridge::send_batch(static_cast<const uint8_t*>(tensor.storage().data()));
    if (ticket.bytes == 0) Py_RETURN_NONE;
    return Py_BuildValue("IiKKKONNL", ticket.pid, ticket.fd, ticket.instance, ticket.bytes,
                         ticket.serial,
                         reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())),
                         to_list(tensor.sizes()), to_list(tensor.strides()),
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
                        &THPDtypeType, &dtype, &PyTuple_Type, &sizes_object, &PyTuple_Type,
                        &strides_object, &offset) ||
      !to_vector(sizes_object, sizes) || !to_vector(strides_object, strides)) {
    return nullptr;
  }
  ticket.instance = instance;
  ticket.bytes = bytes;
  ticket.serial = serial;
  return guarded([&] {
    const auto type = c10::scalarTypeToTypeMeta(reinterpret_cast<THPDtype*>(dtype)->scalar_type);
    // The last element must lie in the buffer, whatever the message says.
    int64_t last = offset;
    bool fits = offset >= 0 && sizes.size() == strides.size();
    for (size_t i = 0; fits && i < sizes.size(); ++i) {
      fits = sizes[i] >= 1 && strides[i] >= 0 && sizes[i] <= INT32_MAX && strides[i] <= INT64_MAX / INT32_MAX;
      last += fits ? (sizes[i] - 1) * strides[i] : 0;
    }
    fits = fits && last >= 0 && static_cast<uint64_t>(last) < bytes / type.itemsize();
    TORCH_CHECK_VALUE(fits, "the message describes a batch that does not fit its memory");
    uint8_t* data = translated([&] { return bridge::receive_batch(ticket); });
    return THPVariable_Wrap(tensor_over(data, bytes, type, sizes, strides, offset));
  });
}

}  // namespace

PyMethodDef batch_methods[] = {
    {"batch_ticket", batch_ticket, METH_O, nullptr},
    {"batch_tensor", batch_tensor, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace python
}  // namespace stocache
