// Takes samples apart and puts them together again.
//
// A sample is any nesting of Python objects. It becomes two strings of bytes:
//
// - The schema says what the sample is made of: containers with their keys, classes and the types
//   of the leaves, in preorder. It holds no values, shapes or lengths, so the samples of a dataset
//   have one or few. Only the number of dimensions of a tensor and the number of children of a
//   container belong to it; a list of int alone or of float alone is a leaf, of any length.
// - The record holds the rest:
//
//     words     u32 each: sizes of tensors, arrays and images, lengths of strings
//     numbers   8 bytes each, from the next multiple of 8: int, float, bool, complex (two), numpy
//               scalars
//     payloads  in the order of the leaves, each from the next multiple of 16; empty ones take no
//               place
//
//   The schema fixes how many words and numbers there are. Where schema and words are equal, all
//   offsets are equal. All integers are little endian.
//
// An object of any other type is stored by its parts, a tuple of such objects, as Python says of
// its type (python/stocache/_types/). The schema has the name of the type; what makes an object of
// its parts is looked up by it, and is never part of a record.
//
// What comes back equals what went in, types included. These are the exceptions, by choice:
//
// - Tensors come back contiguous and without requires_grad.
// - Arrays come back in C order and writable; a numpy.memmap comes back as a numpy.ndarray.
// - An image that PIL opened from a file comes back as a PIL.Image.Image. Of `info` is kept what
//   says how the pixels are to be shown: transparency, EXIF, XMP and the colour profile. Of a file
//   with several frames the current one is kept.
// - Instances of dataclasses are made without __init__, __new__ and __setstate__. All attributes
//   are kept, also those that are no fields; only __orig_class__, a note of typing, is not.
// - An object that occurs twice comes back as two objects.
//
// Everything here runs with the GIL held unless it says otherwise.
#pragma once

#include <Python.h>
// Python.h stays first.
#include <ATen/core/Tensor.h>
#include <sys/uio.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "stocache-torch/src/bridge.rs.h"

namespace stocache::codec {

// Bytes of a tensor, by its storage: the tensor may be given another one. What is left is that
// code of the program gives back a storage's memory.
struct Lent {
  c10::Storage storage;
  const void* data;
  uint64_t size;

  bool is_there() const;
};

// A sample taken apart. Keeps everything its parts point to alive, so the parts may be read without
// the GIL; it must be destroyed with the GIL held.
//
// The parts point into the memory of the sample's tensors and arrays: what is written to those
// before the parts are read is what the record will hold.
struct Encoded {
  Encoded() = default;
  Encoded(Encoded&&) noexcept = default;
  Encoded& operator=(Encoded&&) noexcept;
  ~Encoded();

  std::string schema;               // equal for samples of the same kind
  std::vector<struct iovec> parts;  // the record, in order; may be more than IOV_MAX
  uint64_t bytes = 0;               // the length of the record
  bool has_gradients = false;       // of a tensor, which the record does not hold; likewise
  bool has_strides = false;         // a tensor of another memory format

  // What the parts point to.
  std::unique_ptr<uint8_t[]> own;  // words, numbers and small payloads
  std::vector<std::unique_ptr<uint8_t[]>> copies;
  std::vector<Lent> storages;
  std::vector<PyObject*> objects;

  // False if code of the program has given back memory since that parts point to.
  bool is_there() const;
};

// Throws PythonError: of what the sample's own code raises, or of an UnsupportedSample for a type
// or a value that cannot be stored, which names the place within the sample and the remedy.
Encoded encode(PyObject* sample, bool allow_pickle);

class Schema {
 public:
  // c10::ValueError for anything that `encode` cannot have made. Needs no GIL.
  static std::shared_ptr<const Schema> parse(std::string_view bytes);
  ~Schema();

