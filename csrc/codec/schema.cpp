// Reads schemas, and believes nothing they say.
#include "codec_schema.h"

#include <cmath>

namespace stocache::codec {
namespace {

class Parser {
 public:
  explicit Parser(Schema::Impl& impl) : impl_(impl), in_(impl.text) {}

  void schema() {
    if (in_.byte() != kVersion) Reader::malformed("it is of another version");
    node(0, 0, false);
    if (in_.left()) Reader::malformed("bytes follow its end");
  }

 private:
  void node(int depth, uint32_t key, bool may_miss);
  void children(uint32_t count, int depth) {
    for (uint32_t i = 0; i < count; ++i) node(depth + 1, 0, false);
  }
  // A container: its children take at least a byte each.
  uint32_t child_count(int depth) {
    if (depth >= kDepthLimit) Reader::malformed("it is nested too deep");
    const uint32_t count = in_.count();
    if (count > in_.left()) Reader::malformed("it ends early");
    return count;
  }
  void add_leaf(uint32_t dims, uint32_t itemsize, bool fixed, uint8_t bits = 0) {
    impl_.leaves.push_back({impl_.words, dims, itemsize, bits, fixed});
    if (impl_.words + uint64_t{dims} > kRecordLimit / 4) Reader::malformed("too many words");
    impl_.words += dims;
    impl_.all_fixed &= fixed;
  }
  // A few bytes can ask for many: no record has more than fit into it.
  void add_numbers(uint64_t count) {
    if (impl_.numbers + count > kRecordLimit / 8) Reader::malformed("too many numbers");
    impl_.numbers += static_cast<uint32_t>(count);
  }
  uint32_t dims(size_t limit) {
    const uint32_t count = in_.count();
    if (count > limit) Reader::malformed("too many dimensions");
    return count;
  }
  uint32_t dtype() {
    auto parsed = parse_dtype(in_.text());
    if (!parsed) Reader::malformed("an unknown dtype");
    impl_.dtypes.push_back(*std::move(parsed));
    return static_cast<uint32_t>(impl_.dtypes.size() - 1);
  }
  uint32_t read_class(Kind kind);
  void key(int depth);

