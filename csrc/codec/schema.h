// A schema, parsed: what decoding and collating share.
#pragma once

#include "codec.h"
// Python.h stays first.
#include <cstdint>
#include <vector>

#include "codec_classes.h"

namespace stocache::codec {

struct Schema::Impl {
  struct Node {
    Kind kind;
    at::ScalarType type = at::ScalarType::Undefined;  // of a tensor
    uint32_t count = 0;                               // children; dims of a tensor or array
    uint32_t entry = 0;                               // in `classes`, `dtypes` or `images`
    uint32_t word = 0;                                // its first
    uint32_t number = 0;                              // its first
    uint32_t leaf = 0;                                // its first payload
    uint32_t key = 0;                                 // the key of this child in the dict around it
    uint32_t names = 0;                               // of a dataclass: the first in `names`
    uint32_t more = 0;                                // how many of them
  };
  // A payload. Its size follows from words.
  struct Leaf {
    uint32_t word;
    uint32_t dims;  // how many words to multiply
    uint32_t itemsize;
    uint8_t bits = 0;   // of an image: per pixel
    bool fixed = true;  // the same size in every row of a batch
  };
  struct Extent {
    uint64_t at = 0;
    uint64_t size = 0;
  };
  struct Class {
    Kind kind;
    std::string module, qualified, fields;
    uint32_t count = 0;  // of fields and slots
  };
  struct Image {
    std::string mode, palette;
  };
  // What decoding needs of Python, made at its first use.
  struct Objects {
    std::vector<Ref> keys, names, dtypes;
    struct Path {
      Ref module;
      std::vector<Ref> path;
    };
    std::vector<Path> paths;
    std::vector<std::shared_ptr<const Known>> known;  // by class; those that were found
  };

  std::string text;  // the schema itself
  std::vector<Node> nodes;
  std::vector<Leaf> leaves;
  std::vector<std::pair<size_t, size_t>> keys;  // where they lie in `text`
  std::vector<Class> classes;
  std::vector<DType> dtypes;
  std::vector<Image> images;
  std::vector<std::string> names;
  uint32_t words = 0;
  uint32_t numbers = 0;
  bool needs_pickle = false;
  bool collatable = true;
  bool all_fixed = true;
  mutable std::unique_ptr<Objects> made;

  uint64_t numbers_at() const { return round_up(4 * uint64_t{words}, 8); }
  // Where the words and numbers end.
  uint64_t head() const {
    return numbers ? numbers_at() + 8 * uint64_t{numbers} : 4 * uint64_t{words};
  }

  // Where the payloads lie in a record of `length` bytes with these words. False: there is no such
  // record.
  bool layout(const uint32_t* values, uint64_t length, Extent* extents) const {
    uint64_t at = head();
    if (at > length) return false;
    for (const Leaf& leaf : leaves) {
      const uint32_t* dims = values + leaf.word;
      uint64_t size = 0;
      const bool good = leaf.bits ? multiply_pixels(dims[0], dims[1], leaf.bits, size)
                                  : multiply(dims, leaf.dims, leaf.itemsize, size);
      if (!good) return false;
      if (size) {
        at = round_up(at, 16);
        if (at > length || size > length - at) return false;
        *extents = {at, size};
        at += size;
      }
      ++extents;
    }
    return at == length;
  }

  const Objects& objects() const;
  std::shared_ptr<const Known> resolve(uint32_t entry) const;
};

[[noreturn]] void damaged(const char* why);
// Parts of a record. ValueError if they are damaged.
Ref make_text(const uint8_t* data, uint64_t size);
Ref make_bytes(const uint8_t* data, uint64_t size);

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
  if (PyDict_GET_SIZE(dict.get()) != Py_ssize_t{node.count}) {
    Reader::malformed("a dict has a key twice");
  }
  return dict;
}

}  // namespace stocache::codec
