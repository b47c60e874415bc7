// The Python objects that a schema stands for.
#include "codec/schema.h"

#include <bit>

#include "api/errors.h"

namespace stocache::codec {
namespace {

// The key at `next` and, if it is a tuple, all that is in it.
Ref make_key(const Schema::Impl& impl, size_t& next) {
  const bridge::Key& key = impl.keys[next++];
  switch (key.kind) {
    case 'n':
      return Ref::to(Py_None);
    case '0':
      return Ref::to(Py_False);
    case '1':
      return Ref::to(Py_True);
    case 'i':
      return checked(PyLong_FromLongLong(static_cast<int64_t>(key.bits)));
    case 'f':
      return checked(PyFloat_FromDouble(std::bit_cast<double>(key.bits)));
    case 's':
      return interned(impl.text(key.text));
    case 'y': {
      const auto bytes = impl.text(key.text);
      return checked(PyBytes_FromStringAndSize(bytes.data(), bytes.size()));
    }
    default: {
      Ref tuple = checked(PyTuple_New(key.count));
      for (uint32_t i = 0; i < key.count; ++i) {
        PyTuple_SET_ITEM(tuple.get(), i, make_key(impl, next).release());
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

Schema::Impl::Impl(::rust::Box<bridge::Schema> schema)
    : parsed(std::move(schema)),
      sums(parsed->sums()),
      nodes(parsed->nodes()),
      keys(parsed->keys()),
      classes(parsed->classes()),
      images(parsed->images()),
      names(parsed->names()) {
  for (const auto& [span, dtype] : parsed->dtypes()) {
    dtypes.push_back({std::string(text(span)), dtype.itemsize, dtype.flexible});
  }
}

const Schema::Impl::Objects& Schema::Impl::objects() const {
  if (made) return *made;
  auto objects = std::make_unique<Objects>();
  objects->keys.resize(keys.size());
  for (size_t next = 0; next < keys.size();) {
    const size_t first = next;
    objects->keys[first] = make_key(*this, next);
  }
  for (const auto& name : names) objects->names.push_back(interned(text(name)));
  for (const auto& dtype : dtypes) {
    objects->dtypes.push_back(dtype.flexible ? Ref() : make_dtype(dtype, 0));
  }
  for (const auto& entry : classes) {
    objects->paths.push_back({interned(text(entry.module)), split(text(entry.qualified))});
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
  if (known && known->type.get() == found.get() && is_current(*known)) return known;
  const bridge::Class& expected = classes[entry];
  const char* kind = expected.kind == Kind::NamedTuple  ? "a namedtuple"
                     : expected.kind == Kind::DataClass ? "a dataclass"
                     : expected.kind == Kind::Object    ? "an object of the type"
                                                        : "an Enum";
  const std::string name = dotted(place.module.get(), place.path);
  auto* type = PyType_Check(found.get()) ? reinterpret_cast<PyTypeObject*>(found.get()) : nullptr;
  if (expected.kind == Kind::Object) {
    known = type ? study_parts(type) : nullptr;
    TORCH_CHECK_VALUE(known, "a sample was stored with ", kind, " ", name, ", which is not known ",
                      "here; call stocache.register_type where the type is defined, so that every ",
                      "process does");
  } else {
    known = type ? study(type) : nullptr;
    TORCH_CHECK_VALUE(known && known->kind == expected.kind, "a sample was stored with ", kind, " ",
                      name, ", which is now something else");
  }
  TORCH_CHECK_VALUE(known->fields_bytes == text(expected.fields), "a sample was stored with ", kind,
                    " ", name, ", which now has other fields");
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
  auto impl =
      std::make_unique<Impl>(translated([&] { return bridge::parse_schema(as_slice(bytes)); }));
  return std::shared_ptr<const Schema>(new Schema(std::move(impl)));
}

bool Schema::collatable() const { return impl_->sums.collatable; }

bool Schema::fusible() const { return impl_->sums.fusible; }

bool Schema::is_like(const Schema& other) const {
  return impl_->parsed->is_like(*other.impl_->parsed);
}

const bridge::Schema& Schema::parsed() const { return *impl_->parsed; }

bool Schema::needs_pickle() const { return impl_->sums.needs_pickle; }

std::string_view Schema::bytes() const { return as_text(impl_->parsed->bytes()); }

void malformed(const char* why) { TORCH_CHECK_VALUE(false, "malformed schema: ", why); }

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
