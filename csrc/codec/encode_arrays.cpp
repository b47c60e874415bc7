// Samples to records: tensors, arrays, numpy scalars and images.
#include "codec/encoder.h"
// Python.h stays first.
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace stocache::codec {
namespace {

// The part of numpy's array interface that is read here. Its layout is fixed by numpy's
// documentation, so its headers are not needed.
struct ArrayInterface {
  int two;
  int nd;
  char typekind;
  int itemsize;
  int flags;
  Py_intptr_t* shape;
  Py_intptr_t* strides;
  void* data;
};

constexpr int kContiguous = 1;

// Keys that tensors in plain memory may have. Wrappers, fakes and other layouts have others.
const uint64_t kPlainKeys =
    c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU,
                         c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutocastCPU})
        .raw_repr();
// Keys of tensors whose values need a computation first.
const uint64_t kLazyKeys =
    c10::DispatchKeySet(
        {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor})
        .raw_repr();

// The C struct that describes an array or a numpy scalar. Valid as long as `capsule`.
const ArrayInterface& interface_of(PyObject* object, Ref& capsule) {
  capsule = checked(PyObject_GetAttr(object, NAME("__array_struct__")));
  const auto* found =
      static_cast<const ArrayInterface*>(PyCapsule_GetPointer(capsule.get(), nullptr));
  if (!found) throw PythonError();
  TORCH_CHECK_VALUE(found->two == 2, "numpy's array interface is not as documented");
  return *found;
}

// A type of the same size that can be copied element by element, which not every dtype can.
c10::ScalarType word_of(c10::ScalarType type) {
  switch (c10::elementSize(type)) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    case 8:
      return at::kLong;
    default:
      return at::kComplexDouble;
  }
}

}  // namespace

void Encoder::tensor(PyObject* object, const Path& where) {
  Ref dict = dict_of(object);
  if (dict && PyDict_GET_SIZE(dict.get())) return other(object, where, "with attributes");
  const at::Tensor& given = tensor_in(object);
  const auto* impl = given.unsafeGetTensorImpl();
  out_.has_gradients = out_.has_gradients || (given.defined() && given.requires_grad());
  if (!(impl->key_set().raw_repr() & ~kPlainKeys) && impl->is_contiguous()) [[likely]] {
    return add_tensor(given, where);
  }
  out_.has_strides =
      out_.has_strides || (given.defined() && given.dim() >= 4 && given.layout() == at::kStrided &&
                           given.suggest_memory_format() != at::MemoryFormat::Contiguous);
  at::Tensor made;
  const std::string why = plain(given, where, made);
  if (!why.empty()) return other(object, where, why);
  add_tensor(made, where);
}

std::string Encoder::plain(const at::Tensor& given, const Path& where, at::Tensor& made) const {
  if (!given.defined()) refuse(where, " is an undefined tensor");
  const auto device = given.device();
  if (device.is_meta()) refuse(where, " is a tensor without data (on the device meta)");
  if (!device.is_cpu()) {
    refuse(where, " is a tensor on ", device.str(), "; only CPU tensors are stored: use ",
           "x.cpu()");
  }
  if (given.is_nested()) return "(nested); use x.unbind() or torch.nested.to_padded_tensor";
  if (given.layout() != at::kStrided) return "(sparse or mkldnn); use x.to_dense()";
  if (given.is_quantized()) return "(quantized); use x.dequantize() or x.int_repr()";
  if (given.key_set().raw_repr() & ~(kPlainKeys | kLazyKeys)) {
    return "that wraps another one, as inside torch.func or torch.compile; store it outside";
  }
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (given._is_zerotensor()) {
    made = at::zeros(given.sizes(), given.scalar_type());
    return "";
  }
  const auto* impl = given.unsafeGetTensorImpl();
  const uint64_t extent = at::detail::computeStorageNbytes(
      impl->sizes(), impl->strides(), impl->itemsize(), impl->storage_offset());
  if (given.numel() && given.storage().nbytes() < extent) {
    refuse(where, " is a tensor whose memory was freed");
  }
  made = given.resolve_conj().resolve_neg();
  if (!made.is_contiguous()) {
    const auto type = made.scalar_type();
    made = made.view(word_of(type)).contiguous().view(type);
  }
  if (made.unsafeGetTensorImpl()->key_set().raw_repr() & ~kPlainKeys) {
    return "that becomes another kind of tensor when it is copied here";
  }
  return "";
}

void Encoder::add_tensor(const at::Tensor& tensor, const Path& where) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto sizes = impl->sizes();
  const auto type = tensor.scalar_type();
  if (sizes.size() > kTensorDims || !is_stored(type)) {
    refuse(where, " is a tensor with ", sizes.size(), " dimensions of dtype ", type,
           "; this cannot be stored");
  }
  const auto first = words_.size();
  for (const int64_t size : sizes) {
    if (size > UINT32_MAX) {
      refuse(where, " is a tensor of shape ", sizes, "; each dim must be below 2^32");
    }
    words_.push_back(static_cast<uint32_t>(size));
  }
  uint64_t bytes = 0;
  if (!multiply(words_.data() + first, sizes.size(), impl->itemsize(), bytes)) {
    refuse(where, " is a tensor of shape ", sizes, ", which is too large");
  }
  put(Kind::Tensor);
  schema_.push_back(static_cast<char>(type));
  put_count(schema_, sizes.size());
  if (bytes == 0) return;
  const auto& storage = impl->unsafe_storage();
  if (!storage || storage.nbytes() < impl->storage_offset() * impl->itemsize() + bytes ||
      !storage.data()) {
    refuse(where, " is a tensor whose memory was freed");
  }
  if (!add_payload(impl->data(), bytes)) add_storage(storage);
}

