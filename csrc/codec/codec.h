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
// What comes back equals what went in, types included. These are the exceptions, by choice:
//
// - Tensors come back contiguous, without requires_grad and without Python attributes of their own.
// - Arrays come back in C order and writable; a numpy.memmap comes back as a numpy.ndarray.
// - An image that PIL opened from a file comes back as a PIL.Image.Image. Of `info` only the
//   transparency is kept, because it decides how the pixels look. Of a file with several frames the
//   current one is kept.
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

namespace stocache::codec {

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

  // What the parts point to.
  std::unique_ptr<uint8_t[]> own;  // words, numbers and small payloads
  std::vector<std::unique_ptr<uint8_t[]>> copies;
  std::vector<at::Tensor> tensors;
  std::vector<PyObject*> objects;
};

// Throws python_error for what the sample's own code raises, c10::TypeError for a type that cannot
// be stored and c10::ValueError for a value that cannot; both name the place within the sample.
Encoded encode(PyObject* sample, bool allow_pickle);

class Schema : public std::enable_shared_from_this<Schema> {
 public:
  // c10::ValueError for anything that `encode` cannot have made. Needs no GIL.
  static std::shared_ptr<const Schema> parse(std::string_view bytes);
  ~Schema();

  // The sample in `record`, a 1-d contiguous CPU uint8 tensor of exactly the record's bytes that
  // belongs to the caller alone. Tensors and arrays of the sample are views over its memory, which
  // they keep alive. Each tensor gets a storage of its own that spans just its bytes: torch may
  // replace the memory of a storage when it shares a tensor, under everything else that uses it.
  //
  // c10::ValueError for a damaged record, for a class that is gone or has other fields now, and for
  // a schema with pickles unless they are allowed; nothing is unpickled then. Modules of classes
  // are imported if need be: a schema must come from somebody who may say what is imported. A new
  // reference, never nullptr.
  PyObject* decode(const at::Tensor& record, bool allow_pickle) const;

  // Makes the tensor of one column. Called without the GIL if the caller does not hold it.
  using Allocate = std::function<at::Tensor(at::IntArrayRef, at::ScalarType)>;
  using Records = c10::ArrayRef<std::pair<const uint8_t*, uint64_t>>;

  // What torch.utils.data.default_collate makes of these samples: all steps of Collation at once,
  // the copy without the GIL. nullptr without a Python error: not collatable here.
  PyObject* collate(Records records, const Allocate& allocate) const;

  // Whether there are records of this schema that can be collated here.
  bool collatable() const;
  bool needs_pickle() const;

  struct Impl;

 private:
  friend class Collation;
  explicit Schema(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

// A batch in the making: many records of one schema, gathered column by column into what
// default_collate makes of them. Entries that a program adds to default_collate_fn_map are not
// asked: whoever finds some falls back.
//
//   auto collation = Collation::plan(schema, records, allocate);  // any thread, no GIL needed
//   if (!collation) ...                                           // fall back: decode and collate
//   collation->copy(0, collation->rows()) || ...                  // any threads, no GIL
//   ...                                                           // were the records overwritten?
//   PyObject* batch = collation->finish();                        // GIL
//
// The records are read by `plan` and `copy` only. Another process may write to them meanwhile: no
// byte in them can make these steps read or write out of bounds, but the batch is then nonsense and
// must be dropped before `finish`. The pointers must stay valid until the copy is done.
class Collation {
 public:
  // Checks what it can about the shapes and makes the tensors. nullptr if there are no records, if
  // shapes differ, if a record is damaged, or if the schema holds what default_collate refuses or
  // treats in a way of its own. Lengths of strings may differ. Throws only what `allocate` throws.
  static std::unique_ptr<Collation> plan(std::shared_ptr<const Schema> schema,
                                         Schema::Records records, const Schema::Allocate& allocate);
  ~Collation();

  size_t rows() const;
  // How many bytes `copy` moves for all rows, to decide about threads.
  uint64_t bytes() const;
  // Copies these rows of every column; false if one has another shape than the first: then there is
  // no batch. Reads and copies only; threads may do different rows at the same time.
  bool copy(size_t first_row, size_t last_row) const noexcept;
  // The batch, a new reference; once, after every row was copied. Throws python_error, or
  // c10::ValueError if strings are damaged.
  PyObject* finish();

 private:
  struct Impl;
  explicit Collation(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// For tests and for a look inside, up to an entry of nullptrs:
//   codec_encode(sample, allow_pickle=False) -> (schema, record), both bytes
//   codec_decode(schema, record, allow_pickle=False) -> sample; over a record that is a tensor,
//       over a copy of one that is bytes
//   codec_collate(schema, records, threads=1) -> batch, or NotImplemented
extern PyMethodDef codec_methods[];

}  // namespace stocache::codec
