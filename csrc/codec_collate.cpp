// Records to batches: Collation gathers equal columns of many records.
#include "codec_schema.h"
// Python.h stays first.
#include <ATen/Functions.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>

#include "python_support.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace stocache::codec {
namespace {

using python::WithoutGil;

// A column of this size is out of the processor's caches before anybody reads it.
constexpr uint64_t kBeyondCaches = 16 << 20;
constexpr uint64_t kPage = 4096;

// As memcpy, but past the caches: memory that is only written is not read first.
void stream(uint8_t* to, const uint8_t* from, size_t size) {
#ifdef __SSE2__
  const size_t head = -reinterpret_cast<uintptr_t>(to) % 16;
  std::memcpy(to, from, head);
  to += head;
  from += head;
  size -= head;
  for (; size >= 64; to += 64, from += 64, size -= 64) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();  // others see what was written once they see that this thread is done
#endif
  std::memcpy(to, from, size);
}

}  // namespace

PyObject* Schema::collate(Records records, const Allocate& allocate) const {
  auto collation = Collation::plan(shared_from_this(), records, allocate);
  if (!collation) return nullptr;
  bool alike = false;
  {
    WithoutGil free(collation->bytes() >= (64 << 10));  // costs more than a small copy
    alike = collation->copy(0, collation->rows());
  }
  return alike ? collation->finish() : nullptr;
}

struct Collation::Impl {
  using Extent = Schema::Impl::Extent;

  // One tensor of the batch.
  struct Column {
    at::Tensor batch;
    uint8_t* to;
    uint64_t row_bytes;
    int64_t leaf;     // the payload it lies in; -1: at the same place in every record
    uint64_t offset;  // in that payload, or in the record
    bool truth;       // of bool: a number of 8 bytes becomes one byte
  };
  // One string of one row, in the arena.
  struct Text {
    uint64_t at;
    uint64_t size;
  };

  std::shared_ptr<const Schema> schema;
  std::vector<std::pair<const uint8_t*, uint64_t>> records;
  // The words of the first record, read once: in the record they may change.
  std::vector<uint32_t> words;
  std::vector<Extent> extents;  // of one row, or of all if they differ
  size_t stride = 0;            // from one row to the next
  std::vector<Column> columns;
  std::vector<uint32_t> text_leaves;
  std::vector<Text> texts;  // row by row
  std::unique_ptr<uint8_t[]> arena;
  uint64_t bytes = 0;
  // Of `finish`:
  size_t next_node = 0, next_column = 0, next_text = 0;

  const Schema::Impl& parsed() const { return *schema->impl_; }
  bool lay_out();
  void make_columns(const Schema::Allocate& allocate);
  void make_texts();

  const uint8_t* source(const Column& column, size_t row) const {
    const uint64_t at = column.leaf < 0 ? 0 : extents[row * stride + column.leaf].at;
    return records[row].first + at + column.offset;
  }
  template <size_t size>
  void copy_fixed(const Column& column, size_t first, size_t last) const {
    uint8_t* to = column.to + first * size;
    for (size_t row = first; row < last; ++row, to += size) {
      std::memcpy(to, source(column, row), size);
    }
  }
  // Whether these rows have the shapes of the first one; they are as long as it.
  bool are_alike(size_t first, size_t last) const {
    const auto alike = [&](const auto& record) {
      return std::memcmp(record.first, words.data(), 4 * words.size()) == 0;
    };
    return words.empty() || std::all_of(records.begin() + first, records.begin() + last, alike);
  }
  void copy_column(const Column& column, size_t first, size_t last) const;
  void copy_texts(size_t first, size_t last) const;

  PyObject* wrap(Column& column) { return THPVariable_Wrap(std::move(column.batch)); }
  Ref node(bool in_sequence);
  Ref strings(bool text, bool as_tuple);
};

// Checks every record, and finds out where its payloads lie.
bool Collation::Impl::lay_out() {
  const auto& schema = parsed();
  const size_t leaves = schema.leaves.size();
  auto read = [&](size_t row, std::vector<uint32_t>& to) {
    if (records[row].second < schema.head()) return false;
    to.resize(schema.words);
    if (!to.empty()) std::memcpy(to.data(), records[row].first, 4 * to.size());
    return true;
  };
  if (!read(0, words)) return false;
  extents.resize(leaves);
  if (!schema.layout(words.data(), records[0].second, extents.data())) return false;
  if (schema.all_fixed) {
    // All are alike or there is no batch. `copy` looks at the words: where records are small, a
    // look at each of them costs about as much as its copy, and `copy` has threads.
    const auto as_long = [&](const auto& record) { return record.second == records[0].second; };
    return std::all_of(records.begin(), records.end(), as_long);
  }
  std::vector<uint32_t> other;
  for (size_t row = 1; row < records.size(); ++row) {
    if (!read(row, other)) return false;
    const bool same = other == words && records[row].second == records[0].second;
    if (same && !stride) continue;
    if (!stride) {
      stride = leaves;
      extents.resize(leaves * records.size());
      for (size_t before = 1; before < row; ++before) {
        std::copy_n(extents.begin(), leaves, extents.begin() + before * leaves);
      }
    }
    for (const auto& leaf : schema.leaves) {
      const auto first = words.begin() + leaf.word;
      if (leaf.fixed && !std::equal(first, first + leaf.dims, other.begin() + leaf.word)) {
        return false;
      }
    }
    if (!schema.layout(other.data(), records[row].second, extents.data() + row * leaves)) {
      return false;
    }
  }
  return true;
}

