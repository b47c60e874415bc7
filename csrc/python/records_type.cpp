#include "python/records_type.h"

#include <torch/csrc/autograd/python_variable.h>

#include "python/acquiring_type.h"
#include "python/records.h"
#include "python/shared_batches.h"
#include "python/support.h"

namespace stocache::python {
namespace {

struct PyRecords {
  PyObject_HEAD std::shared_ptr<RecordCache> cache;
};

PyObject* miss = nullptr;

// The reference keeps it open for the call, also if another thread closes it meanwhile.
std::shared_ptr<RecordCache> opened(PyObject* self) {
  const auto& cache = reinterpret_cast<PyRecords*>(self)->cache;
  TORCH_CHECK(cache, "this CachedDataset is closed; construct a new one");
  return cache;
}

PyObject* sample_or_miss(PyObject* sample) { return sample ? sample : Py_NewRef(miss); }

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

// _open(limit_bytes, dataset_len, policy, name, backing, keep, fingerprint, huge_pages, instance,
// pid, fd): CachedDataset has checked the types.
PyObject* open_records(PyObject* self, PyObject* args) {
  unsigned long long limit = 0;
  long long dataset_len = 0;
  const char *policy = nullptr, *name = nullptr, *backing = nullptr, *fingerprint = nullptr,
             *huge_pages = nullptr, *instance = nullptr;
  int keep = 0, fd = -1;
  unsigned int pid = 0;
  if (!PyArg_ParseTuple(args, "KLssspsssIi", &limit, &dataset_len, &policy, &name, &backing, &keep,
                        &fingerprint, &huge_pages, &instance, &pid, &fd)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    bridge::RecordOptions options;
    options.limit_bytes = limit;
    options.dataset_len = dataset_len;
    options.policy = policy;
    options.name = name;
    options.backing = backing;
    options.keep = keep;
    options.fingerprint = fingerprint;
    options.huge_pages = huge_pages;
    options.instance = instance;
    options.pid = pid;
    options.fd = fd;
    reinterpret_cast<PyRecords*>(self)->cache = std::make_shared<RecordCache>(options);
    Py_RETURN_NONE;
  });
}

PyObject* arguments(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const auto o = translated([&] { return cache->records().options(); });
    return Py_BuildValue("KLsssNsssIi", o.limit_bytes, static_cast<long long>(o.dataset_len),
                         std::string(o.policy).c_str(), std::string(o.name).c_str(),
                         std::string(o.backing).c_str(), PyBool_FromLong(o.keep),
                         std::string(o.fingerprint).c_str(), std::string(o.huge_pages).c_str(),
                         std::string(o.instance).c_str(), o.pid, o.fd);
  });
}

PyObject* location(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const auto p = translated([&] { return cache->records().location(); });
    return Py_BuildValue("{s:s,s:s,s:s,s:s}", "name", std::string(p.name).c_str(), "path",
                         std::string(p.path).c_str(), "backing", std::string(p.backing).c_str(),
                         "opened", std::string(p.opened).c_str());
  });
}

// get(i, allow_pickle, counted=True): the sample or MISS.
PyObject* get(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  int64_t index = 0;
  if (nargs < 2 || nargs > 3 || !to_index(args[0], index)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "get(i, allow_pickle, counted=True)");
    return nullptr;
  }
  const bool counted = nargs == 2 || args[2] == Py_True;
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    PyObject* sample = cache->get(index, args[1] == Py_True);
    if (sample && counted) cache->records().note(1, 0);
    return sample_or_miss(sample);
  });
}

// What pack() made, as far as it is plausible.
bool to_records(PyObject* packed, Loaded& loaded) {
  PyObject *tensor = nullptr, *rows = nullptr;
  if (!PyArg_ParseTuple(packed, "OO!", &tensor, &PyList_Type, &rows)) return false;
  if (!THPVariable_Check(tensor)) {
    PyErr_SetString(PyExc_TypeError, "packed records are a tensor");
    return false;
  }
  const at::Tensor& memory = loaded.packed.emplace_back(THPVariable_Unpack(tensor));
  if (!memory.is_contiguous() || !memory.device().is_cpu()) {
    PyErr_SetString(PyExc_ValueError, "packed records are contiguous, in memory");
    return false;
  }
  const auto* data = static_cast<const uint8_t*>(memory.const_data_ptr());
  const uint64_t size = memory.nbytes();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rows); ++i) {
    long long row = 0;
    unsigned short schema = 0;
    unsigned long long at = 0, bytes = 0;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(rows, i), "LHKK", &row, &schema, &at, &bytes)) {
      return false;
    }
    if (at > size || bytes > size - at) {
      PyErr_SetString(PyExc_ValueError, "packed records do not fit their memory");
      return false;
    }
    loaded.records[row] = {schema, data + at, bytes};
  }
  return true;
}

