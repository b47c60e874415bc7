// Records to samples: Decoder walks a schema and makes objects over the bytes of a record.
#include "codec/schema.h"
// Python.h stays first.
#include <c10/core/CPUAllocator.h>
#include <c10/util/SmallVector.h>

#include <cstring>

#include "codec/path.h"
#include "tensor/over.h"

namespace stocache::codec {
namespace {

constexpr uint64_t kWorthCopying = 1 << 10;
// What is kept is at most this many times as large as it seems.
constexpr uint64_t kSmallShare = 8;

// Memory of a record as numpy and PIL take it.
struct Slice {
  PyObject_HEAD c10::StorageImpl* owner;
  void* data;
  Py_ssize_t size;
};

void slice_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  c10::raw::intrusive_ptr::decref(reinterpret_cast<Slice*>(self)->owner);
  type->tp_free(self);
  Py_DECREF(type);
}

int slice_buffer(PyObject* self, Py_buffer* view, int flags) {
  auto* slice = reinterpret_cast<Slice*>(self);
  return PyBuffer_FillInfo(view, self, slice->data, slice->size, /*readonly=*/0, flags);
}

PyTypeObject* slice_type() {
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(slice_dealloc)},
      {Py_bf_getbuffer, reinterpret_cast<void*>(slice_buffer)},
      {0, nullptr},
  };
  static PyType_Spec spec = {"stocache._C.Slice", sizeof(Slice), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static PyObject* type = nullptr;
  if (!type) type = checked(PyType_FromSpec(&spec)).release();
  return reinterpret_cast<PyTypeObject*>(type);
}

void drop_owner(void* owner) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(owner));
}

class Decoder {
 public:
  // What memory holds: a record, or what a batch keeps of one beside its columns.
  enum class Of { kRecord, kRest };

  // The record was checked to be of the form that `decode` asks for, and is aligned to 16. Decoding
  // begins with that node.
  Decoder(const Schema::Impl& impl, const at::Tensor& record, Of of = Of::kRecord, size_t first = 0)
      : impl_(impl),
        owner_(record.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()),
        base_(static_cast<uint8_t*>(record.mutable_data_ptr())),
        length_(static_cast<uint64_t>(record.numel())),
        next_(first) {
    // Before anything is allocated: a few bytes of a schema can ask for many words.
    if (length_ < impl.sums.head) damaged("it is too short");
    words_.resize(impl.sums.words);
    extents_.resize(impl.sums.leaves);
    const ::rust::Slice<const uint8_t> bytes{base_, length_};
    const ::rust::Slice<uint32_t> words{words_.data(), words_.size()};
    const ::rust::Slice<Extent> extents{extents_.data(), extents_.size()};
    const bool good = of == Of::kRecord ? impl.parsed->lay_out(bytes, words, extents)
                                        : impl.parsed->lay_out_rest(bytes, words, extents);
    if (!good) damaged("its length is not that of its parts");
  }

  // The next node and all below it.
  Ref node();

 private:
  using Node = Schema::Impl::Node;
  using Extent = Schema::Impl::Extent;

  uint8_t* number_at(const Node& node) const {
    return base_ + impl_.sums.numbers_at + 8 * uint64_t{node.number};
  }
  template <typename Value>
  Value number(const Node& node, size_t index = 0) const {
    Value value;
    static_assert(sizeof(value) == 8);
    std::memcpy(&value, number_at(node) + 8 * index, 8);
    return value;
  }
  const uint8_t* payload(const Node& node) const { return base_ + extents_[node.leaf].at; }
  uint64_t size(const Node& node) const { return extents_[node.leaf].len; }

  // Whether this leaf gets memory of its own: a label that somebody keeps would keep all of its
  // record. Where the record is not much larger than the objects around it, a view is cheaper.
  bool is_small(const Extent& extent) const {
    return length_ >= kWorthCopying && extent.len <= length_ / kSmallShare;
  }
  Ref slice(uint8_t* data, uint64_t size) const;
  at::Tensor tensor(const Node& node) const;
  Ref array(const Node& node) const;
  Ref number_list(const Node& node) const;
  Ref named_tuple(const Node& node);
  Ref data_class(const Node& node);
  Ref enum_member(const Node& node) const;
  Ref pairs(const Node& node);
  Ref object(const Node& node);
  Ref tensor_subclass(const Node& node, const Known& known);
  Ref image(const Node& node);

  const Schema::Impl& impl_;
  c10::StorageImpl* owner_;
  uint8_t* base_;
  uint64_t length_;
  c10::SmallVector<uint32_t, 24> words_;
  c10::SmallVector<Extent, 8> extents_;
  size_t next_;
};

