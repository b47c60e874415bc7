// stocache._C: what is compiled of the Python package. Three types, one to each product, and what
// belongs to none of them.
#include <Python.h>
// Python.h stays first.
#include "api/errors.h"
#include "api/interrupt.h"
#include "codec/codec.h"
#include "python/cache_type.h"
#include "python/disk_folders.h"
#include "python/files_type.h"
#include "python/pipeline_type.h"
#include "python/records_type.h"
#include "python/servers_type.h"
#include "python/shards.h"
#include "python/support.h"
#include "stocache-torch/src/bridge.rs.h"
#include "tensor/one_thread.h"

namespace {

using namespace stocache;
using python::to_text;

PyObject* free_memory(PyObject*, PyObject*) {
  return PyLong_FromUnsignedLongLong(bridge::free_memory());
}

PyObject* fingerprint_of(PyObject*, PyObject* argument) {
  std::string text;
  if (!to_text(argument, text)) return nullptr;
  const auto hashed =
      bridge::fingerprint_of({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  return PyUnicode_FromString(std::string(hashed).c_str());
}

// Any contiguous buffer, at the speed of memory and without the GIL.
PyObject* hash_bytes(PyObject*, PyObject* argument) {
  return guarded([&]() -> PyObject* {
    Py_buffer view;
    if (PyObject_GetBuffer(argument, &view, PyBUF_SIMPLE) != 0) return nullptr;
    std::string hashed;
    {
      python::WithoutGil free;
      const auto* data = static_cast<const uint8_t*>(view.buf);
      hashed = std::string(bridge::fingerprint_of(
          {view.len ? data : reinterpret_cast<const uint8_t*>(""), size_t(view.len)}));
    }
    PyBuffer_Release(&view);
    return PyUnicode_FromStringAndSize(hashed.data(), hashed.size());
  });
}

PyObject* names(const rust::Vec<rust::String>& texts) {
  PyObject* list = PyList_New(0);
  for (const auto& each : texts) {
    PyObject* text = PyUnicode_FromStringAndSize(each.data(), each.size());
    if (!list || !text || PyList_Append(list, text) != 0) return nullptr;
    Py_DECREF(text);
  }
  return list;
}

PyObject* text_of(const rust::String& text) {
  return PyUnicode_DecodeUTF8(text.data(), text.size(), "replace");
}

// list_caches(): a dict for every cache of the node.
PyObject* list_caches(PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto found = translated([&] {
      python::WithoutGil free;
      return bridge::list_caches();
    });
    PyObject* list = PyList_New(0);
    for (const auto& each : found) {
      PyObject* pids = PyList_New(0);
      for (const auto pid : each.pids) {
        PyObject* number = PyLong_FromUnsignedLong(pid);
        if (!pids || !number || PyList_Append(pids, number) != 0) return nullptr;
        Py_DECREF(number);
      }
      PyObject* dict = Py_BuildValue(
          "{s:N,s:N,s:I,s:I,s:N,s:K,s:K,s:K,s:L,s:N,s:N,s:N,s:N,s:N,s:N}", "name",
          text_of(each.name), "path", text_of(each.path), "user", each.user, "format", each.format,
          "kind", text_of(each.kind), "limit_bytes", each.limit_bytes, "used_bytes",
          each.used_bytes, "samples", each.samples, "filled", static_cast<long long>(each.filled),
          "keep", PyBool_FromLong(each.keep), "in_use", PyBool_FromLong(each.in_use), "pids", pids,
          "fingerprint", text_of(each.fingerprint), "notes", text_of(each.notes), "trouble",
          text_of(each.trouble));
      if (!list || !dict || PyList_Append(list, dict) != 0) return nullptr;
      Py_DECREF(dict);
    }
    return list;
  });
}

// remove_cache(name, force): the files that went.
PyObject* remove_cache(PyObject*, PyObject* args) {
  const char* name = nullptr;
  int force = 0;
  if (!PyArg_ParseTuple(args, "sp", &name, &force)) return nullptr;
  return guarded(
      [&] { return names(translated([&] { return bridge::remove_cache(name, force != 0); })); });
}

// describe_cache(name, text): notes for others, in a cache that this process has open.
PyObject* describe_cache(PyObject*, PyObject* args) {
  const char *name = nullptr, *text = nullptr;
  if (!PyArg_ParseTuple(args, "ss", &name, &text)) return nullptr;
  return guarded([&]() -> PyObject* {
    translated([&] { bridge::describe_cache(name, text); });
    Py_RETURN_NONE;
  });
}

PyObject* sweep(PyObject*, PyObject*) {
  return guarded([&] { return names(bridge::sweep()); });
}

// leave(): as this process is about to end.
PyObject* leave(PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    bridge::leave();
    Py_RETURN_NONE;
  });
}

// on_one_thread(function): what it returns. Operators of torch that it calls use no other threads.
PyObject* on_one_thread(PyObject*, PyObject* function) {
  const OneThread one;
  return PyObject_CallNoArgs(function);
}

PyMethodDef module_methods[] = {
    {"sweep", sweep, METH_NOARGS, nullptr},
    {"leave", leave, METH_NOARGS, nullptr},
    {"fingerprint_of", fingerprint_of, METH_O, nullptr},
    {"free_memory", free_memory, METH_NOARGS, nullptr},
    {"hash_bytes", hash_bytes, METH_O, nullptr},
    {"on_one_thread", on_one_thread, METH_O, nullptr},
    {"list_caches", list_caches, METH_NOARGS, nullptr},
    {"remove_cache", remove_cache, METH_VARARGS, nullptr},
    {"describe_cache", describe_cache, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "_C", nullptr, -1, module_methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  ask_with(&python::WithoutGil::is_interrupted);
  PyObject* module = PyModule_Create(&module_def);
  const bool good = module && python::add_cache(module) && python::add_records(module) &&
                    python::add_disk_folders(module) && codec::add_codec(module) &&
                    python::add_files(module) && python::add_pipeline(module) &&
                    python::add_servers(module) && python::add_shards(module);
  return good ? module : nullptr;
}
