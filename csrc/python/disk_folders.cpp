#include "python/disk_folders.h"
// Python.h stays first.
#include <memory>

#include "api/errors.h"
#include "python/support.h"
#include "stocache-torch/src/bridge.rs.h"

namespace stocache::python {
namespace {

constexpr const char* kCheck = "stocache._C.DiskCheck";

using Check = ::rust::Box<bridge::DiskCheck>;

// A buffer that Python lends for a call.
struct Lent {
  Py_buffer view{};
  ~Lent() { PyBuffer_Release(&view); }

  ::rust::Slice<const uint8_t> bytes() const {
    const auto* data = static_cast<const uint8_t*>(view.buf);
    return {view.len ? data : reinterpret_cast<const uint8_t*>(""), size_t(view.len)};
  }
};

PyObject* text_of(const ::rust::String& text) {
  return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
}

// inspect_disk(path): a dict, or None if it is not the folder of a disk level.
PyObject* inspect_disk(PyObject*, PyObject* args) {
  Lent path;
  if (!PyArg_ParseTuple(args, "y*", &path.view)) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto found = translated([&] {
      WithoutGil free;
      return bridge::inspect_disk(path.bytes());
    });
    if (!found.is_one) Py_RETURN_NONE;
    return Py_BuildValue("{s:I,s:N,s:K,s:N,s:K,s:K,s:N,s:L,s:N}", "user", found.user, "fingerprint",
                         text_of(found.fingerprint), "samples", found.samples, "keyed",
                         PyBool_FromLong(found.keyed), "records", found.records, "bytes",
                         found.bytes, "in_use", PyBool_FromLong(found.in_use), "used_at",
                         static_cast<long long>(found.used_at), "trouble", text_of(found.trouble));
  });
}

// remove_disk(path, force)
PyObject* remove_disk(PyObject*, PyObject* args) {
  Lent path;
  int force = 0;
  if (!PyArg_ParseTuple(args, "y*p", &path.view, &force)) return nullptr;
  return guarded([&]() -> PyObject* {
    translated([&] {
      WithoutGil free;
      bridge::remove_disk(path.bytes(), force != 0);
    });
    Py_RETURN_NONE;
  });
}

// tidy_disk(path): the names that went.
PyObject* tidy_disk(PyObject*, PyObject* args) {
  Lent path;
  if (!PyArg_ParseTuple(args, "y*", &path.view)) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto gone = translated([&] {
      WithoutGil free;
      return bridge::tidy_disk(path.bytes());
    });
    PyObject* list = PyList_New(0);
    for (const auto& name : gone) {
      PyObject* text = text_of(name);
      if (!list || !text || PyList_Append(list, text) != 0) return nullptr;
      Py_DECREF(text);
    }
    return list;
  });
}

void end_check(PyObject* capsule) {
  delete static_cast<Check*>(PyCapsule_GetPointer(capsule, kCheck));
}

// check_disk(path) -> (check, records): for `check_step`.
PyObject* check_disk(PyObject*, PyObject* args) {
  Lent path;
  if (!PyArg_ParseTuple(args, "y*", &path.view)) return nullptr;
  return guarded([&]() -> PyObject* {
    auto check = std::make_unique<Check>(translated([&] {
      WithoutGil free;
      return bridge::check_disk(path.bytes());
    }));
    const auto records = static_cast<unsigned long long>((*check)->records());
    PyObject* capsule = PyCapsule_New(check.get(), kCheck, end_check);
    if (!capsule) return nullptr;
    check.release();
    return Py_BuildValue("NK", capsule, records);
  });
}

// check_step(check) -> (records, damaged): of some more; none are left if there were none. With the
// GIL given up, so a check belongs to one thread.
PyObject* check_step(PyObject*, PyObject* capsule) {
  auto* check = static_cast<Check*>(PyCapsule_GetPointer(capsule, kCheck));
  if (!check) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto step = translated([&] {
      WithoutGil free;
      return (*check)->step();
    });
    return Py_BuildValue("KK", static_cast<unsigned long long>(step.records),
                         static_cast<unsigned long long>(step.damaged));
  });
}

// try_compression(way, record) -> (bytes, seconds to pack, seconds to unpack)
PyObject* try_compression(PyObject*, PyObject* args) {
  Lent record;
  const char* way = nullptr;
  if (!PyArg_ParseTuple(args, "sy*", &way, &record.view)) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto trial = translated([&] {
      WithoutGil free;
      return bridge::try_compression(way, record.bytes());
    });
    return Py_BuildValue("Kdd", static_cast<unsigned long long>(trial.bytes),
                         double(trial.pack_nanos) * 1e-9, double(trial.unpack_nanos) * 1e-9);
  });
}

PyMethodDef functions[] = {
    {"inspect_disk", inspect_disk, METH_VARARGS, nullptr},
    {"remove_disk", remove_disk, METH_VARARGS, nullptr},
    {"tidy_disk", tidy_disk, METH_VARARGS, nullptr},
    {"check_disk", check_disk, METH_VARARGS, nullptr},
    {"check_step", check_step, METH_O, nullptr},
    {"try_compression", try_compression, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_disk_folders(PyObject* module) { return PyModule_AddFunctions(module, functions) == 0; }

}  // namespace stocache::python
