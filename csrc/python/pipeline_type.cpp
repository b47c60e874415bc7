#include "python/pipeline_type.h"
// Python.h stays first.
#include <ATen/ops/empty.h>

#include <string>
#include <vector>

#include "api/errors.h"
#include "python/support.h"

namespace stocache::python {
namespace {

struct PyPipeline {
  PyObject_HEAD std::shared_ptr<Pipeline> pipeline;
};

PyTypeObject* pipeline_type = nullptr;

const Pipeline& of(PyObject* self) { return *reinterpret_cast<PyPipeline*>(self)->pipeline; }

// What kind of object the image was.
enum Form { kTensor, kChannelsLast, kPil, kArray };

// The sides of an image, or of each of a batch.
bridge::ImageShape shape_of(at::IntArrayRef sizes, at::ScalarType dtype, int form) {
  TORCH_CHECK_VALUE(sizes.size() == 3, "an image has three dimensions, and this one ",
                    sizes.size());
  const bool interleaved = form != kTensor;
  const auto side = [&](size_t i) {
    TORCH_CHECK_VALUE(0 <= sizes[i] && sizes[i] <= INT32_MAX, "an image of ", sizes,
                      " is too large");
    return static_cast<uint32_t>(sizes[i]);
  };
  bridge::ImageShape shape;
  shape.channels = side(interleaved ? 2 : 0);
  shape.height = side(interleaved ? 0 : 1);
  shape.width = side(interleaved ? 1 : 2);
  shape.dtype = static_cast<int8_t>(dtype);
  shape.interleaved = interleaved;
  shape.pil = form == kPil;
  shape.array = form == kArray;
  return shape;
}

bridge::RowNumber number_of(unsigned long long seed, unsigned long long epoch,
                            unsigned long long index) {
  bridge::RowNumber number;
  number.seed = seed;
  number.epoch = epoch;
  number.index = index;
  return number;
}

bool sizes_of(PyObject* object, std::vector<int64_t>& sizes) {
  PyObject* list = PySequence_Fast(object, "the sizes of an image are needed");
  if (!list) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list); ++i) {
    sizes.push_back(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(list, i)));
  }
  Py_DECREF(list);
  return !PyErr_Occurred();
}

// output(sizes, dtype, form): the dtype and the sizes of what comes out, and whether the channels
// of a pixel lie together.
PyObject* output(PyObject* self, PyObject* args) {
  PyObject *sizes_object = nullptr, *dtype = nullptr;
  int form = 0;
  if (!PyArg_ParseTuple(args, "OO!i", &sizes_object, dtype_type(), &dtype, &form)) return nullptr;
  return guarded([&]() -> PyObject* {
    std::vector<int64_t> sizes;
    if (!sizes_of(sizes_object, sizes)) return nullptr;
    const auto shape = shape_of(sizes, dtype_in(dtype), form);
    const auto found = translated([&] { return of(self)->output(shape); });
    PyObject* made = Py_NewRef(dtype_object(static_cast<at::ScalarType>(found.dtype)));
    return Py_BuildValue("(N(LLL)N)", made, static_cast<long long>(found.dims[0]),
                         static_cast<long long>(found.dims[1]),
                         static_cast<long long>(found.dims[2]),
                         PyBool_FromLong(found.channels_last));
  });
}

// drawn(seed, epoch, index, sizes, dtype, form): what is done to that row, as JSON.
PyObject* drawn(PyObject* self, PyObject* args) {
  unsigned long long seed = 0, epoch = 0, index = 0;
  PyObject *sizes_object = nullptr, *dtype = nullptr;
  int form = 0;
  if (!PyArg_ParseTuple(args, "KKKOO!i", &seed, &epoch, &index, &sizes_object, dtype_type(), &dtype,
                        &form)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    std::vector<int64_t> sizes;
    if (!sizes_of(sizes_object, sizes)) return nullptr;
    const auto shape = shape_of(sizes, dtype_in(dtype), form);
    const auto number = number_of(seed, epoch, index);
    const auto text = translated([&] { return of(self)->drawn(number, shape); });
    return PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
  });
}

const at::Tensor* tensor_of(PyObject* object, const char* what) {
  TORCH_CHECK_TYPE(is_tensor(object), what, " is no tensor");
  return &tensor_in(object);
}