Ref Decoder::slice(uint8_t* data, uint64_t size) const {
  PyTypeObject* type = slice_type();
  Ref made = checked(type->tp_alloc(type, 0));
  auto* slice = reinterpret_cast<Slice*>(made.get());
  c10::raw::intrusive_ptr::incref(owner_);
  slice->owner = owner_;
  slice->data = data;
  slice->size = static_cast<Py_ssize_t>(size);
  return made;
}

at::Tensor Decoder::tensor(const Node& node) const {
  c10::SmallVector<int64_t, 8> sizes;
  for (uint32_t i = 0; i < node.count; ++i) sizes.push_back(words_[node.word + i]);
  const Extent& extent = extents_[node.leaf];
  c10::Allocator* allocator = c10::GetCPUAllocator();
  c10::DataPtr memory;
  if (extent.len == 0) {
    memory = c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU));
  } else if (is_small(extent)) {
    memory = allocator->allocate(extent.len);
    std::memcpy(memory.get(), base_ + extent.at, extent.len);
  } else {
    c10::raw::intrusive_ptr::incref(owner_);
    memory = memory_of(base_ + extent.at, owner_, &drop_owner);
  }
  return tensor_over(storage_over(std::move(memory), extent.len, allocator), sizes,
                     c10::scalarTypeToTypeMeta(scalar_type(node.dtype)));
}

Ref Decoder::array(const Node& node) const {
  const DType& type = impl_.dtypes[node.entry];
  Ref dtype = type.flexible ? make_dtype(type, words_[node.word + node.count])
                            : Ref::to(impl_.objects().dtypes[node.entry].get());
  Ref shape = checked(PyTuple_New(node.count));
  for (uint32_t i = 0; i < node.count; ++i) {
    PyTuple_SET_ITEM(shape.get(), i,
                     checked(PyLong_FromUnsignedLong(words_[node.word + i])).release());
  }
  if (!size(node)) {
    PyObject* arguments[] = {shape.get(), dtype.get()};
    return checked(PyObject_Vectorcall(numpy().ndarray, arguments, 2, nullptr));
  }
  const Extent& extent = extents_[node.leaf];
  Ref memory =
      is_small(extent)
          ? checked(PyByteArray_FromStringAndSize(reinterpret_cast<const char*>(base_ + extent.at),
                                                  static_cast<Py_ssize_t>(extent.len)))
          : slice(base_ + extent.at, extent.len);
  PyObject* arguments[] = {shape.get(), dtype.get(), memory.get()};
  return checked(PyObject_Vectorcall(numpy().ndarray, arguments, 3, nullptr));
}

