#include "python/files_type.h"

#include <memory>
#include <string>

#include "api/errors.h"
#include "python/support.h"
#include "stocache-torch/src/bridge.rs.h"

namespace stocache::python {
namespace {

using Cache = ::rust::Box<bridge::Files>;

struct PyFiles {
  PyObject_HEAD std::shared_ptr<Cache> cache;
};

// The reference keeps it open for the call, also if another thread closes it meanwhile.
std::shared_ptr<Cache> opened(PyObject* self) {
  const auto& cache = reinterpret_cast<PyFiles*>(self)->cache;
  TORCH_CHECK(cache, "this FileCache is closed; construct a new one");
  return cache;
}

::rust::Slice<const uint8_t> slice(const char* data, Py_ssize_t size) {
  return {reinterpret_cast<const uint8_t*>(data), static_cast<size_t>(size)};
}

// The bytes of a name: text as the file system spells it.
class Name {
 public:
  explicit Name(PyObject* object) {
    if (PyUnicode_Check(object)) {
      data_ = PyUnicode_AsUTF8AndSize(object, &size_);  // kept in the object: no copy
      if (data_) return;
      PyErr_Clear();  // bytes that are no text, escaped
    }
    if (!PyUnicode_FSConverter(object, &bytes_)) throw PythonError();
    data_ = PyBytes_AS_STRING(bytes_);
    size_ = PyBytes_GET_SIZE(bytes_);
  }
  ~Name() { Py_XDECREF(bytes_); }
  Name(const Name&) = delete;
  Name& operator=(const Name&) = delete;
  ::rust::Slice<const uint8_t> get() const { return slice(data_, size_); }

 private:
  PyObject* bytes_ = nullptr;
  const char* data_ = nullptr;
  Py_ssize_t size_ = 0;
};

PyObject* as_text(const ::rust::Vec<uint8_t>& bytes) {
  return PyUnicode_DecodeFSDefaultAndSize(reinterpret_cast<const char*>(bytes.data()),
                                          static_cast<Py_ssize_t>(bytes.size()));
}

// Runs `act` on the cache and a name; trouble with the source's file becomes the OSError that
// opening it would have raised.
template <typename Act>
PyObject* with_name(PyObject* self, PyObject* argument, Act&& act) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const Name name(argument);
    try {
      return act(*cache, name.get());
    } catch (const PathError& error) {
      PyObject* path = as_text((*cache)->source_of(name.get()));
      errno = error.number;
      PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
      Py_XDECREF(path);
      return nullptr;
    }
  });
}

// open(source, cache, limit, policy, check, hashed, files): FileCache has checked the types.
PyObject* open_files(PyObject* self, PyObject* args) {
  PyObject *source = nullptr, *cache = nullptr;
  unsigned long long limit = 0, files = 0;
  const char *policy = nullptr, *check = nullptr;
  int hashed = 0;
  if (!PyArg_ParseTuple(args, "SSKsspK", &source, &cache, &limit, &policy, &check, &hashed,
                        &files)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const auto bytes = [](PyObject* object) {
      ::rust::Vec<uint8_t> made;
      const char* data = PyBytes_AS_STRING(object);
      for (Py_ssize_t i = 0; i < PyBytes_GET_SIZE(object); ++i) {
        made.push_back(static_cast<uint8_t>(data[i]));
      }
      return made;
    };
    bridge::FileOptions options;
    options.source = bytes(source);
    options.cache = bytes(cache);
    options.limit = limit;
    options.policy = policy;
    options.check = check;
    options.hashed = hashed;
    options.files = files;
    auto made = translated([&] {
      WithoutGil free;
      return std::make_shared<Cache>(bridge::open_files(options));
    });
    reinterpret_cast<PyFiles*>(self)->cache = std::move(made);
    Py_RETURN_NONE;
  });
}

// Says what happened, as a warning. False if that raised.
bool tell(const Cache& cache) {
  const std::string news(cache->news());
  return news.empty() || PyErr_WarnEx(PyExc_RuntimeWarning, news.c_str(), 1) == 0;
}

// path(name, behind): the path of the copy or of the source.
PyObject* path(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 2) {
    PyErr_SetString(PyExc_TypeError, "path(name, behind)");
    return nullptr;
  }
  return with_name(self, args[0], [&](const Cache& cache, auto name) -> PyObject* {
    // A hit is too quick to give up the GIL for.
    const auto hit = cache->hit(name);
    if (!hit.empty()) return as_text(hit);
    const bool behind = args[1] == Py_True;
    const auto served = translated([&] {
      WithoutGil free;
      return behind ? cache->fetch_behind(name) : cache->fetch(name);
    });
    return tell(cache) ? as_text(served.path) : nullptr;
  });
}

