// The fast path under Python: a hit without the dispatcher.
//
// `_C.Cache` is the base class of `stocache.SharedCache`. Its methods take their arguments by
// vectorcall and build the tensor over shared memory directly; everything that is not hot stays
// in Python.
#include "python/cache_type.h"
// Python.h stays first.
#include <ATen/ops/empty.h>

#include <array>

#include "api/cache.h"
#include "api/stats.h"
#include "python/support.h"

namespace stocache::python {
namespace {

using bridge::Slot;

struct PyCache {
  PyObject_HEAD std::shared_ptr<Cache> cache;
  bool provisional;  // `_agree_on_name` of the subclass must run before the first use
};

// The cache of `self`; a Python error if it is closed. Whatever runs Python code may close it and
// with that destroy it: the garbage collector, an argument's __index__, another thread. So what is
// borrowed here is good until the next call into Python; it spares a hit the count of `opened`.
const std::shared_ptr<Cache>& borrowed(PyObject* self) {
  auto* object = reinterpret_cast<PyCache*>(self);
  if (object->provisional) {
    object->provisional = false;
    PyObject* none = PyObject_CallMethod(self, "_agree_on_name", nullptr);
    if (!none) throw PythonError();
    Py_DECREF(none);
  }
  TORCH_CHECK(object->cache, "this SharedCache is closed; construct a new one");
  return object->cache;
}

// The same, kept open for as long as the answer is kept.
std::shared_ptr<Cache> opened(PyObject* self) { return borrowed(self); }

// Up to N arguments by position or by one of these names; nullptr where none was given.
template <size_t N>
bool parse(const char* function, const std::array<const char*, N>& names, PyObject* const* args,
           Py_ssize_t nargs, PyObject* kwnames, std::array<PyObject*, N>& out) {
  out.fill(nullptr);
  if (nargs > static_cast<Py_ssize_t>(N)) {
    PyErr_Format(PyExc_TypeError, "%s() takes at most %zu arguments (%zd given)", function, N,
                 nargs);
    return false;
  }
  for (Py_ssize_t i = 0; i < nargs; ++i) out[i] = args[i];
  const Py_ssize_t keywords = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t k = 0; k < keywords; ++k) {
    PyObject* name = PyTuple_GET_ITEM(kwnames, k);
    size_t i = 0;
    while (i < N && PyUnicode_CompareWithASCIIString(name, names[i]) != 0) ++i;
    if (i == N || out[i]) {
      PyErr_Format(PyExc_TypeError, "%s() got an unexpected or repeated argument '%U'", function,
                   name);
      return false;
    }
    out[i] = args[nargs + k];
  }
  return true;
}

bool required(const char* function, const char* name, PyObject* value) {
  if (!value) PyErr_Format(PyExc_TypeError, "%s() needs the argument '%s'", function, name);
  return value != nullptr;
}

// IndexError with the number as it was given, also where it is too large for an int64. Runs the
// object's __index__.
PyObject* outside_dataset(int64_t dataset_len, PyObject* object) {
  PyObject* number = PyNumber_Index(object);
  if (!number) return nullptr;
  PyErr_Format(PyExc_IndexError, "Index %S out of bounds for dataset of length %lld", number,
               static_cast<long long>(dataset_len));
  Py_DECREF(number);
  return nullptr;
}

bool to_flag(PyObject* object, bool& flag) {
  if (!object) return true;  // the default stays
  const int truth = PyObject_IsTrue(object);
  flag = truth > 0;
  return truth >= 0;
}

bool check_tensor(PyObject* object, const char* what) {
  if (is_tensor(object)) return true;
  PyErr_Format(PyExc_TypeError, "%s is a %s; a torch.Tensor is needed (torch.as_tensor converts)",
               what, Py_TYPE(object)->tp_name);
  return false;
}

PyObject* get_slot(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  PyObject* index_object = nullptr;
  bool allow_beyond = true, allow_empty = true;
  if (nargs == 1 && !kwnames) {
    index_object = args[0];
  } else {
    std::array<PyObject*, 3> given;
    if (!parse<3>("get_slot", {"idx", "allow_oob_idx", "allow_empty_slot"}, args, nargs, kwnames,
                  given) ||
        !required("get_slot", "idx", given[0]) || !to_flag(given[1], allow_beyond) ||
        !to_flag(given[2], allow_empty)) {
      return nullptr;
    }
    index_object = given[0];
  }
  int64_t index = 0;
  if (!to_index(index_object, index)) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto& cache = borrowed(self);
    if (cache->is_outside(index)) {
      return outside_dataset(cache->geometry().dataset_len, index_object);
    }
    auto view = cache->get_slot(index, allow_beyond, allow_empty);
    if (!view) Py_RETURN_NONE;
    return to_python(*std::move(view));
  });
}

