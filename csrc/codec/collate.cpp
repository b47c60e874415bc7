// Records to batches: the tensors and lists that the columns of a batch stand for. The columns and
// the copies are in Rust (rust/core/src/batches).
#include "codec/schema.h"
// Python.h stays first.
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "api/errors.h"

namespace stocache::codec {
namespace {

// Whether default_collate stacks such objects, as far as that can be known now.
bool is_stacked(const Schema::Impl& impl, const bridge::Node& node) {
  try {
    const auto known = impl.resolve(node.entry);
    if (!known->stacked) return false;
    Ref stacked = checked(
        PyObject_CallOneArg(KEPT("stocache._types.stacking", "is_stacked"), known->type.get()));
    return stacked.get() == Py_True;
  } catch (const c10::ValueError&) {  // who decodes it will tell
    return false;
  }
}

// A class wants its samples to be collated otherwise.
struct Otherwise {};

}  // namespace

bool is_collated_otherwise(const Schema& schema) {
  static PyObject* last = nullptr;     // default_collate_fn_map, as it was at the last look
  static PyObject* changed = nullptr;  // the kinds that it says something else of, as bytes
  Ref now = checked(PyObject_GetAttr(KEPT("stocache._torch.collation", "torchs"),
                                     NAME("default_collate_fn_map")));
  // Ours while it is compared: that runs code of the user's, which may come back here.
  Ref before = Ref::to(last);
  const int same = before ? PyObject_RichCompareBool(now.get(), before.get(), Py_EQ) : 0;
  check(same);
  if (!same) {
    // A copy: that of torch is changed in place.
    Ref copy = checked(PyDict_Copy(now.get()));
    Ref kinds = checked(
        PyObject_CallOneArg(KEPT("stocache._torch.collation", "changed_kinds"), copy.get()));
    char* data = nullptr;
    Py_ssize_t size = 0;
    check(PyBytes_AsStringAndSize(kinds.get(), &data, &size));
    // What they replace goes at the end: it may run code that comes back here.
    Ref old_map(std::exchange(last, copy.release()));
    Ref old_kinds(std::exchange(changed, kinds.release()));
  }
  const auto kinds = bytes_of(changed);
  const auto& nodes = schema.impl_->nodes;
  const bool has_changed = std::any_of(nodes.begin(), nodes.end(), [&](const auto& node) {
    return kinds.find(static_cast<char>(node.kind)) != std::string_view::npos;
  });
  if (has_changed) return true;
  return std::any_of(nodes.begin(), nodes.end(), [&](const auto& node) {
    return node.stacked && !is_stacked(*schema.impl_, node);
  });
}

Collation::Collation(::rust::Box<bridge::Batch> batch) : batch_(std::move(batch)) {}

bool Collation::plan(std::shared_ptr<const Schema> schema, const Allocate& allocate) {
  schema_ = std::move(schema);
  if (!batch_->lay_out(*schema_->impl_->parsed)) return false;
  make_columns(allocate);
  return true;
}

bool Collation::plan_like(std::shared_ptr<const Schema> schema, const bridge::Layout& layout,
                          const Allocate& allocate) {
  schema_ = std::move(schema);
  if (!batch_->lay_out_like(layout)) return false;
  make_columns(allocate);
  return true;
}

void Collation::make_columns(const Allocate& allocate) {
  for (const auto& column : batch_->columns()) {
    const auto dtype = scalar_type(column.dtype);
    std::vector<int64_t> shape(column.sizes.begin(), column.sizes.end());
    if (column.channels_last) std::rotate(shape.begin() + 1, shape.begin() + 2, shape.end());
    const at::IntArrayRef sizes(shape);
    at::Tensor made = allocate(sizes, dtype);
    TORCH_CHECK(made.defined() && made.device().is_cpu() && made.scalar_type() == dtype &&
                    made.sizes() == sizes && made.is_contiguous(),
                "a batch was allocated with another shape, dtype or layout than asked for");
    columns_.push_back(std::move(made));
    are_turned_.push_back(column.channels_last);
  }
}

void Collation::begin(size_t threads) {
  std::vector<bridge::Target> targets;
  targets.reserve(columns_.size());
  for (const auto& column : columns_) {
    targets.push_back({static_cast<uint8_t*>(column.mutable_data_ptr()), column.nbytes()});
  }
  translated([&] { batch_->begin({targets.data(), targets.size()}, threads); });
}

// The strings of a column, in what default_collate puts them: zip makes tuples, the rest lists.
Ref Collation::strings(bool text, bool as_tuple) {
  const size_t column = next_text_++;
  const auto rows = static_cast<Py_ssize_t>(batch_->rows());
  Ref made = checked(as_tuple ? PyTuple_New(rows) : PyList_New(rows));
  for (Py_ssize_t row = 0; row < rows; ++row) {
    const auto found = translated([&] { return batch_->text(static_cast<size_t>(row), column); });
    PyObject* item =
        (text ? make_text(found.data(), found.size()) : make_bytes(found.data(), found.size()))
            .release();
    if (as_tuple) {
      PyTuple_SET_ITEM(made.get(), row, item);
    } else {
      PyList_SET_ITEM(made.get(), row, item);
    }
  }
  return made;
}

Ref Collation::node(bool in_sequence) {
  const auto& schema = *schema_->impl_;
  const auto& node = schema.nodes[next_node_++];
  // Tuples become lists, as in default_collate.
  auto list = [&](size_t count, auto&& next) {
    Ref made = checked(PyList_New(static_cast<Py_ssize_t>(count)));
    for (size_t i = 0; i < count; ++i) {
      PyList_SET_ITEM(made.get(), static_cast<Py_ssize_t>(i), next().release());
    }
    return made;
  };
  auto column = [&] {
    const size_t at = next_column_++;
    at::Tensor made = std::move(columns_[at]);
    if (are_turned_[at]) made = made.movedim(-1, 1);
    return checked(to_python(std::move(made)));
  };
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
      return list(translated([&] { return batch_->numbers_in(node.leaf); }), column);
    case Kind::Dict:
    case Kind::OrderedDict:
      return make_dict(schema, node, next_node_, [&] { return this->node(false); });
    case Kind::NamedTuple: {
      const auto known = schema.resolve(node.entry);
      Ref items = checked(PyTuple_New(node.count));
      for (uint32_t i = 0; i < node.count; ++i) {
        PyTuple_SET_ITEM(items.get(), i, this->node(true).release());
      }
      return checked(PyObject_Call(known->type.get(), items.get(), nullptr));
    }
    case Kind::Object:
      return object(node);
    case Kind::Image:
      next_node_ = node.after;  // the rest says how to show it
      return column();
    default:
      return column();
  }
}