// fetch(name): the path, and whether it is that of a copy.
PyObject* fetch(PyObject* self, PyObject* argument) {
  return with_name(self, argument, [](const Cache& cache, auto name) -> PyObject* {
    const auto served = translated([&] {
      WithoutGil free;
      return cache->fetch(name);
    });
    if (!tell(cache)) return nullptr;
    return Py_BuildValue("(NN)", as_text(served.path), PyBool_FromLong(served.copy));
  });
}

PyObject* contains(PyObject* self, PyObject* argument) {
  return guarded([&]() -> PyObject* {
    const Name name(argument);
    return PyBool_FromLong((*opened(self))->contains(name.get()));
  });
}

// names(): each followed by a zero byte.
PyObject* names(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const auto joined = translated([&] {
      WithoutGil free;
      return (*cache)->names();
    });
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(joined.data()),
                                     static_cast<Py_ssize_t>(joined.size()));
  });
}

// verify(name): True if the copy is what the source has, False if not, None if there is none.
PyObject* verify(PyObject* self, PyObject* argument) {
  return with_name(self, argument, [](const Cache& cache, auto name) -> PyObject* {
    const auto found = translated([&] {
      WithoutGil free;
      return cache->verify(name);
    });
    if (found == bridge::Compared::Absent) Py_RETURN_NONE;
    return PyBool_FromLong(found == bridge::Compared::Same);
  });
}

PyObject* clear(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const uint64_t removed = translated([&] {
      WithoutGil free;
      return (*cache)->clear();
    });
    return PyLong_FromUnsignedLongLong(removed);
  });
}

PyObject* stats(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const auto s = translated([&] { return (*cache)->stats(); });
    return Py_BuildValue("{s:K,s:K,s:K,s:d,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "hits", s.hits,
                         "copies", s.copies, "copied_bytes", s.copied_bytes, "copy_seconds",
                         static_cast<double>(s.copy_nanos) * 1e-9, "waits", s.waits, "passed",
                         s.passed, "failed", s.failed, "stale", s.stale, "evicted", s.evicted,
                         "too_large", s.too_large, "files", s.files, "bytes", s.bytes);
  });
}

PyObject* folder(PyObject* self, PyObject*) {
  return guarded([&] { return as_text((*opened(self))->folder()); });
}

PyObject* trouble(PyObject* self, PyObject*) {
  return guarded([&] {
    const std::string why((*opened(self))->trouble());
    return PyUnicode_DecodeFSDefault(why.c_str());
  });
}

PyObject* close_files(PyObject* self, PyObject*) {
  reinterpret_cast<PyFiles*>(self)->cache.reset();
  Py_RETURN_NONE;
}

PyObject* is_open(PyObject* self, PyObject*) {
  return PyBool_FromLong(reinterpret_cast<PyFiles*>(self)->cache != nullptr);
}

PyMethodDef methods[] = {
    {"open", open_files, METH_VARARGS, nullptr},
    {"path", as_method(path), METH_FASTCALL, nullptr},
    {"fetch", fetch, METH_O, nullptr},
    {"contains", contains, METH_O, nullptr},
    {"names", names, METH_NOARGS, nullptr},
    {"verify", verify, METH_O, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {"stats", stats, METH_NOARGS, nullptr},
    {"folder", folder, METH_NOARGS, nullptr},
    {"trouble", trouble, METH_NOARGS, nullptr},
    {"close", close_files, METH_NOARGS, nullptr},
    {"is_open", is_open, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyObject* files_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<PyFiles*>(type->tp_alloc(type, 0));
  if (self) new (&self->cache) std::shared_ptr<Cache>();
  return reinterpret_cast<PyObject*>(self);
}

void files_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<PyFiles*>(self)->cache.~shared_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(files_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(files_dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("The native half of stocache.FileCache.")},
    {0, nullptr},
};

PyType_Spec spec = {"stocache._C.Files", sizeof(PyFiles), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

}  // namespace

bool add_files(PyObject* module) {
  PyObject* type = PyType_FromSpec(&spec);
  return type && PyModule_AddObject(module, "Files", type) == 0;
}

}  // namespace stocache::python