void Collation::Impl::make_columns(const Schema::Allocate& allocate) {
  const auto& schema = parsed();
  std::vector<int64_t> sizes;
  auto add = [&](at::ScalarType type, uint64_t row_bytes, int64_t leaf, uint64_t offset,
                 bool truth = false) {
    at::Tensor batch = allocate(sizes, type);
    TORCH_CHECK(batch.defined() && batch.device().is_cpu() && batch.scalar_type() == type &&
                    batch.sizes() == at::IntArrayRef(sizes) && batch.is_contiguous(),
                "a batch was allocated with another shape, dtype or layout than asked for");
    auto* to = static_cast<uint8_t*>(batch.mutable_data_ptr());
    bytes += row_bytes * records.size();
    columns.push_back({std::move(batch), to, row_bytes, leaf, offset, truth});
  };
  for (const auto& node : schema.nodes) {
    const uint64_t number = schema.numbers_at() + 8 * uint64_t{node.number};
    sizes.assign(1, static_cast<int64_t>(records.size()));
    switch (node.kind) {
      case Kind::Int:
        add(at::kLong, 8, -1, number);
        break;
      case Kind::Float:
        add(at::kDouble, 8, -1, number);
        break;
      case Kind::Bool:
        add(at::kBool, 1, -1, number, true);
        break;
      case Kind::NumpyScalar:
        add(node.type, c10::elementSize(node.type), -1, number);
        break;
      case Kind::Size:
        for (uint32_t i = 0; i < node.count; ++i) add(at::kLong, 8, -1, number + 8 * uint64_t{i});
        break;
      case Kind::Tensor:
      case Kind::Array:
        for (uint32_t i = 0; i < node.count; ++i) sizes.push_back(words[node.word + i]);
        add(node.type, extents[node.leaf].size, node.leaf, 0);
        break;
      case Kind::Ints:
      case Kind::Floats:
        for (uint64_t at = 0; at < extents[node.leaf].size; at += 8) {
          add(node.kind == Kind::Ints ? at::kLong : at::kDouble, 8, node.leaf, at);
        }
        break;
      case Kind::Str:
      case Kind::Bytes:
        text_leaves.push_back(node.leaf);
        break;
      default:
        break;
    }
  }
}

void Collation::Impl::make_texts() {
  uint64_t size = 0;
  texts.reserve(text_leaves.size() * records.size());
  for (size_t row = 0; row < records.size() && !text_leaves.empty(); ++row) {
    for (const uint32_t leaf : text_leaves) {
      texts.push_back({size, extents[row * stride + leaf].size});
      size += texts.back().size;
    }
  }
  arena.reset(new uint8_t[size]);
  bytes += size;
}

void Collation::Impl::copy_column(const Column& column, size_t first, size_t last) const {
  if (column.truth) {
    for (size_t row = first; row < last; ++row) {
      uint64_t value;
      std::memcpy(&value, source(column, row), 8);
      column.to[row] = value != 0;
    }
    return;
  }
  switch (column.row_bytes) {
    case 0:
      return;
    case 1:
      return copy_fixed<1>(column, first, last);
    case 2:
      return copy_fixed<2>(column, first, last);
    case 4:
      return copy_fixed<4>(column, first, last);
    case 8:
      return copy_fixed<8>(column, first, last);
    case 16:
      return copy_fixed<16>(column, first, last);
    case 32:
      return copy_fixed<32>(column, first, last);
    case 64:
      return copy_fixed<64>(column, first, last);
    default:
      break;
  }
  const uint64_t size = column.row_bytes;
  uint8_t* to = column.to + first * size;
  if (size < 64) {
    for (size_t row = first; row < last; ++row, to += size) {
      const uint8_t* from = source(column, row);
      uint64_t at = 0;
      for (; at + 8 <= size; at += 8) std::memcpy(to + at, from + at, 8);
      for (; at < size; ++at) to[at] = from[at];
    }
    return;
  }
  const bool beyond_caches = size >= kPage && size * records.size() >= kBeyondCaches;
  for (size_t row = first; row < last; ++row, to += size) {
    if (beyond_caches) {
      stream(to, source(column, row), size);
    } else {
      std::memcpy(to, source(column, row), size);
    }
  }
}

