#include "python/gathering_type.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "python/indices.h"
#include "python/pipeline_type.h"
#include "python/support.h"

namespace stocache::python {
namespace {

struct PyGathering {
  PyObject_HEAD std::unique_ptr<Gathering> batch;
  bool busy;  // without the GIL, in another thread
};

PyTypeObject* type = nullptr;
PyObject* miss = nullptr;

PyGathering* gathering(PyObject* self) { return reinterpret_cast<PyGathering*>(self); }

InUse<PyGathering> use(PyObject* self) { return {gathering(self), "this batch is being gathered"}; }

// What pack() made, as far as it is plausible.
bool to_records(PyObject* packed, Loaded& loaded) {
  PyObject *tensor = nullptr, *schemas = nullptr, *rows = nullptr;
  TORCH_CHECK_TYPE(PyTuple_Check(packed), "packed records are a tuple");
  if (!PyArg_ParseTuple(packed, "OO!O!", &tensor, &PyList_Type, &schemas, &PyList_Type, &rows)) {
    return false;
  }
  if (!is_tensor(tensor)) {
    PyErr_SetString(PyExc_TypeError, "packed records are a tensor");
    return false;
  }
  const at::Tensor& memory = tensor_in(tensor);
  TORCH_CHECK_VALUE(memory.is_contiguous() && memory.device().is_cpu() && memory.has_storage(),
                    "packed records are contiguous, in memory");
  const uint64_t size = memory.nbytes();
  const auto* data = static_cast<const uint8_t*>(memory.unsafeGetTensorImpl()->data());
  loaded.memory.push_back({memory.storage(), data, size});
  TORCH_CHECK_VALUE(loaded.memory.back().is_there(), "packed records do not fit their memory");
  std::vector<std::string_view> texts;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(schemas); ++i) {
    const auto& schema = loaded.schemas.emplace_back(codec::Ref::to(PyList_GET_ITEM(schemas, i)));
    char* data = nullptr;
    Py_ssize_t size = 0;
    if (PyBytes_AsStringAndSize(schema.get(), &data, &size) != 0) return false;
    texts.emplace_back(data, static_cast<size_t>(size));
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rows); ++i) {
    long long row = 0;
    Py_ssize_t schema = 0;
    unsigned long long at = 0, bytes = 0;
    // Held: numbers may have code, which may change the list.
    const auto item = codec::Ref::to(PyList_GET_ITEM(rows, i));
    TORCH_CHECK_TYPE(PyTuple_Check(item.get()), "a packed record is a tuple");
    if (!PyArg_ParseTuple(item.get(), "LnKK", &row, &schema, &at, &bytes)) return false;
    if (at > size || bytes > size - at || schema < 0 ||
        static_cast<size_t>(schema) >= texts.size()) {
      PyErr_SetString(PyExc_ValueError, "packed records do not fit their memory");
      return false;
    }
    loaded.records[row] = {texts[static_cast<size_t>(schema)], data + at, bytes};
  }
  return true;
}

// A new list of these numbers.
template <typename Numbers>
PyObject* to_list(const Numbers& numbers) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(numbers.size()));
  for (size_t i = 0; list && i < numbers.size(); ++i) {
    PyObject* number = PyLong_FromLongLong(static_cast<long long>(numbers[i]));
    if (!number) {
      Py_CLEAR(list);
      break;
    }
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), number);
  }
  return list;
}

// missing(): the rows that are in no store; None if these samples are not gathered at all.
PyObject* missing(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto mine = use(self);
    if (!mine->batch->is_possible()) Py_RETURN_NONE;
    return to_list(mine->batch->absent());
  });
}