// apply(seed, epoch, indices, images, form, threads): a batch, of a batch of images; `indices` are
// int64, one for each of them.
PyObject* apply(PyObject* self, PyObject* args) {
  unsigned long long seed = 0, epoch = 0;
  PyObject *indices_object = nullptr, *images_object = nullptr;
  int form = 0;
  Py_ssize_t threads = 1;
  if (!PyArg_ParseTuple(args, "KKOOin", &seed, &epoch, &indices_object, &images_object, &form,
                        &threads)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const at::Tensor& images = *tensor_of(images_object, "the batch of images");
    const at::Tensor& indices = *tensor_of(indices_object, "the indices");
    TORCH_CHECK_VALUE(images.dim() == 4 && images.is_cpu() && images.layout() == at::kStrided,
                      "images are [N, C, H, W] or [N, H, W, C] in ordinary memory");
    TORCH_CHECK_VALUE(images.is_contiguous() && !images.is_conj() && !images.is_neg(),
                      "images are to lie one after the other");
    TORCH_CHECK_VALUE(indices.scalar_type() == at::kLong && indices.is_cpu() &&
                          indices.is_contiguous() && indices.dim() == 1 &&
                          indices.size(0) == images.size(0),
                      "an index is needed for each of the ", images.size(0), " images");
    const auto shape = shape_of(images.sizes().slice(1), images.scalar_type(), form);
    const auto pipeline = reinterpret_cast<PyPipeline*>(self)->pipeline;
    at::Tensor made;
    translated([&] {
      WithoutGil free;
      const auto found = (*pipeline)->output(shape);
      const int64_t rows = images.size(0);
      made = at::empty(
          {rows, found.dims[0], found.dims[1], found.dims[2]},
          at::TensorOptions().dtype(static_cast<at::ScalarType>(found.dtype)),
          found.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous);
      if (rows == 0) return;
      const auto* numbers = reinterpret_cast<const uint64_t*>(indices.const_data_ptr<int64_t>());
      (*pipeline)->apply(number_of(seed, epoch, 0), {numbers, static_cast<size_t>(rows)}, shape,
                         static_cast<const uint8_t*>(images.const_data_ptr()),
                         static_cast<uint8_t*>(made.mutable_data_ptr()),
                         static_cast<size_t>(threads > 1 ? threads : 1));
    });
    return to_python(std::move(made));
  });
}

PyMethodDef methods[] = {
    {"output", output, METH_VARARGS, nullptr},
    {"drawn", drawn, METH_VARARGS, nullptr},
    {"apply", apply, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyObject* pipeline_new(PyTypeObject* type, PyObject* args, PyObject*) {
  const char* text = nullptr;
  Py_ssize_t size = 0;
  if (!PyArg_ParseTuple(args, "s#", &text, &size)) return nullptr;
  return guarded([&]() -> PyObject* {
    auto made = translated([&] {
      return std::make_shared<Pipeline>(bridge::new_pipeline({text, static_cast<size_t>(size)}));
    });
    auto* self = reinterpret_cast<PyPipeline*>(type->tp_alloc(type, 0));
    if (self) new (&self->pipeline) std::shared_ptr<Pipeline>(std::move(made));
    return reinterpret_cast<PyObject*>(self);
  });
}

void pipeline_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<PyPipeline*>(self)->pipeline.~shared_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(pipeline_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(pipeline_dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("The native half of stocache.Pipeline.")},
    {0, nullptr},
};

PyType_Spec spec = {"stocache._C.Pipeline", sizeof(PyPipeline), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

bool add_pipeline(PyObject* module) {
  PyObject* type = PyType_FromSpec(&spec);
  pipeline_type = reinterpret_cast<PyTypeObject*>(type);
  return type && PyModule_AddObjectRef(module, "Pipeline", type) == 0;
}

std::shared_ptr<Pipeline> pipeline_of(PyObject* object) {
  const bool ours = pipeline_type && PyObject_TypeCheck(object, pipeline_type);
  return ours ? reinterpret_cast<PyPipeline*>(object)->pipeline : nullptr;
}

}  // namespace stocache::python
