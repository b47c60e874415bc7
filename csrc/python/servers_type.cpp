#include "python/servers_type.h"

#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "api/errors.h"
#include "python/support.h"

namespace stocache::python {

bool to_cluster(PyObject* args, bridge::ClusterOptions& options) {
  const char *url = nullptr, *name = nullptr, *fingerprint = nullptr, *secret = nullptr;
  Py_ssize_t length = 0;
  unsigned long long ttl = 0;
  if (!PyArg_ParseTuple(args, "sssy#K", &url, &name, &fingerprint, &secret, &length, &ttl)) {
    return false;
  }
  options.url = url;
  options.name = name;
  options.fingerprint = fingerprint;
  const auto* bytes = reinterpret_cast<const uint8_t*>(secret);
  std::copy(bytes, bytes + length, std::back_inserter(options.secret));
  options.ttl_millis = ttl;
  return true;
}

PyObject* server_dicts(const ::rust::Vec<bridge::ClusterServer>& servers) {
  PyObject* list = PyList_New(0);
  for (const auto& s : servers) {
    PyObject* samples = s.answers ? PyLong_FromUnsignedLongLong(s.samples) : Py_NewRef(Py_None);
    const auto seconds = [&s](size_t at) { return static_cast<double>(s.latency_nanos[at]) / 1e9; };
    PyObject* dict = Py_BuildValue(
        "{s:s,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:{s:d,s:d,s:d},s:N,s:N,s:K,s:K,s:K,s:s}", "address",
        std::string(s.address).c_str(), "hits", s.hits, "misses", s.misses, "fills", s.fills,
        "dropped", s.dropped, "forged", s.forged, "errors", s.errors, "bytes_read", s.bytes_read,
        "bytes_written", s.bytes_written, "latency", "p50", seconds(0), "p90", seconds(1), "p99",
        seconds(2), "resting", PyBool_FromLong(s.resting), "samples", samples, "values", s.values,
        "used_bytes", s.used_bytes, "max_bytes", s.max_bytes, "version",
        std::string(s.version).c_str());
    if (!list || !dict || PyList_Append(list, dict) != 0) return nullptr;
    Py_DECREF(dict);
  }
  return list;
}

namespace {

using Held = ::rust::Box<bridge::Servers>;

struct PyServers {
  PyObject_HEAD std::shared_ptr<Held> servers;
};

// The reference keeps them open for the call, also if another thread closes them meanwhile.
std::shared_ptr<Held> opened(PyObject* self) {
  const auto& servers = reinterpret_cast<PyServers*>(self)->servers;
  TORCH_CHECK(servers, "this store is closed; construct a new one");
  return servers;
}

PyObject* open_servers(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    bridge::ClusterOptions options;
    if (!to_cluster(args, options)) return nullptr;
    auto made = translated([&] { return bridge::open_servers(options); });
    reinterpret_cast<PyServers*>(self)->servers = std::make_shared<Held>(std::move(made));
    Py_RETURN_NONE;
  });
}

// The 16 bytes of a digest, as two numbers.
struct Digest {
  uint64_t high = 0, low = 0;

  explicit Digest(const char* bytes) {
    std::memcpy(&low, bytes, 8);
    std::memcpy(&high, bytes + 8, 8);
  }

  explicit Digest(const Py_buffer& bytes) {
    TORCH_CHECK_VALUE(bytes.len == 16, "a digest has 16 bytes, not ", bytes.len);
    *this = Digest(static_cast<const char*>(bytes.buf));
  }
};

struct Buffer {
  Py_buffer bytes{};
  ~Buffer() {
    if (bytes.obj) PyBuffer_Release(&bytes);
  }
  ::rust::Slice<const uint8_t> slice() const {
    static const uint8_t none = 0;
    return {bytes.len ? static_cast<const uint8_t*>(bytes.buf) : &none, size_t(bytes.len)};
  }
};

PyObject* bytes_of(const ::rust::Vec<uint8_t>& bytes) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(bytes.data()),
                                   static_cast<Py_ssize_t>(bytes.size()));
}

