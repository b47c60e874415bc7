// The codec for Python: for tests and for a look inside.
#include "codec/codec.h"
// Python.h stays first.
#include <ATen/ops/empty.h>

#include <cstring>
#include <unordered_map>

#include "codec/classes.h"
#include "python/support.h"

namespace stocache::codec {
namespace {

using python::as_method;
using python::WithoutGil;

// The bytes of any object that has some. Keeps them as they are for its lifetime.
class Bytes {
 public:
  explicit Bytes(PyObject* object) {
    if (PyObject_GetBuffer(object, &view_, PyBUF_SIMPLE) != 0) throw PythonError();
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  const uint8_t* data() const { return static_cast<const uint8_t*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

// The schema of these bytes; the last ones are remembered.
std::shared_ptr<const Schema> schema_of(PyObject* object) {
  using Schemas = std::unordered_map<std::string, std::shared_ptr<const Schema>>;
  static Schemas& memory = *new Schemas;
  const Bytes bytes(object);
  const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const auto found = memory.find(text);
  if (found != memory.end()) return found->second;
  auto parsed = Schema::parse(text);
  Schemas dropped;
  if (memory.size() >= 64) dropped.swap(memory);
  memory.insert_or_assign(text, parsed);
  return parsed;
}

PyObject* codec_encode(PyObject*, PyObject* args, PyObject* kwargs) {
  return guarded([&]() -> PyObject* {
    static const char* names[] = {"sample", "allow_pickle", nullptr};
    PyObject* sample = nullptr;
    int allow_pickle = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p:codec_encode", const_cast<char**>(names),
                                     &sample, &allow_pickle)) {
      return nullptr;
    }
    const Encoded encoded = encode(sample, allow_pickle);
    Ref schema = checked(PyBytes_FromStringAndSize(encoded.schema.data(),
                                                   static_cast<Py_ssize_t>(encoded.schema.size())));
    Ref record =
        checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(encoded.bytes)));
    char* to = PyBytes_AS_STRING(record.get());
    for (const auto& part : encoded.parts) {
      std::memcpy(to, part.iov_base, part.iov_len);
      to += part.iov_len;
    }
    return Py_BuildValue("NN", schema.release(), record.release());
  });
}

PyObject* codec_decode(PyObject*, PyObject* args, PyObject* kwargs) {
  return guarded([&]() -> PyObject* {
    static const char* names[] = {"schema", "record", "allow_pickle", nullptr};
    PyObject *schema = nullptr, *record = nullptr;
    int allow_pickle = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|p:codec_decode", const_cast<char**>(names),
                                     &schema, &record, &allow_pickle)) {
      return nullptr;
    }
    const auto parsed = schema_of(schema);
    if (is_tensor(record)) {
      // A tensor of our own: what is unpickled may give this one another memory.
      return parsed->decode(tensor_in(record).detach(), allow_pickle);
    }
    const Bytes bytes(record);
    const at::Tensor copy = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
    if (bytes.size()) std::memcpy(copy.mutable_data_ptr(), bytes.data(), bytes.size());
    return parsed->decode(copy, allow_pickle);
  });
}

PyObject* codec_collate(PyObject*, PyObject* args, PyObject* kwargs) {
  return guarded([&]() -> PyObject* {
    static const char* names[] = {"schema", "records", "threads", nullptr};
    PyObject *schema = nullptr, *records = nullptr;
    unsigned int threads = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|I:codec_collate", const_cast<char**>(names),
                                     &schema, &records, &threads)) {
      return nullptr;
    }
    TORCH_CHECK_VALUE(threads >= 1 && threads <= 64, "threads is ", threads,
                      "; 1 to 64 are allowed");
    const auto parsed = schema_of(schema);
    Ref items = checked(PySequence_Tuple(records));
    std::vector<std::unique_ptr<Bytes>> held;
    const auto rows = static_cast<size_t>(PyTuple_GET_SIZE(items.get()));
    Collation collation(bridge::new_batch(rows));
    for (size_t row = 0; row < rows; ++row) {
      held.push_back(
          std::make_unique<Bytes>(PyTuple_GET_ITEM(items.get(), static_cast<Py_ssize_t>(row))));
      const bridge::Part record{held.back()->data(), held.back()->size()};
      collation.batch().give(row, {&record, 1});
    }
    auto allocate = [](at::IntArrayRef sizes, at::ScalarType type) {
      return at::empty(sizes, type);
    };
    bool whole = false;
    {
      WithoutGil free;
      if (collation.plan(parsed, allocate)) {
        collation.begin(threads);
        whole = translated([&] { return collation.batch().finish(); }) == bridge::Gathered::Whole;
      }
    }
    PyObject* made = whole ? collation.finish() : nullptr;
    return made ? made : Py_NewRef(Py_NotImplemented);
  });
}

PyObject* registered(PyObject*, PyObject*) {
  note_registration();
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"note_registration", registered, METH_NOARGS,
     "note_registration()\n--\n\nTypes are asked about again."},
    {"codec_encode", as_method(codec_encode), METH_VARARGS | METH_KEYWORDS,
     "codec_encode(sample, allow_pickle=False)\n--\n\nThe schema and the record of a sample."},
    {"codec_decode", as_method(codec_decode), METH_VARARGS | METH_KEYWORDS,
     "codec_decode(schema, record, allow_pickle=False)\n--\n\nThe sample in a record."},
    {"codec_collate", as_method(codec_collate), METH_VARARGS | METH_KEYWORDS,
     "codec_collate(schema, records, threads=1)\n--\n\n"
     "The batch that default_collate makes of these samples, or NotImplemented."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_codec(PyObject* module) {
  return PyModule_AddObjectRef(module, "UnsupportedSample", unsupported_type()) == 0 &&
         PyModule_AddFunctions(module, methods) == 0;
}

}  // namespace stocache::codec