  // The sample in `record`, a 1-d contiguous CPU uint8 tensor of exactly the record's bytes that
  // belongs to the caller alone. Tensors and arrays of the sample are views over its memory, which
  // they keep alive, but for those that are small against it: they are copied. Each tensor gets a
  // storage of its own that spans just its bytes: torch may replace the memory of a storage when it
  // shares a tensor, under everything else that uses it.
  //
  // c10::ValueError for a damaged record, for a class that is gone or has other fields now, for a
  // type that is not known here or cannot be made of its parts, and for a schema with pickles
  // unless they are allowed; nothing is unpickled then. Modules of classes are imported if need be:
  // a schema must come from somebody who may say what is imported. A new reference, never nullptr.
  PyObject* decode(const at::Tensor& record, bool allow_pickle) const;

  // Whether there are records of this schema that can be collated here.
  bool collatable() const;
  // The same where a pipeline makes tensors of images.
  bool fusible() const;
  // Whether they differ in what is beside the pixels of images alone.
  bool is_like(const Schema& other) const;
  bool needs_pickle() const;
  // The schema itself.
  std::string_view bytes() const;
  const bridge::Schema& parsed() const;

  struct Impl;

 private:
  friend class Collation;
  friend bool is_collated_otherwise(const Schema& schema);
  explicit Schema(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

// Whether a program has told torch to collate a part of such samples in a way of its own
// (default_collate_fn_map): then they are not collated here.
bool is_collated_otherwise(const Schema& schema);

class Ref;

// What torch.utils.data.default_collate makes of the samples of a batch, whose records are gathered
// column by column. See rust/core/src/batches for where the records are and how they are copied.
//
//   Collation collation(batch);
//   if (!collation.plan(schema, allocate)) ...                        // decode and collate instead
//   collation.begin(threads);                                         // it goes on by itself
//   if (collation.batch().finish() == bridge::Gathered::Whole) ...    // no GIL needed
//   PyObject* made = collation.finish();                              // only then
class Collation {
 public:
  // Makes the tensor of one column. Called without the GIL if the caller does not hold it.
  using Allocate = std::function<at::Tensor(at::IntArrayRef, at::ScalarType)>;

  explicit Collation(::rust::Box<bridge::Batch> batch);

  bridge::Batch& batch() { return *batch_; }
  const bridge::Batch& batch() const { return *batch_; }

  // Checks what it can about the shapes and makes the tensors. False if no record is there, if
  // shapes differ, if a record is damaged, or if the schema holds what default_collate refuses or
  // treats in a way of its own. Lengths of strings may differ. Throws only what `allocate` throws.
  // Needs no GIL. Once.
  bool plan(std::shared_ptr<const Schema> schema, const Allocate& allocate);
  // The same by another batch of that schema, before any row is there.
  bool plan_like(std::shared_ptr<const Schema> schema, const bridge::Layout& layout,
                 const Allocate& allocate);
  // Begins to copy, on up to that many threads, this one included. Needs no GIL.
  void begin(size_t threads);
  // The batch, a new reference; once, after every row was copied. nullptr without a Python error if
  // a class wants its samples to be collated otherwise. Throws PythonError, or c10::ValueError if
  // strings or parts are damaged.
  PyObject* finish();

 private:
  void make_columns(const Allocate& allocate);
  Ref node(bool in_sequence);
  Ref strings(bool text, bool as_tuple);
  Ref object(const bridge::Node& node);
  const at::Tensor& rest(size_t row);

  std::shared_ptr<const Schema> schema_;
  std::vector<at::Tensor> columns_;
  std::vector<bool> are_turned_;   // with their channels last
  std::vector<at::Tensor> rests_;  // what rows keep beside them, as far as somebody asked
  size_t next_node_ = 0, next_column_ = 0, next_text_ = 0;
  ::rust::Box<bridge::Batch> batch_;  // goes first: until then the columns may be written to
};

// Adds stocache.UnsupportedSample to the module and, for tests and for a look inside:
//   codec_encode(sample, allow_pickle=False) -> (schema, record), both bytes
//   codec_decode(schema, record, allow_pickle=False) -> sample; over a record that is a tensor,
//       over a copy of one that is bytes
//   codec_collate(schema, records, threads=1) -> batch, or NotImplemented
//   note_registration(): what is known of types is asked of stocache._types again
// False with a Python error if that failed.
bool add_codec(PyObject* module);

}  // namespace stocache::codec