// get_many(digests, one after the other) -> for each (schema, bytes), or None.
PyObject* get_many(PyObject* self, PyObject* args) {
  Buffer digests;
  if (!PyArg_ParseTuple(args, "y*", &digests.bytes)) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto servers = opened(self);
    const auto length = static_cast<size_t>(digests.bytes.len);
    TORCH_CHECK_VALUE(length % 16 == 0, "digests have 16 bytes each; ", length, " are none");
    std::vector<uint64_t> halves;
    for (size_t at = 0; at < length; at += 16) {
      const Digest key(static_cast<const char*>(digests.bytes.buf) + at);
      halves.insert(halves.end(), {key.high, key.low});
    }
    const auto found = translated([&] {
      WithoutGil free;
      return (*servers)->get_many({halves.data(), halves.size()});
    });
    PyObject* list = PyList_New(0);
    for (const auto& value : found) {
      PyObject* item = value.is_there
                           ? Py_BuildValue("(NN)", bytes_of(value.schema), bytes_of(value.bytes))
                           : Py_NewRef(Py_None);
      if (!list || !item || PyList_Append(list, item) != 0) return nullptr;
      Py_DECREF(item);
    }
    return list;
  });
}

// address_of(digest): the server that has the value.
PyObject* address_of(PyObject* self, PyObject* args) {
  Buffer digest;
  if (!PyArg_ParseTuple(args, "y*", &digest.bytes)) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto servers = opened(self);
    const Digest key(digest.bytes);
    return PyUnicode_FromString(std::string((*servers)->address_of(key.high, key.low)).c_str());
  });
}

// put(digest, schema, bytes) -> whether it was taken.
PyObject* put(PyObject* self, PyObject* args) {
  Buffer digest, schema, record;
  if (!PyArg_ParseTuple(args, "y*y*y*", &digest.bytes, &schema.bytes, &record.bytes)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const auto servers = opened(self);
    const Digest key(digest.bytes);
    bool taken = false;
    {
      WithoutGil free;
      taken = (*servers)->put(key.high, key.low, schema.slice(), record.slice());
    }
    return PyBool_FromLong(taken);
  });
}

PyObject* flush(PyObject* self, PyObject* argument) {
  const double seconds = PyFloat_AsDouble(argument);
  if (PyErr_Occurred()) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto servers = opened(self);
    bool done = false;
    {
      WithoutGil free;
      done = (*servers)->flush(to_nanoseconds(seconds));
    }
    return PyBool_FromLong(done);
  });
}

PyObject* clear(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto servers = opened(self);
    translated([&] {
      WithoutGil free;
      (*servers)->clear();
    });
    Py_RETURN_NONE;
  });
}

PyObject* news(PyObject* self, PyObject*) {
  return guarded(
      [&] { return PyUnicode_FromString(std::string((*opened(self))->news()).c_str()); });
}

// servers(ask): what this process saw of each and, if they are asked, what they hold.
PyObject* servers(PyObject* self, PyObject* argument) {
  const int ask = PyObject_IsTrue(argument);
  if (ask < 0) return nullptr;
  return guarded([&] {
    const auto held = opened(self);
    return server_dicts(translated([&] {
      WithoutGil free;
      return (*held)->servers(ask != 0);
    }));
  });
}

PyObject* close_servers(PyObject* self, PyObject*) {
  auto gone = std::move(reinterpret_cast<PyServers*>(self)->servers);
  WithoutGil free(gone != nullptr);
  gone.reset();
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"open", open_servers, METH_VARARGS, nullptr},
    {"get_many", get_many, METH_VARARGS, nullptr},
    {"address_of", address_of, METH_VARARGS, nullptr},
    {"put", put, METH_VARARGS, nullptr},
    {"flush", flush, METH_O, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {"news", news, METH_NOARGS, nullptr},
    {"servers", servers, METH_O, nullptr},
    {"close", close_servers, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyObject* servers_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<PyServers*>(type->tp_alloc(type, 0));
  if (self) new (&self->servers) std::shared_ptr<Held>();
  return reinterpret_cast<PyObject*>(self);
}

void servers_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  {
    // It waits for answers to what was written. Nobody else has this object any more.
    auto& servers = reinterpret_cast<PyServers*>(self)->servers;
    const WithoutGil free(servers != nullptr);
    servers.~shared_ptr();
  }
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(servers_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(servers_dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("The native half of stocache.CacheLoader.")},
    {0, nullptr},
};

PyType_Spec spec = {"stocache._C.Servers", sizeof(PyServers), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

}  // namespace

bool add_servers(PyObject* module) {
  PyObject* type = PyType_FromSpec(&spec);
  return type && PyModule_AddObject(module, "Servers", type) == 0;
}

}  // namespace stocache::python