// The first part is a column. Of the others each row has its own.
Ref Collation::object(const bridge::Node& node) {
  const auto& schema = *schema_->impl_;
  Ref column = this->node(false);
  const size_t first = std::exchange(next_node_, node.after);
  Ref rests = Ref::to(Py_None);
  if (node.count > 1) {
    const auto rows = static_cast<Py_ssize_t>(batch_->rows());
    rests = checked(PyList_New(rows));
    for (Py_ssize_t row = 0; row < rows; ++row) {
      Ref parts = decode_rest(schema, rest(static_cast<size_t>(row)), first, node.count - 1);
      PyList_SET_ITEM(rests.get(), row, parts.release());
    }
  }
  const auto known = schema.resolve(node.entry);
  PyObject* arguments[] = {known->from_parts.get(), column.get(), rests.get()};
  Ref made = checked(
      PyObject_Vectorcall(KEPT("stocache._types.stacking", "stacked"), arguments, 3, nullptr));
  if (made.get() == Py_NotImplemented) throw Otherwise();
  return made;
}

const at::Tensor& Collation::rest(size_t row) {
  if (rests_.empty()) rests_.resize(batch_->rows());
  at::Tensor& kept = rests_[row];
  if (!kept.defined()) {
    const auto bytes = translated([&] { return batch_->rest(row); });
    const c10::InferenceMode none(false);
    kept = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
    if (!bytes.empty()) std::memcpy(kept.mutable_data_ptr(), bytes.data(), bytes.size());
  }
  return kept;
}

PyObject* Collation::finish() {
  TORCH_CHECK(next_node_ == 0, "a batch is finished once");
  try {
    return node(false).release();
  } catch (const Otherwise&) {
    return nullptr;
  }
}

}  // namespace stocache::codec
