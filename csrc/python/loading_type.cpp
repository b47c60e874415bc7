#include "python/loading_type.h"

#include <unistd.h>

#include <algorithm>
#include <vector>

#include "python/support.h"

namespace stocache::python {
namespace {

// A claim that nobody gives back keeps others waiting for as long as this process lives, and in
// Python an exception may come between any two steps. So a claim is taken and noted here in one
// step, and given back by __exit__ or, if that is not reached, when the object goes.
struct PyLoading {
  PyObject_HEAD std::shared_ptr<RecordCache> cache;
  std::vector<int64_t> claimed;
  pid_t process;  // who claimed: a forked child must not give back what is its parent's
};

PyTypeObject* type = nullptr;
PyObject* claims = nullptr;
PyObject* puts = nullptr;

PyLoading* loading(PyObject* self) { return reinterpret_cast<PyLoading*>(self); }

// Forgets the claim on a sample; whether there was one.
bool forget(PyLoading* self, int64_t index) {
  const auto found = std::find(self->claimed.begin(), self->claimed.end(), index);
  if (found == self->claimed.end()) return false;
  *found = self->claimed.back();
  self->claimed.pop_back();
  return true;
}

void give_back(PyLoading* self) noexcept {
  const bool ours = self->process == getpid();
  for (const int64_t index : self->claimed) {
    if (ours) self->cache->records().abandon(index);
  }
  self->claimed.clear();
}

const char* word(bridge::Claim claim) {
  switch (claim) {
    case bridge::Claim::LoadAndStore:
      return "LOAD_AND_STORE";
    case bridge::Claim::Present:
      return "PRESENT";
    case bridge::Claim::LoadingElsewhere:
      return "LOADING_ELSEWHERE";
    default:
      return "LOAD_ONLY";
  }
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

// begin(i) -> Claim
PyObject* begin(PyObject* self, PyObject* argument) {
  int64_t index = 0;
  if (!to_index(argument, index)) return nullptr;
  return guarded([&]() -> PyObject* {
    PyLoading* mine = loading(self);
    if (mine->process != getpid()) {
      mine->claimed.clear();
      mine->process = getpid();
    }
    mine->claimed.reserve(mine->claimed.size() + 1);  // what is claimed can be noted
    const auto claim = mine->cache->records().begin(index);
    if (claim == bridge::Claim::LoadAndStore) mine->claimed.push_back(index);
    if (claim == bridge::Claim::LoadOnly) {
      const std::string why = mine->cache->news();
      if (!why.empty() && PyErr_WarnEx(PyExc_RuntimeWarning, why.c_str(), 1) != 0) return nullptr;
    }
    return PyObject_GetAttrString(claims, word(claim));
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
    PyLoading* mine = loading(self);
    TORCH_CHECK_VALUE(mine->process == getpid() && forget(mine, index), "sample ", index,
                      " was not begun here; put() follows a begin() that gave LOAD_AND_STORE");
    const auto cache = mine->cache;
    const auto done = cache->put(index, sample, allow_pickle);  // ends the claim in any case
    if (done == bridge::Put::Froze) {
      const std::string why(translated([&] { return cache->records().frozen_reason(); }));
      if (PyErr_WarnEx(PyExc_RuntimeWarning, why.c_str(), 1) != 0) return nullptr;
    }
    return PyObject_GetAttrString(puts, word(done));
  });
}

PyObject* abandon(PyObject* self, PyObject* argument) {
  int64_t index = 0;
  if (!to_index(argument, index)) return nullptr;
  return guarded([&]() -> PyObject* {
    PyLoading* mine = loading(self);
    if (forget(mine, index) && mine->process == getpid()) mine->cache->records().abandon(index);
    Py_RETURN_NONE;
  });
}

PyObject* enter(PyObject* self, PyObject*) { return Py_NewRef(self); }

PyObject* leave(PyObject* self, PyObject*) {
  give_back(loading(self));
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"begin", begin, METH_O, nullptr},          {"put", put, METH_VARARGS, nullptr},
    {"abandon", abandon, METH_O, nullptr},      {"__enter__", enter, METH_NOARGS, nullptr},
    {"__exit__", leave, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr},
};

void dealloc(PyObject* self) {
  PyTypeObject* of = Py_TYPE(self);
  give_back(loading(self));
  loading(self)->claimed.~vector();
  loading(self)->cache.~shared_ptr();
  of->tp_free(self);
  Py_DECREF(of);
}

PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("Samples that this process loads; see Records.loading().")},
    {0, nullptr},
};

PyType_Spec spec = {"stocache._C.Loading", sizeof(PyLoading), 0,
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

PyObject* make_loading(std::shared_ptr<RecordCache> cache) {
  auto* self = reinterpret_cast<PyLoading*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  new (&self->cache) std::shared_ptr<RecordCache>(std::move(cache));
  new (&self->claimed) std::vector<int64_t>();
  self->process = getpid();
  return reinterpret_cast<PyObject*>(self);
}

bool add_loading(PyObject* module) {
  claims = make_enum(module, "Claim", "LOAD_AND_STORE PRESENT LOADING_ELSEWHERE LOAD_ONLY");
  puts = make_enum(module, "Put", "STORED STORED_ELSEWHERE NO_ROOM TOO_LARGE REFUSED");
  type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return claims && puts && type &&
         PyModule_AddObjectRef(module, "Loading", reinterpret_cast<PyObject*>(type)) == 0;
}

}  // namespace stocache::python