bool warn_frozen(const Cache& cache) {
  return PyErr_WarnEx(PyExc_RuntimeWarning, cache.frozen_reason().c_str(), 1) == 0;
}

PyObject* set_slot(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  std::array<PyObject*, 4> given;
  bool allow_beyond = true, allow_overwrite = false;
  int64_t index = 0;
  if (!parse<4>("set_slot", {"idx", "value", "allow_oob_idx", "allow_overwrite"}, args, nargs,
                kwnames, given) ||
      !required("set_slot", "idx", given[0]) || !required("set_slot", "value", given[1]) ||
      !to_flag(given[2], allow_beyond) || !to_flag(given[3], allow_overwrite) ||
      !to_index(given[0], index) || !check_tensor(given[1], "value")) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    if (cache->is_outside(index)) {
      return outside_dataset(cache->geometry().dataset_len, given[0]);
    }
    const at::Tensor value = tensor_in(given[1]);
    Slot outcome;
    {
      WithoutGil free;
      outcome = cache->set_slot(index, value, allow_beyond, allow_overwrite);
    }
    if (outcome == Slot::Froze && !warn_frozen(*cache)) return nullptr;
    Py_RETURN_NONE;
  });
}

// Indices as an int64 tensor. Lists are read here, other things by torch.as_tensor in Python.
bool to_indices(PyObject* object, at::Tensor& indices) {
  if (is_tensor(object)) {
    indices = tensor_in(object);
    return true;
  }
  // A tuple of our own: an element's __index__ may change the list it is in.
  PyObject* items = PySequence_Tuple(object);
  if (!items) return false;
  const Py_ssize_t n = PyTuple_GET_SIZE(items);
  indices = at::empty({n}, at::kLong);
  auto* to = indices.mutable_data_ptr<int64_t>();
  bool good = true;
  for (Py_ssize_t i = 0; good && i < n; ++i) {
    good = to_index(PyTuple_GET_ITEM(items, i), to[i]);
  }
  Py_DECREF(items);
  return good;
}

PyObject* get_many(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  std::array<PyObject*, 3> given;
  int64_t threads = 1;
  if (!parse<3>("get_many", {"indices", "out", "threads"}, args, nargs, kwnames, given) ||
      !required("get_many", "indices", given[0]) || (given[2] && !to_index(given[2], threads))) {
    return nullptr;
  }
  const bool has_out = given[1] && given[1] != Py_None;
  if (has_out && !check_tensor(given[1], "out")) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    at::Tensor indices;
    if (!to_indices(given[0], indices)) return nullptr;
    std::optional<at::Tensor> out;
    if (has_out) out = tensor_in(given[1]);
    std::tuple<at::Tensor, at::Tensor> result;
    {
      WithoutGil free;
      result = cache->get_many(indices, out, threads);
    }
    PyObject* found = to_python(std::move(std::get<1>(result)));
    PyObject* batch = has_out ? Py_NewRef(given[1]) : to_python(std::move(std::get<0>(result)));
    return batch && found ? Py_BuildValue("NN", batch, found) : nullptr;
  });
}

PyObject* set_many(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  std::array<PyObject*, 3> given;
  bool allow_overwrite = false;
  if (!parse<3>("set_many", {"indices", "batch", "allow_overwrite"}, args, nargs, kwnames, given) ||
      !required("set_many", "indices", given[0]) || !required("set_many", "batch", given[1]) ||
      !to_flag(given[2], allow_overwrite) || !check_tensor(given[1], "batch")) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    at::Tensor indices;
    if (!to_indices(given[0], indices)) return nullptr;
    const at::Tensor values = tensor_in(given[1]);
    std::tuple<at::Tensor, bool> result;
    {
      WithoutGil free;
      result = cache->set_many(indices, values, allow_overwrite);
    }
    if (std::get<1>(result) && !warn_frozen(*cache)) return nullptr;
    return to_python(std::move(std::get<0>(result)));
  });
}

