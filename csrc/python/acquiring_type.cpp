#include "python/acquiring_type.h"

#include <algorithm>
#include <utility>

#include "python/gathering_type.h"
#include "python/support.h"

namespace stocache::python {
namespace {

// A claim that nobody gives back keeps others waiting for as long as this process lives, and in
// Python an exception may come between any two steps. So claims are taken and noted in one step,
// and given back by __exit__ or, if that is not reached, when the object goes.
struct PyAcquiring {
  PyObject_HEAD std::shared_ptr<RecordCache> cache;
  ::rust::Box<bridge::Acquiring> samples;
  bool busy;  // without the GIL, in another thread
};

PyTypeObject* type = nullptr;
PyObject* puts = nullptr;

PyAcquiring* acquiring(PyObject* self) { return reinterpret_cast<PyAcquiring*>(self); }

InUse<PyAcquiring> use(PyObject* self) {
  return {acquiring(self), "these samples are being acquired"};
}

const char* word(bridge::Put put) {
  switch (put) {
    case bridge::Put::Stored:
      return "STORED";
    case bridge::Put::StoredElsewhere:
      return "STORED_ELSEWHERE";
    case bridge::Put::NoRoom:
      return "NO_ROOM";
    case bridge::Put::TooLarge:
      return "TOO_LARGE";
    default:
      return "REFUSED";
  }
}

bool warn(const std::string& why) {
  return why.empty() || PyErr_WarnEx(PyExc_RuntimeWarning, why.c_str(), 1) == 0;
}

// to_load() -> list: the samples that the caller is to load now. It waits for those that others
// load when there is nothing else to do.
PyObject* to_load(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto mine = use(self);
    const auto todo = translated([&] {
      WithoutGil free;
      return mine->samples->next_to_load();
    });
    if (PyErr_Occurred()) return nullptr;  // interrupted
    bool refused = false;
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(todo.size()));
    for (size_t i = 0; list && i < todo.size(); ++i) {
      refused = refused || mine->samples->outlook(todo[i]) == bridge::Outlook::Refused;
      PyObject* index = PyLong_FromLongLong(todo[i]);
      if (!index) {
        Py_CLEAR(list);
        break;
      }
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), index);
    }
    if (list && refused && !warn(mine->cache->news())) Py_CLEAR(list);
    return list;
  });
}

// fetch(batch) -> list: has a Gathering take what comes from below, and says what that is. Before
// to_load().
PyObject* fetch(PyObject* self, PyObject* batch) {
  return guarded([&] { return receive(batch, *use(self)->samples); });
}

// get(i, allow_pickle) -> the sample that came from below and is not in memory, or MISS.
PyObject* get(PyObject* self, PyObject* args) {
  PyObject* number = nullptr;
  int allow_pickle = 0;
  int64_t index = 0;
  if (!PyArg_ParseTuple(args, "Op", &number, &allow_pickle) || !to_index(number, index)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const auto mine = use(self);
    return or_miss(mine->cache->made_of(mine->samples->given(index), index, allow_pickle));
  });
}

// put(i, sample, allow_pickle) -> Put
PyObject* put(PyObject* self, PyObject* args) {
  PyObject *number = nullptr, *sample = nullptr;
  int allow_pickle = 0;
  int64_t index = 0;
  if (!PyArg_ParseTuple(args, "OOp", &number, &sample, &allow_pickle) || !to_index(number, index)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const auto mine = use(self);
    const auto outlook = mine->samples->outlook(index);
    TORCH_CHECK_VALUE(outlook != bridge::Outlook::Unasked, "sample ", index,
                      " was not to be loaded here; put() takes what to_load() gave, once");
    auto done =
        outlook == bridge::Outlook::Refused ? bridge::Put::Refused : bridge::Put::StoredElsewhere;
    if (outlook == bridge::Outlook::Stored) {
      done = mine->cache->put(*mine->samples, index, sample, allow_pickle);
    } else {
      mine->samples->abandon(index);
    }
    if (done == bridge::Put::Froze &&
        !warn(std::string(translated([&] { return mine->cache->records().frozen_reason(); })))) {
      return nullptr;
    }
    return PyObject_GetAttrString(puts, word(done));
  });
}

PyObject* enter(PyObject* self, PyObject*) { return Py_NewRef(self); }

PyObject* leave(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    use(self)->samples->give_back();
    Py_RETURN_NONE;
  });
}

PyMethodDef methods[] = {
    {"fetch", fetch, METH_O, nullptr},
    {"to_load", to_load, METH_NOARGS, nullptr},
    {"get", get, METH_VARARGS, nullptr},
    {"put", put, METH_VARARGS, nullptr},
    {"__enter__", enter, METH_NOARGS, nullptr},
    {"__exit__", leave, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

void dealloc(PyObject* self) {
  PyTypeObject* of = Py_TYPE(self);
  // First what has claims, then the store that keeps them.
  std::destroy_at(&acquiring(self)->samples);
  std::destroy_at(&acquiring(self)->cache);
  of->tp_free(self);
  Py_DECREF(of);
}

PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("Samples that somebody wants; see Records.acquire().")},
    {0, nullptr},
};

PyType_Spec spec = {"stocache._C.Acquiring", sizeof(PyAcquiring), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

// enum.Enum(name, words), found in this module.
PyObject* make_enum(PyObject* module, const char* name, const char* words) {
  PyObject* enums = PyImport_ImportModule("enum");
  PyObject* base = enums ? PyObject_GetAttrString(enums, "Enum") : nullptr;
  PyObject* args = Py_BuildValue("ss", name, words);
  PyObject* kwargs = Py_BuildValue("{s:s}", "module", "stocache._C");
  PyObject* made = base && args && kwargs ? PyObject_Call(base, args, kwargs) : nullptr;
  Py_XDECREF(kwargs);
  Py_XDECREF(args);
  Py_XDECREF(base);
  Py_XDECREF(enums);
  if (made && PyModule_AddObjectRef(module, name, made) != 0) Py_CLEAR(made);
  return made;
}

}  // namespace

PyObject* make_acquiring(std::shared_ptr<RecordCache> cache, const std::vector<int64_t>& indices,
                         double patience) {
  auto samples = translated([&] {
    return cache->records().acquire({indices.data(), indices.size()},
                                    static_cast<uint64_t>(std::clamp(patience, 0.0, 1e9) * 1e9));
  });
  auto* self = reinterpret_cast<PyAcquiring*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  new (&self->cache) std::shared_ptr<RecordCache>(std::move(cache));
  new (&self->samples)::rust::Box<bridge::Acquiring>(std::move(samples));
  self->busy = false;
  return reinterpret_cast<PyObject*>(self);
}

bool add_acquiring(PyObject* module) {
  puts = make_enum(module, "Put", "STORED STORED_ELSEWHERE NO_ROOM TOO_LARGE REFUSED");
  type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return puts && type &&
         PyModule_AddObjectRef(module, "Acquiring", reinterpret_cast<PyObject*>(type)) == 0;
}

}  // namespace stocache::python