// finish(counted, samples=None, packed=None): the batch, or MISS if it must be made otherwise. What
// is in no store may be among the samples, a dict by row, or in the list of what was packed.
PyObject* finish(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  Loaded loaded;
  std::vector<int64_t> counts;
  int64_t count = 0;
  if (nargs < 1 || nargs > 3) {
    PyErr_SetString(PyExc_TypeError, "finish(counted, samples=None, packed=None)");
    return nullptr;
  }
  if (!PyLong_CheckExact(args[0])) {
    if (!to_indices(args[0], counts)) return nullptr;
  } else if (to_index(args[0], count)) {
    counts = {count};
  }
  std::vector<uint64_t> counted;
  for (const int64_t of : counts)
    counted.push_back(static_cast<uint64_t>(std::max<int64_t>(0, of)));
  if (nargs > 1 && PyDict_Check(args[1])) loaded.samples = args[1];
  PyObject* packed = nargs > 2 && args[2] != Py_None ? args[2] : nullptr;
  if (packed && !PyList_Check(packed)) {
    PyErr_SetString(PyExc_TypeError, "packed records come in a list");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    std::vector<codec::Ref> held;
    for (Py_ssize_t i = 0; packed && i < PyList_GET_SIZE(packed); ++i) {
      held.push_back(codec::Ref::to(PyList_GET_ITEM(packed, i)));
      if (!to_records(held.back().get(), loaded)) return nullptr;
    }
    const auto mine = use(self);
    return or_miss(mine->batch->finish(loaded, counted));
  });
}

PyObject* is_current(PyObject* self, PyObject*) {
  return guarded([&] { return PyBool_FromLong(use(self)->batch->is_current()); });
}

PyMethodDef methods[] = {
    {"missing", missing, METH_NOARGS, nullptr},
    {"finish", as_method(finish), METH_FASTCALL, nullptr},
    {"is_current", is_current, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

void dealloc(PyObject* self) {
  PyTypeObject* of = Py_TYPE(self);
  std::destroy_at(&gathering(self)->batch);
  of->tp_free(self);
  Py_DECREF(of);
}

PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("A batch in the making; see Records.gather().")},
    {0, nullptr},
};

PyType_Spec spec = {"stocache._C.Gathering", sizeof(PyGathering), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

}  // namespace

PyObject* or_miss(PyObject* object) { return object ? object : Py_NewRef(miss); }

PyObject* make_gathering(Gathering::Caches caches, std::vector<uint32_t> which,
                         const std::vector<int64_t>& indices, int64_t threads, bool shared,
                         Fused fused) {
  auto batch = std::make_unique<Gathering>(std::move(caches), std::move(which), indices,
                                           static_cast<size_t>(std::max<int64_t>(1, threads)),
                                           shared, std::move(fused));
  auto* self = reinterpret_cast<PyGathering*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  new (&self->batch) std::unique_ptr<Gathering>(std::move(batch));
  self->busy = false;
  return reinterpret_cast<PyObject*>(self);
}

PyObject* receive(PyObject* batch, bridge::Acquiring& acquiring) {
  TORCH_CHECK_TYPE(PyObject_TypeCheck(batch, type), "what takes acquired samples is a Gathering");
  return to_list(use(batch)->batch->receive(acquiring));
}

bool to_fused(PyObject* object, Fused& fused) {
  if (object == Py_None) return true;
  PyObject *pipeline = nullptr, *numbers = nullptr;
  unsigned long long seed = 0, epoch = 0;
  TORCH_CHECK_TYPE(PyTuple_Check(object), "what is fused is a tuple of a pipeline and its numbers");
  if (!PyArg_ParseTuple(object, "OKKO", &pipeline, &seed, &epoch, &numbers) ||
      (numbers != Py_None && !to_indices(numbers, fused.numbers))) {
    return false;
  }
  fused.pipeline = pipeline_of(pipeline);
  fused.seed = seed;
  fused.epoch = epoch;
  TORCH_CHECK_TYPE(fused.pipeline, "what is fused needs a Pipeline");
  return true;
}

bool add_gathering(PyObject* module) {
  miss = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
  type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return miss && type && PyModule_AddObjectRef(module, "MISS", miss) == 0 &&
         PyModule_AddObjectRef(module, "Gathering", reinterpret_cast<PyObject*>(type)) == 0;
}

}  // namespace stocache::python