  Schema::Impl& impl_;
  Reader in_;
};

uint32_t Parser::read_class(Kind kind) {
  Schema::Impl::Class made{kind, {}, {}, {}};
  made.module = in_.text();
  made.qualified = in_.text();
  const size_t first = in_.at();
  const uint32_t fields = in_.count(), slots = in_.count();
  if ((kind != Kind::DataClass && slots) || (kind == Kind::Enum && fields)) {
    Reader::malformed("a class has fields of another kind");
  }
  for (const uint32_t count : {fields, slots}) {
    if (count > in_.left()) Reader::malformed("it ends early");
    for (uint32_t i = 0; i < count; ++i) in_.text();
  }
  made.count = fields + slots;
  made.fields = impl_.text.substr(first, in_.at() - first);
  impl_.classes.push_back(std::move(made));
  return static_cast<uint32_t>(impl_.classes.size() - 1);
}

void Parser::key(int depth) {
  switch (in_.byte()) {
    case 'n':
    case '0':
    case '1':
      return;
    case 'i':
      in_.raw<int64_t>();
      return;
    case 'f':
      // A NaN is found only by identity, so default_collate does not find it in the other samples.
      if (std::isnan(in_.raw<double>())) impl_.collatable = false;
      return;
    case 's':
    case 'y':
      in_.text();
      return;
    case '(': {
      const uint32_t count = child_count(depth);
      for (uint32_t i = 0; i < count; ++i) key(depth + 1);
      return;
    }
    default:
      Reader::malformed("an unknown kind of key");
  }
}

void Parser::node(int depth, uint32_t key, bool may_miss) {
  Schema::Impl::Node made{static_cast<Kind>(in_.byte())};
  made.key = key;
  made.word = impl_.words;
  made.number = impl_.numbers;
  made.leaf = static_cast<uint32_t>(impl_.leaves.size());
  const size_t self = impl_.nodes.size();
  impl_.nodes.push_back(made);
  switch (made.kind) {
    case Kind::Bool:
    case Kind::Int:
    case Kind::Float:
      add_numbers(1);
      break;
    case Kind::None:
      impl_.collatable = false;
      break;
    case Kind::Complex:
      add_numbers(2);
      impl_.collatable = false;
      break;
    case Kind::Str:
    case Kind::Bytes:
      add_leaf(1, 1, false);
      break;
    case Kind::BigInt:
    case Kind::ByteArray:
    case Kind::NumpyStr:
    case Kind::NumpyBytes:
      add_leaf(1, 1, false);
      impl_.collatable = false;
      break;
    case Kind::Pickle:
      add_leaf(1, 1, false);
      impl_.collatable = false;
      impl_.needs_pickle = true;
      break;
    case Kind::Ints:
    case Kind::Floats:
      add_leaf(1, 8, true);
      break;
    case Kind::Tensor: {
      made.type = static_cast<at::ScalarType>(in_.byte());
      if (!is_stored(made.type)) Reader::malformed("an unknown dtype");
      made.count = dims(kTensorDims);
      add_leaf(made.count, static_cast<uint32_t>(c10::elementSize(made.type)), true);
      break;
    }
    case Kind::Array: {
      made.entry = dtype();
      const DType& type = impl_.dtypes.back();
      made.count = dims(kArrayDims);
      made.type = type.torch;
      impl_.collatable &= type.torch != at::ScalarType::Undefined;
      add_leaf(made.count + type.flexible, type.itemsize, true);
      break;
    }
    case Kind::NumpyScalar: {
      made.entry = dtype();
      const DType& type = impl_.dtypes.back();
      if (type.flexible) Reader::malformed("an unknown dtype");
      made.type = type.torch;
      // torch.as_tensor refuses a list of numpy.uint64.
      impl_.collatable &=
          type.torch != at::ScalarType::Undefined && type.torch != at::ScalarType::UInt64;
      add_numbers((type.itemsize + 7) / 8);
      break;
    }
    case Kind::Image: {
      if (depth >= kDepthLimit) Reader::malformed("it is nested too deep");
      Schema::Impl::Image image{std::string(in_.text()), std::string(in_.text())};
      const auto* mode = image_mode(image.mode);
      if (!mode || (!image.palette.empty() && !(mode->palette && is_palette_mode(image.palette)))) {
        Reader::malformed("an unknown mode of an image");
      }
      add_leaf(2, 0, true, mode->bits);
      if (!image.palette.empty()) add_leaf(1, 1, false);
      impl_.collatable = false;
      made.entry = static_cast<uint32_t>(impl_.images.size());
      impl_.images.push_back(std::move(image));
      impl_.nodes[self] = made;
      node(depth + 1, 0, true);
      break;
    }
    case Kind::Tuple:
    case Kind::List:
      made.count = child_count(depth);
      impl_.nodes[self] = made;
      children(made.count, depth);
      break;
    case Kind::Size:
      made.count = in_.count();
      add_numbers(made.count);
      break;
    case Kind::Dict:
    case Kind::OrderedDict:
      made.count = child_count(depth);
      impl_.nodes[self] = made;
      for (uint32_t i = 0; i < made.count; ++i) {
        const size_t first = in_.at();
        this->key(depth);
        const auto index = static_cast<uint32_t>(impl_.keys.size());
        impl_.keys.emplace_back(first, in_.at() - first);
        node(depth + 1, index, false);
      }
      break;
    case Kind::NamedTuple:
      if (depth >= kDepthLimit) Reader::malformed("it is nested too deep");
      made.entry = read_class(made.kind);
      made.count = impl_.classes.back().count;
      impl_.nodes[self] = made;
      children(made.count, depth);
      break;
    case Kind::DataClass: {
      if (depth >= kDepthLimit) Reader::malformed("it is nested too deep");
      impl_.collatable = false;
      made.entry = read_class(made.kind);
      made.count = impl_.classes.back().count;
      made.names = static_cast<uint32_t>(impl_.names.size());
      made.more = child_count(depth);
      for (uint32_t i = 0; i < made.more; ++i) impl_.names.emplace_back(in_.text());
      impl_.nodes[self] = made;
      for (uint32_t i = 0; i < made.count; ++i) node(depth + 1, 0, true);
      children(made.more, depth);
      break;
    }
    case Kind::Enum:
      made.entry = read_class(made.kind);
      add_leaf(1, 1, false);
      impl_.collatable = false;
      break;
    case Kind::Missing:
      if (!may_miss) Reader::malformed("a part is missing");
      break;
    default:
      Reader::malformed("an unknown kind of part");
  }
  impl_.nodes[self] = made;
}

// A key, which was parsed before.
Ref make_key(Reader& in) {
  const char kind = in.byte();
  switch (kind) {
    case 'n':
      return Ref::to(Py_None);
    case '0':
      return Ref::to(Py_False);
    case '1':
      return Ref::to(Py_True);
    case 'i':
      return checked(PyLong_FromLongLong(in.raw<int64_t>()));
    case 'f':
      return checked(PyFloat_FromDouble(in.raw<double>()));
    case 's':
      return interned(in.text());
    case 'y': {
      const auto bytes = in.text();
      return checked(PyBytes_FromStringAndSize(bytes.data(), bytes.size()));
    }
    default: {
      const uint32_t count = in.count();
      Ref tuple = checked(PyTuple_New(count));
      for (uint32_t i = 0; i < count; ++i) {
        PyTuple_SET_ITEM(tuple.get(), i, make_key(in).release());
      }
      return tuple;
    }
  }
}

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

}  // namespace

const Schema::Impl::Objects& Schema::Impl::objects() const {
  if (made) return *made;
  auto objects = std::make_unique<Objects>();
  for (const auto& [first, size] : keys) {
    Reader in(std::string_view(text).substr(first, size));
    objects->keys.push_back(make_key(in));
  }
  for (const auto& name : names) objects->names.push_back(interned(name));
  for (const auto& dtype : dtypes) {
    objects->dtypes.push_back(dtype.flexible ? Ref() : make_dtype(dtype, 0));
  }
  for (const auto& entry : classes) {
    objects->paths.push_back({interned(entry.module), split(entry.qualified)});
  }
  objects->known.resize(classes.size());
  // Another thread may have been here: importing numpy lets others run.
  if (!made) made = std::move(objects);
  return *made;
}

// The class as it is now. Looked up each time, because a module may be reloaded; studied once.
std::shared_ptr<const Known> Schema::Impl::resolve(uint32_t entry) const {
  const Objects& python = objects();
  const auto& place = python.paths[entry];
  Ref found = find(place.module.get(), place.path);
  auto known = python.known[entry];
  if (known && known->type.get() == found.get()) return known;
  const Class& expected = classes[entry];
  const char* kind = expected.kind == Kind::NamedTuple  ? "a namedtuple"
                     : expected.kind == Kind::DataClass ? "a dataclass"
                                                        : "an Enum";
  known = PyType_Check(found.get()) ? study(reinterpret_cast<PyTypeObject*>(found.get())) : nullptr;
  TORCH_CHECK_VALUE(known && known->kind == expected.kind, "a sample was stored with ", kind, " ",
                    dotted(place.module.get(), place.path), ", which is now something else");
  TORCH_CHECK_VALUE(known->fields_bytes == expected.fields, "a sample was stored with ", kind, " ",
                    dotted(place.module.get(), place.path), ", which now has other fields");
  made->known[entry] = known;
  return known;
}

Schema::Schema(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}

Schema::~Schema() {
  if (!impl_->made) return;
  if (!Py_IsInitialized() || is_finalizing()) {
    impl_.release();  // too late to give references back
    return;
  }
  const PyGILState_STATE gil = PyGILState_Ensure();
  impl_.reset();
  PyGILState_Release(gil);
}

std::shared_ptr<const Schema> Schema::parse(std::string_view bytes) {
  TORCH_CHECK_VALUE(bytes.size() <= kSchemaLimit, "malformed schema: it is too long");
  auto impl = std::make_unique<Impl>();
  impl->text = bytes;
  Parser(*impl).schema();
  return std::shared_ptr<const Schema>(new Schema(std::move(impl)));
}

bool Schema::collatable() const { return impl_->collatable; }

bool Schema::needs_pickle() const { return impl_->needs_pickle; }

void damaged(const char* why) { TORCH_CHECK_VALUE(false, "damaged record: ", why); }

Ref make_text(const uint8_t* data, uint64_t size) {
  Ref made = decode_utf8({reinterpret_cast<const char*>(data), static_cast<size_t>(size)});
  if (!made) damaged("a string is not UTF-8");
  return made;
}

Ref make_bytes(const uint8_t* data, uint64_t size) {
  return checked(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(data),
                                           static_cast<Py_ssize_t>(size)));
}

}  // namespace stocache::codec