void Encoder::array(PyObject* object, const Path& where) {
  Ref dtype = checked(PyObject_GetAttr(object, NAME("dtype")));
  const auto type = dtype_of(dtype.get());
  if (!type) {
    return other(object, where,
                 "of dtype " + ascii(Ref(PyObject_Str(dtype.get())).get()) +
                     "; arrays of numbers, dates and fixed-width strings are stored");
  }
  Ref array = Ref::to(object), capsule;
  const ArrayInterface* found = &interface_of(object, capsule);
  if (!(found->flags & kContiguous)) {
    array = checked(PyObject_CallOneArg(numpy().ascontiguousarray, object));
    found = &interface_of(array.get(), capsule);
  }
  const auto itemsize = static_cast<uint32_t>(found->itemsize);
  const bool fits = type->flexible ? itemsize % type->itemsize == 0 : itemsize == type->itemsize;
  if (!(found->flags & kContiguous) || found->nd < 0 || found->nd > int{kArrayDims} || !fits) {
    refuse(where, " is an array that does not have the layout its dtype says");
  }
  const auto first = words_.size();
  for (int i = 0; i < found->nd; ++i) add_word(found->shape[i], where);
  uint64_t bytes = 0;
  if (!multiply(words_.data() + first, found->nd, itemsize, bytes)) {
    refuse(where, " is an array of a shape that is too large");
  }
  if (type->flexible) words_.push_back(itemsize / type->itemsize);
  put(Kind::Array);
  put_text(schema_, type->text);
  put_count(schema_, found->nd);
  add_owned(std::move(array), found->data, bytes);
}

void Encoder::numpy_scalar(PyObject* object, const Path& where) {
  Ref dtype = checked(PyObject_GetAttr(object, NAME("dtype")));
  const auto type = dtype_of(dtype.get());
  if (!type || type->flexible) {
    return other(object, where, "of dtype " + ascii(Ref(PyObject_Str(dtype.get())).get()));
  }
  Ref capsule;
  const auto& found = interface_of(object, capsule);
  if (found.nd != 0 || static_cast<uint32_t>(found.itemsize) != type->itemsize) {
    refuse(where, " is a numpy scalar that does not have the size of its dtype");
  }
  put(Kind::NumpyScalar);
  put_text(schema_, type->text);
  for (uint32_t at = 0; at < type->itemsize; at += 8) {
    uint64_t bits = 0;
    std::memcpy(&bits, static_cast<const uint8_t*>(found.data) + at,
                std::min(type->itemsize - at, 8u));
    numbers_.push_back(bits);
  }
}

void Encoder::image(PyObject* object, const Path& where, int depth) {
  checked(PyObject_CallMethodNoArgs(object, NAME("load")));
  const std::string mode_name = attribute_text(object, NAME("mode"));
  const auto mode = image_mode(mode_name);
  if (!mode) return other(object, where, "of mode " + mode_name);
  Ref size = checked(PyObject_GetAttr(object, NAME("size")));
  long long width = 0, height = 0;
  if (!PyTuple_Check(size.get())) return other(object, where, "without a size");
  if (!PyArg_ParseTuple(size.get(), "LL", &width, &height)) throw PythonError();
  Ref pixels = checked(PyObject_CallMethodNoArgs(object, NAME("tobytes")));
  Ref palette;
  std::string palette_mode;
  if (mode->palette) {
    Ref holder = checked(PyObject_GetAttr(object, NAME("palette")));
    if (holder.get() != Py_None) {
      Ref its_mode = checked(PyObject_GetAttr(holder.get(), NAME("mode")));
      Ref colors = checked(PyObject_CallMethodOneArg(object, NAME("getpalette"), its_mode.get()));
      if (colors.get() != Py_None) {
        palette = checked(PyBytes_FromObject(colors.get()));
        palette_mode = attribute_text(holder.get(), NAME("mode"));
        if (PyBytes_GET_SIZE(palette.get()) == 0) palette_mode.clear();
      }
    }
    if (!palette_mode.empty() && !is_palette_mode(palette_mode)) {
      return other(object, where, "with a palette of mode " + palette_mode);
    }
  }
  const auto first = words_.size();
  add_word(width, where);
  add_word(height, where);
  uint64_t bytes = 0;
  const bool good = multiply_pixels(words_[first], words_[first + 1], mode->bits, bytes) &&
                    PyBytes_CheckExact(pixels.get()) && bytes_of(pixels.get()).size() == bytes;
  if (!good) refuse(where, " is an image of ", width, " x ", height, " that is not stored");
  put(Kind::Image);
  put_text(schema_, mode_name);
  put_text(schema_, palette_mode);
  const auto data = bytes_of(pixels.get());
  add_owned(std::move(pixels), data.data(), data.size());
  if (!palette_mode.empty()) add_bytes(std::move(palette), where);
  Ref info = checked(PyObject_CallOneArg(KEPT("stocache._images", "kept_info"), object));
  if (info.get() == Py_None) return put(Kind::Missing);
  enter(object, where, depth);
  this->object(info.get(), Path{&where, object, 0, nullptr, NAME("info")}, depth + 1);
}

}  // namespace stocache::codec