void Collation::Impl::copy_texts(size_t first, size_t last) const {
  const size_t count = text_leaves.size();
  for (size_t row = first; row < last && count; ++row) {
    for (size_t i = 0; i < count; ++i) {
      const Text& text = texts[row * count + i];
      if (text.size == 0) continue;
      const auto& extent = extents[row * stride + text_leaves[i]];
      std::memcpy(arena.get() + text.at, records[row].first + extent.at, text.size);
    }
  }
}

// The strings of a column, in what default_collate puts them: zip makes tuples, the rest lists.
Ref Collation::Impl::strings(bool text, bool as_tuple) {
  const size_t column = next_text++;
  const auto rows = static_cast<Py_ssize_t>(records.size());
  Ref made = checked(as_tuple ? PyTuple_New(rows) : PyList_New(rows));
  for (Py_ssize_t row = 0; row < rows; ++row) {
    const Text& found = texts[row * text_leaves.size() + column];
    const uint8_t* data = arena.get() + found.at;
    PyObject* item = (text ? make_text(data, found.size) : make_bytes(data, found.size)).release();
    if (as_tuple) {
      PyTuple_SET_ITEM(made.get(), row, item);
    } else {
      PyList_SET_ITEM(made.get(), row, item);
    }
  }
  return made;
}

Ref Collation::Impl::node(bool in_sequence) {
  const auto& schema = parsed();
  const auto& node = schema.nodes[next_node++];
  // Tuples become lists, as in default_collate.
  auto list = [&](size_t count, auto&& next) {
    Ref made = checked(PyList_New(static_cast<Py_ssize_t>(count)));
    for (size_t i = 0; i < count; ++i) {
      PyList_SET_ITEM(made.get(), static_cast<Py_ssize_t>(i), next().release());
    }
    return made;
  };
  auto column = [&] { return checked(wrap(columns[next_column++])); };
  switch (node.kind) {
    case Kind::Str:
      return strings(true, in_sequence);
    case Kind::Bytes:
      return strings(false, in_sequence);
    case Kind::Tuple:
    case Kind::List:
      return list(node.count, [&] { return this->node(true); });
    case Kind::Size:
      return list(node.count, column);
    case Kind::Ints:
    case Kind::Floats:
      return list(extents[node.leaf].size / 8, column);
    case Kind::Dict:
    case Kind::OrderedDict:
      return make_dict(schema, node, next_node, [&] { return this->node(false); });
    case Kind::NamedTuple: {
      const auto known = schema.resolve(node.entry);
      Ref items = checked(PyTuple_New(node.count));
      for (uint32_t i = 0; i < node.count; ++i) {
        PyTuple_SET_ITEM(items.get(), i, this->node(true).release());
      }
      return checked(PyObject_Call(known->type.get(), items.get(), nullptr));
    }
    default:
      return column();
  }
}

Collation::Collation(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Collation::~Collation() = default;

std::unique_ptr<Collation> Collation::plan(std::shared_ptr<const Schema> schema,
                                           Schema::Records records,
                                           const Schema::Allocate& allocate) {
  if (records.empty() || !schema->collatable()) return nullptr;
  auto impl = std::make_unique<Impl>();
  impl->schema = std::move(schema);
  impl->records.assign(records.begin(), records.end());
  if (!impl->lay_out()) return nullptr;
  impl->make_columns(allocate);
  impl->make_texts();
  return std::unique_ptr<Collation>(new Collation(std::move(impl)));
}

size_t Collation::rows() const { return impl_->records.size(); }

uint64_t Collation::bytes() const { return impl_->bytes; }

bool Collation::copy(size_t first_row, size_t last_row) const noexcept {
  // A few rows at a time: what a record's columns share is then still in the processor's cache.
  constexpr size_t block = 64;
  const bool unchecked = impl_->parsed().all_fixed;
  for (size_t first = first_row; first < last_row; first += block) {
    const size_t last = std::min(first + block, last_row);
    if (unchecked && !impl_->are_alike(first, last)) return false;
    for (const auto& column : impl_->columns) impl_->copy_column(column, first, last);
    impl_->copy_texts(first, last);
  }
  return true;
}

PyObject* Collation::finish() {
  TORCH_CHECK(impl_->next_node == 0, "a batch is finished once");
  return impl_->node(false).release();
}

}  // namespace stocache::codec