Ref Decoder::number_list(const Node& node) const {
  const uint8_t* values = payload(node);
  const auto count = static_cast<Py_ssize_t>(size(node) / 8);
  Ref list = checked(PyList_New(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = nullptr;
    if (node.kind == Kind::Ints) {
      int64_t value;
      std::memcpy(&value, values + 8 * i, 8);
      item = PyLong_FromLongLong(value);
    } else {
      double value;
      std::memcpy(&value, values + 8 * i, 8);
      item = PyFloat_FromDouble(value);
    }
    PyList_SET_ITEM(list.get(), i, checked(item).release());
  }
  return list;
}

Ref Decoder::named_tuple(const Node& node) {
  const auto known = impl_.resolve(node.entry);
  c10::SmallVector<Ref, 8> items;
  for (uint32_t i = 0; i < node.count; ++i) items.push_back(this->node());
  PyTypeObject* type = known->pytype();
  Ref made = checked(type->tp_alloc(type, node.count));
  for (uint32_t i = 0; i < node.count; ++i) {
    PyTuple_SET_ITEM(made.get(), i, items[i].release());
  }
  return made;
}

Ref Decoder::data_class(const Node& node) {
  const auto known = impl_.resolve(node.entry);
  static PyObject* maker = nullptr;
  if (!maker) {
    maker =
        checked(PyObject_GetAttrString(reinterpret_cast<PyObject*>(&PyBaseObject_Type), "__new__"))
            .release();
  }
  Ref made = checked(PyObject_CallOneArg(maker, known->type.get()));
  auto set = [&](PyObject* name) {
    if (impl_.nodes[next_].kind == Kind::Missing) {
      ++next_;
      return;
    }
    Ref value = this->node();
    // Past a __setattr__ of its own, which in a frozen class refuses.
    check(PyObject_GenericSetAttr(made.get(), name, value.get()));
  };
  for (const auto& name : known->names) set(name.get());
  const auto& names = impl_.objects().names;
  for (uint32_t i = 0; i < node.more; ++i) set(names[node.names + i].get());
  return made;
}

Ref Decoder::enum_member(const Node& node) const {
  const auto known = impl_.resolve(node.entry);
  Ref name = make_text(payload(node), size(node));
  Ref member(PyObject_GetItem(known->type.get(), name.get()));
  if (!member) {
    if (!PyErr_ExceptionMatches(PyExc_KeyError)) throw PythonError();
    PyErr_Clear();
    TORCH_CHECK_VALUE(false, "a sample was stored with the member ", ascii(name.get()), " of ",
                      type_name(known->pytype()), ", which has no such member now");
  }
  return member;
}

Ref Decoder::pairs(const Node& node) {
  Ref dict = checked(PyDict_New());
  for (uint32_t i = 0; i < node.count; ++i) {
    Ref key = this->node();
    Ref value = this->node();
    if (PyDict_SetItem(dict.get(), key.get(), value.get()) < 0) {
      if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw PythonError();
      PyErr_Clear();
      malformed("a dict with a key that cannot be one");
    }
  }
  if (PyDict_GET_SIZE(dict.get()) != Py_ssize_t{node.count}) malformed("a dict has a key twice");
  return dict;
}

// Its data, and its attributes if it has any: what from_parts would make of them.
Ref Decoder::tensor_subclass(const Node& node, const Known& known) {
  Ref made = checked(to_python(tensor(impl_.nodes[next_++]), known.pytype()));
  if (node.count == 2) {
    Ref attributes = this->node();
    check(PyObject_GenericSetDict(made.get(), attributes.get(), nullptr));
  }
  return made;
}

Ref Decoder::object(const Node& node) {
  const auto known = impl_.resolve(node.entry);
  const auto is = [&](size_t part, Kind kind) { return impl_.nodes[next_ + part].kind == kind; };
  if (known->over_data && node.count > 0 && is(0, Kind::Tensor) &&
      (node.count == 1 || (node.count == 2 && is(1, Kind::Dict)))) {
    return tensor_subclass(node, *known);
  }
  c10::SmallVector<Ref, 4> parts;
  c10::SmallVector<PyObject*, 4> arguments;
  for (uint32_t i = 0; i < node.count; ++i) {
    parts.push_back(this->node());
    arguments.push_back(parts.back().get());
  }
  Ref made(
      PyObject_Vectorcall(known->from_parts.get(), arguments.data(), arguments.size(), nullptr));
  if (made) return made;
  // Out of memory says nothing about the parts.
  if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)) {
    throw PythonError();
  }
  const std::string why = pending_error();
  PyErr_Clear();
  TORCH_CHECK_VALUE(false, "a sample was stored with ", with_article(type_name(known->pytype())),
                    ", which could not be made of its parts (", why, ")");
}

Ref Decoder::image(const Node& node) {
  const auto& image = impl_.images[node.entry];
  const std::string mode(impl_.text(image.mode)), palette_mode(impl_.text(image.palette));
  Ref pixels = slice(base_ + extents_[node.leaf].at, size(node));
  Ref made = checked(PyObject_CallFunction(KEPT("PIL.Image", "frombytes"), "s(II)O", mode.c_str(),
                                           words_[node.word], words_[node.word + 1], pixels.get()));
  if (!palette_mode.empty()) {
    const Extent& extent = extents_[node.leaf + 1];
    Ref palette = make_bytes(base_ + extent.at, extent.len);
    checked(
        PyObject_CallMethod(made.get(), "putpalette", "Os", palette.get(), palette_mode.c_str()));
  }
  if (impl_.nodes[next_].kind == Kind::Missing) {
    ++next_;
    return made;
  }
  Ref kept = this->node();
  Ref info = checked(PyObject_GetAttr(made.get(), NAME("info")));
  if (!PyDict_Check(kept.get())) malformed("an image whose info is no dict");
  check(PyDict_Update(info.get(), kept.get()));
  return made;
}