// collate(indices, threads, shared, counted, samples, packed): the batch, or MISS if it must be
// made otherwise. What is not in memory may be among the samples, a dict by row, or in the list of
// what was packed.
PyObject* collate(PyObject* self, PyObject* args) {
  PyObject *object = nullptr, *samples = Py_None, *packed = Py_None;
  long long threads = 1;
  unsigned long long counted = 0;
  int shared = 0;
  std::vector<int64_t> indices;
  Loaded loaded;
  if (!PyArg_ParseTuple(args, "OLpK|OO", &object, &threads, &shared, &counted, &samples, &packed) ||
      !to_indices(object, indices)) {
    return nullptr;
  }
  if (PyDict_Check(samples)) loaded.samples = samples;
  if (packed != Py_None && !PyList_Check(packed)) {
    PyErr_SetString(PyExc_TypeError, "packed records come in a list");
    return nullptr;
  }
  for (Py_ssize_t i = 0; packed != Py_None && i < PyList_GET_SIZE(packed); ++i) {
    if (!to_records(PyList_GET_ITEM(packed, i), loaded)) return nullptr;
  }
  return guarded([&] {
    return sample_or_miss(opened(self)->collate(indices, threads, shared, counted, loaded));
  });
}

// pack(samples): for another process that collates; MISS if it must get the samples otherwise.
PyObject* pack(PyObject* self, PyObject* samples) {
  if (!PyDict_Check(samples)) {
    PyErr_SetString(PyExc_TypeError, "samples to pack are a dict, by row");
    return nullptr;
  }
  return guarded([&] { return sample_or_miss(opened(self)->pack(samples)); });
}

// missing(indices): which of them are not there, by their place in the list.
PyObject* missing(PyObject* self, PyObject* argument) {
  std::vector<int64_t> indices;
  if (!to_indices(argument, indices)) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    PyObject* list = PyList_New(0);
    for (size_t i = 0; list && i < indices.size(); ++i) {
      if (cache->records().find(indices[i]).data) continue;
      PyObject* place = PyLong_FromSize_t(i);
      const bool added = place && PyList_Append(list, place) == 0;
      Py_XDECREF(place);
      if (!added) Py_CLEAR(list);
    }
    return list;
  });
}

PyObject* note(PyObject* self, PyObject* args) {
  unsigned long long hits = 0, misses = 0;
  if (!PyArg_ParseTuple(args, "KK", &hits, &misses)) return nullptr;
  return guarded([&]() -> PyObject* {
    opened(self)->records().note(hits, misses);
    Py_RETURN_NONE;
  });
}

// acquire(indices, patience): who loads these samples. Another process that loads one is waited
// for, so many seconds at the least.
PyObject* acquire(PyObject* self, PyObject* args) {
  PyObject* object = nullptr;
  double patience = 0;
  std::vector<int64_t> indices;
  if (!PyArg_ParseTuple(args, "Od", &object, &patience) || !to_indices(object, indices)) {
    return nullptr;
  }
  return guarded([&] { return make_acquiring(opened(self), indices, patience); });
}

PyObject* contains(PyObject* self, PyObject* argument) {
  int64_t index = 0;
  if (!to_index(argument, index)) return nullptr;
  return guarded(
      [&] { return PyBool_FromLong(opened(self)->records().find(index).data != nullptr); });
}

PyObject* differs(PyObject* self, PyObject* args) {
  long long index = 0;
  PyObject* sample = nullptr;
  int allow_pickle = 0;
  if (!PyArg_ParseTuple(args, "LOp", &index, &sample, &allow_pickle)) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto answer = opened(self)->differs(index, sample, allow_pickle);
    if (!answer) Py_RETURN_NONE;
    return PyBool_FromLong(*answer);
  });
}