bool to_dims(PyObject* tuple, std::vector<int64_t>& dims) {
  dims.resize(PyTuple_GET_SIZE(tuple));
  for (size_t i = 0; i < dims.size(); ++i) {
    if (!to_index(PyTuple_GET_ITEM(tuple, i), dims[i])) return false;
  }
  return true;
}

// _open(size_limit_gib, dataset_len, dims, dtype, name, backing, keep, verify, fingerprint,
//       huge_pages, instance, pid, fd): SharedCache has checked the types.
PyObject* open_cache(PyObject* self, PyObject* args) {
  double size_limit_gib = 0;
  long long dataset_len = 0;
  PyObject *dims_object = nullptr, *dtype = nullptr;
  const char *name = nullptr, *backing = nullptr, *verify = nullptr, *fingerprint = nullptr,
             *huge_pages = nullptr, *instance = nullptr;
  int keep = 0, fd = -1;
  unsigned int pid = 0;
  std::vector<int64_t> dims;
  if (!PyArg_ParseTuple(args, "dLO!O!sspssssIi", &size_limit_gib, &dataset_len, &PyTuple_Type,
                        &dims_object, dtype_type(), &dtype, &name, &backing, &keep, &verify,
                        &fingerprint, &huge_pages, &instance, &pid, &fd) ||
      !to_dims(dims_object, dims)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const auto words =
        Options(size_limit_gib).name(name).backing(backing).keep(keep).verify(verify);
    auto options = options_of(words, dataset_len, dims, dtype_in(dtype));
    options.fingerprint = fingerprint;
    options.huge_pages = huge_pages;
    options.instance = instance;
    options.pid = pid;
    options.fd = fd;
    std::shared_ptr<Cache> cache;
    {
      WithoutGil free;
      cache = Cache::open(options);
    }
    reinterpret_cast<PyCache*>(self)->cache = std::move(cache);
    Py_RETURN_NONE;
  });
}

PyObject* join(PyObject* self, PyObject* argument) {
  std::string name;
  if (!to_text(argument, name)) return nullptr;
  return guarded([&]() -> PyObject* {
    std::shared_ptr<Cache> cache;
    {
      WithoutGil free;
      cache = Cache::join(name);
    }
    reinterpret_cast<PyCache*>(self)->cache = std::move(cache);
    Py_RETURN_NONE;
  });
}

PyObject* set_provisional(PyObject* self, PyObject*) {
  reinterpret_cast<PyCache*>(self)->provisional = true;
  Py_RETURN_NONE;
}

PyObject* close_cache(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    reinterpret_cast<PyCache*>(self)->cache.reset();
    Py_RETURN_NONE;
  });
}

PyObject* to_tuple(at::IntArrayRef sizes) {
  PyObject* dims = PyTuple_New(static_cast<Py_ssize_t>(sizes.size()));
  for (size_t i = 0; dims && i < sizes.size(); ++i) {
    PyTuple_SET_ITEM(dims, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(sizes[i]));
  }
  return dims;
}

// What `_open` takes to come here again. Asked anew each time: pid and descriptor are those of this
// process, which may be a fork.
PyObject* arguments(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const auto o = cache->options();
    return Py_BuildValue("dLNOssNssssIi", o.size_limit_gib, static_cast<long long>(o.dataset_len),
                         to_tuple(cache->sizes()), dtype_object(cache->dtype()),
                         std::string(o.name).c_str(), std::string(o.backing).c_str(),
                         PyBool_FromLong(o.keep), std::string(o.verify).c_str(),
                         std::string(o.fingerprint).c_str(), std::string(o.huge_pages).c_str(),
                         std::string(o.instance).c_str(), o.pid, o.fd);
  });
}

PyObject* location(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto p = opened(self)->location();
    return Py_BuildValue("{s:s,s:s,s:s,s:s}", "name", std::string(p.name).c_str(), "path",
                         std::string(p.path).c_str(), "backing", std::string(p.backing).c_str(),
                         "opened", std::string(p.opened).c_str());
  });
}

