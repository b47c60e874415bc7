// A schema for Python: what decoding and collating share. The parser is in Rust
// (rust/core/src/records/schema); here are the objects that its tables stand for.
#pragma once

#include "codec/codec.h"
// Python.h stays first.
#include <cstdint>
#include <vector>

#include "codec/classes.h"

namespace stocache::codec {

struct Schema::Impl {
  using Node = bridge::Node;
  using Extent = bridge::Extent;

  // What decoding needs of Python, made at its first use.
  struct Objects {
    std::vector<Ref> keys;  // by their place in `keys`; those inside a tuple are not there
    std::vector<Ref> names, dtypes;
    struct Path {
      Ref module;
      std::vector<Ref> path;
    };
    std::vector<Path> paths;
    std::vector<std::shared_ptr<const Known>> known;  // by class; those that were found
  };

  explicit Impl(::rust::Box<bridge::Schema> schema);

  ::rust::Box<bridge::Schema> parsed;
  const bridge::SchemaSums sums;
  // Tables of `parsed`.
  const ::rust::Slice<const Node> nodes;
  const ::rust::Slice<const bridge::Key> keys;
  const ::rust::Slice<const bridge::Class> classes;
  const ::rust::Slice<const bridge::Image> images;
  const ::rust::Slice<const bridge::Span> names;
  std::vector<DType> dtypes;
  mutable std::unique_ptr<Objects> made;

  std::string_view text(const bridge::Span& span) const {
    return as_text(parsed->bytes()).substr(span.at, span.len);
  }
  const Objects& objects() const;
  std::shared_ptr<const Known> resolve(uint32_t entry) const;
};

inline at::ScalarType scalar_type(int8_t number) { return static_cast<at::ScalarType>(number); }

[[noreturn]] void damaged(const char* why);
[[noreturn]] void malformed(const char* why);
// Parts of a record. ValueError if they are damaged.
Ref make_text(const uint8_t* data, uint64_t size);
Ref make_bytes(const uint8_t* data, uint64_t size);

// Parts of one row of a batch, from that node on, in what it keeps beside its columns: a tuple.
Ref decode_rest(const Schema::Impl& impl, const at::Tensor& rest, size_t first, uint32_t count);

// A dict of this node, whose values `make` makes one after the other; `next` is the node of the
// value that it makes next.
template <typename Make>
Ref make_dict(const Schema::Impl& impl, const Schema::Impl::Node& node, const size_t& next,
              Make&& make) {
  const auto& keys = impl.objects().keys;
  const bool ordered = node.kind == Kind::OrderedDict;
  Ref dict = checked(ordered ? PyODict_New() : PyDict_New());
  for (uint32_t i = 0; i < node.count; ++i) {
    PyObject* key = keys[impl.nodes[next].key].get();
    Ref value = make();
    check(ordered ? PyODict_SetItem(dict.get(), key, value.get())
                  : PyDict_SetItem(dict.get(), key, value.get()));
  }
  if (PyDict_GET_SIZE(dict.get()) != Py_ssize_t{node.count}) malformed("a dict has a key twice");
  return dict;
}

}  // namespace stocache::codec