PyObject* note_loads(PyObject* self, PyObject* args) {
  long long loads = 0;
  double seconds = 0;
  if (!PyArg_ParseTuple(args, "Ld", &loads, &seconds)) return nullptr;
  return guarded([&]() -> PyObject* {
    opened(self)->records().note_loads(static_cast<uint64_t>(loads),
                                       static_cast<uint64_t>(seconds * 1e9));
    Py_RETURN_NONE;
  });
}

PyObject* note_unsupported(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    opened(self)->records().note_unsupported(1);
    Py_RETURN_NONE;
  });
}

// is_first_to_tell(what): once per node, for each of the numbers 0 to 31.
PyObject* is_first_to_tell(PyObject* self, PyObject* argument) {
  int64_t what = 0;
  if (!to_index(argument, what)) return nullptr;
  return guarded([&] {
    return PyBool_FromLong(opened(self)->records().is_first_to_tell(static_cast<uint32_t>(what)));
  });
}

PyObject* stats(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const auto s = translated([&] { return cache->records().stats(); });
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:d,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:N}",
                         "hits", s.hits, "misses", s.misses, "fills", s.fills, "bytes", s.bytes,
                         "waits", s.waits, "lost", s.lost, "dropped", s.dropped, "loads", s.loads,
                         "load_seconds", static_cast<double>(s.load_nanos) * 1e-9, "too_large",
                         s.too_large, "evicted", s.evicted, "unsupported", s.unsupported, "filled",
                         s.filled, "used_bytes", s.used_bytes, "data_bytes", s.data_bytes,
                         "dataset_len", s.dataset_len, "frozen", PyBool_FromLong(s.frozen));
  });
}

PyObject* clear(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    translated([&] {
      WithoutGil free;
      cache->records().clear();
    });
    Py_RETURN_NONE;
  });
}

PyObject* close_records(PyObject* self, PyObject*) {
  reinterpret_cast<PyRecords*>(self)->cache.reset();
  Py_RETURN_NONE;
}

PyObject* is_open(PyObject* self, PyObject*) {
  return PyBool_FromLong(reinterpret_cast<PyRecords*>(self)->cache != nullptr);
}

PyMethodDef methods[] = {
    {"open", open_records, METH_VARARGS, nullptr},
    {"arguments", arguments, METH_NOARGS, nullptr},
    {"location", location, METH_NOARGS, nullptr},
    {"get", as_method(get), METH_FASTCALL, nullptr},
    {"collate", collate, METH_VARARGS, nullptr},
    {"pack", pack, METH_O, nullptr},
    {"missing", missing, METH_O, nullptr},
    {"note", note, METH_VARARGS, nullptr},
    {"acquire", acquire, METH_VARARGS, nullptr},
    {"contains", contains, METH_O, nullptr},
    {"differs", differs, METH_VARARGS, nullptr},
    {"note_loads", note_loads, METH_VARARGS, nullptr},
    {"note_unsupported", note_unsupported, METH_NOARGS, nullptr},
    {"is_first_to_tell", is_first_to_tell, METH_O, nullptr},
    {"stats", stats, METH_NOARGS, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {"close", close_records, METH_NOARGS, nullptr},
    {"is_open", is_open, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyObject* records_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<PyRecords*>(type->tp_alloc(type, 0));
  if (self) new (&self->cache) std::shared_ptr<RecordCache>();
  return reinterpret_cast<PyObject*>(self);
}

void records_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<PyRecords*>(self)->cache.~shared_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(records_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(records_dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("The native half of stocache.CachedDataset.")},
    {0, nullptr},
};

PyType_Spec spec = {"stocache._C.Records", sizeof(PyRecords), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

}  // namespace

bool add_records(PyObject* module) {
  miss = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
  PyObject* type = PyType_FromSpec(&spec);
  return miss && type && add_acquiring(module) &&
         PyModule_AddObject(module, "Records", type) == 0 &&
         PyModule_AddObject(module, "MISS", Py_NewRef(miss)) == 0 &&
         PyModule_AddFunctions(module, batch_methods) == 0;
}

}  // namespace stocache::python