PyObject* stats(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto now = opened(self)->stats();
    PyObject* result = PyDict_New();
    for (const auto& [name, value] : numbers(now)) {
      PyObject* number = PyLong_FromLongLong(value);
      if (!result || !number || PyDict_SetItemString(result, name, number) != 0) return nullptr;
      Py_DECREF(number);
    }
    PyDict_SetItemString(result, "frozen", now.frozen ? Py_True : Py_False);
    return result;
  });
}

PyObject* slot_in_place(PyObject* self, PyObject* argument) {
  int64_t index = 0;
  if (!to_index(argument, index)) return nullptr;
  return guarded([&] { return to_python(opened(self)->slot_in_place(index)); });
}

// A tensor made without the GIL, because reserving its memory may take a while.
template <at::Tensor (Cache::*make)() const>
PyObject* tensor(PyObject* self, PyObject*) {
  return guarded([&] {
    const auto cache = opened(self);
    at::Tensor made;
    {
      WithoutGil free;
      made = ((*cache).*make)();
    }
    return to_python(std::move(made));
  });
}

PyObject* clear(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    {
      WithoutGil free;
      cache->clear();
    }
    Py_RETURN_NONE;
  });
}

PyObject* length(PyObject* self, PyObject*) {
  return guarded([&] { return PyLong_FromLongLong(opened(self)->geometry().capacity); });
}

PyObject* is_open(PyObject* self, PyObject*) {
  return PyBool_FromLong(reinterpret_cast<PyCache*>(self)->cache != nullptr);
}

constexpr int kFast = METH_FASTCALL | METH_KEYWORDS;

PyMethodDef cache_methods[] = {
    {"get_slot", as_method(get_slot), kFast,
     "get_slot(idx, allow_oob_idx=True, allow_empty_slot=True)\n--\n\n"
     "The sample as a view of shared memory, or None if it is not cached."},
    {"set_slot", as_method(set_slot), kFast,
     "set_slot(idx, value, allow_oob_idx=True, allow_overwrite=False)\n--\n\n"
     "Stores a copy of the sample; nothing happens beyond the cache."},
    {"_get_many", as_method(get_many), kFast, nullptr},
    {"_set_many", as_method(set_many), kFast, nullptr},
    {"_open", open_cache, METH_VARARGS, nullptr},
    {"_join", join, METH_O, nullptr},
    {"_set_provisional", set_provisional, METH_NOARGS, nullptr},
    {"_close", close_cache, METH_NOARGS, nullptr},
    {"_is_open", is_open, METH_NOARGS, nullptr},
    {"_arguments", arguments, METH_NOARGS, nullptr},
    {"_location", location, METH_NOARGS, nullptr},
    {"_stats", stats, METH_NOARGS, nullptr},
    {"_slot_in_place", slot_in_place, METH_O, nullptr},
    {"_array", tensor<&Cache::array>, METH_NOARGS, nullptr},
    {"_states", tensor<&Cache::states>, METH_NOARGS, nullptr},
    {"_length", length, METH_NOARGS, nullptr},
    {"clear", clear, METH_NOARGS,
     "clear()\n--\n\nEmpties every slot and lets a frozen cache take values again."},
    {nullptr, nullptr, 0, nullptr},
};

PyObject* cache_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<PyCache*>(type->tp_alloc(type, 0));
  if (self) new (&self->cache) std::shared_ptr<Cache>();
  return reinterpret_cast<PyObject*>(self);
}

void cache_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<PyCache*>(self)->cache.~shared_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot cache_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(cache_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(cache_dealloc)},
    {Py_tp_methods, cache_methods},
    {Py_tp_doc, const_cast<char*>("The native half of stocache.SharedCache.")},
    {0, nullptr},
};

PyType_Spec cache_spec = {"stocache._C.Cache", sizeof(PyCache), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, cache_slots};

}  // namespace

bool add_cache(PyObject* module) {
  PyObject* type = PyType_FromSpec(&cache_spec);
  return type && PyModule_AddObject(module, "Cache", type) == 0;
}

}  // namespace stocache::python