Ref Decoder::node() {
  const Node& node = impl_.nodes[next_++];
  switch (node.kind) {
    case Kind::Tensor:
      return checked(to_python(tensor(node)));
    case Kind::Int:
      return checked(PyLong_FromLongLong(number<int64_t>(node)));
    case Kind::Tuple: {
      Ref tuple = checked(PyTuple_New(node.count));
      for (uint32_t i = 0; i < node.count; ++i) {
        PyTuple_SET_ITEM(tuple.get(), i, this->node().release());
      }
      return tuple;
    }
    case Kind::List: {
      Ref list = checked(PyList_New(node.count));
      for (uint32_t i = 0; i < node.count; ++i) {
        PyList_SET_ITEM(list.get(), i, this->node().release());
      }
      return list;
    }
    case Kind::Dict:
    case Kind::OrderedDict:
      return make_dict(impl_, node, next_, [&] { return this->node(); });
    case Kind::Str:
      return make_text(payload(node), size(node));
    case Kind::Float:
      return checked(PyFloat_FromDouble(number<double>(node)));
    case Kind::Bool:
      return Ref::to(number<uint64_t>(node) ? Py_True : Py_False);
    case Kind::None:
      return Ref::to(Py_None);
    case Kind::Complex:
      return checked(PyComplex_FromDoubles(number<double>(node), number<double>(node, 1)));
    case Kind::Bytes:
      return make_bytes(payload(node), size(node));
    case Kind::ByteArray:
      return checked(PyByteArray_FromStringAndSize(reinterpret_cast<const char*>(payload(node)),
                                                   static_cast<Py_ssize_t>(size(node))));
    case Kind::BigInt: {
      Ref bytes = make_bytes(payload(node), size(node));
      Ref method =
          checked(PyObject_GetAttr(reinterpret_cast<PyObject*>(&PyLong_Type), NAME("from_bytes")));
      Ref arguments = checked(Py_BuildValue("(Os)", bytes.get(), "little"));
      Ref options = checked(Py_BuildValue("{s:O}", "signed", Py_True));
      return checked(PyObject_Call(method.get(), arguments.get(), options.get()));
    }
    case Kind::Array:
      return array(node);
    case Kind::NumpyScalar: {
      Ref memory = slice(number_at(node), impl_.dtypes[node.entry].itemsize);
      Ref shape = checked(PyTuple_New(0));
      PyObject* arguments[] = {shape.get(), impl_.objects().dtypes[node.entry].get(), memory.get()};
      Ref array = checked(PyObject_Vectorcall(numpy().ndarray, arguments, 3, nullptr));
      return checked(PyObject_GetItem(array.get(), shape.get()));
    }
    case Kind::NumpyStr: {
      Ref text = make_text(payload(node), size(node));
      return checked(PyObject_CallOneArg(numpy().str, text.get()));
    }
    case Kind::NumpyBytes: {
      Ref bytes = make_bytes(payload(node), size(node));
      return checked(PyObject_CallOneArg(numpy().bytes, bytes.get()));
    }
    case Kind::Ints:
    case Kind::Floats:
      return number_list(node);
    case Kind::Size: {
      Ref sizes = checked(PyTuple_New(node.count));
      for (uint32_t i = 0; i < node.count; ++i) {
        PyTuple_SET_ITEM(sizes.get(), i,
                         checked(PyLong_FromLongLong(number<int64_t>(node, i))).release());
      }
      return checked(PyObject_CallOneArg(reinterpret_cast<PyObject*>(size_type()), sizes.get()));
    }
    case Kind::NamedTuple:
      return named_tuple(node);
    case Kind::DataClass:
      return data_class(node);
    case Kind::Enum:
      return enum_member(node);
    case Kind::Pairs:
      return pairs(node);
    case Kind::Object:
      return object(node);
    case Kind::Image:
      return image(node);
    case Kind::Pickle: {
      Ref bytes = make_bytes(payload(node), size(node));
      return checked(PyObject_CallOneArg(KEPT("pickle", "loads"), bytes.get()));
    }
    case Kind::Missing:
      break;
  }
  malformed("an unknown kind of part");
}

}  // namespace

Ref decode_rest(const Schema::Impl& impl, const at::Tensor& rest, size_t first, uint32_t count) {
  Decoder decoder(impl, rest, Decoder::Of::kRest, first);
  Ref parts = checked(PyTuple_New(count));
  for (uint32_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(parts.get(), i, decoder.node().release());
  }
  return parts;
}

PyObject* Schema::decode(const at::Tensor& record, bool allow_pickle) const {
  TORCH_CHECK_VALUE(record.defined() && record.device().is_cpu() &&
                        record.layout() == at::kStrided && record.scalar_type() == at::kByte &&
                        record.dim() == 1 && record.is_contiguous(),
                    "a record is a contiguous CPU tensor of bytes with one dimension");
  TORCH_CHECK_VALUE(allow_pickle || !impl_->sums.needs_pickle,
                    "the sample holds objects stored with pickle, which can run any code when ",
                    "loaded; pass allow_pickle=True if you trust who wrote it");
  if (reinterpret_cast<uintptr_t>(record.const_data_ptr()) % 16) {
    return Decoder(*impl_, record.clone()).node().release();
  }
  return Decoder(*impl_, record).node().release();
}

}  // namespace stocache::codec
