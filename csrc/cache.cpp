#include "cache.h"

#include <ATen/Functions.h>

#include <sstream>

namespace stocache {
namespace {

std::string dtype_name(c10::ScalarType type) {
  return "torch." + std::string(c10::getDtypeNames(type).first);
}

std::string shape_text(at::IntArrayRef sizes) {
  std::ostringstream text;
  text << '(';
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}

// Shape, dtype and device of something to be stored, in the words of Python.
std::string describe(at::IntArrayRef sizes, c10::ScalarType type, const std::string& device) {
  return "shape " + shape_text(sizes) + ", dtype " + dtype_name(type) + ", device " + device;
}

// The same values as plain bytes: no lazy conjugation or negation, no gradient.
at::Tensor plain(const at::Tensor& value) {
  at::Tensor result = value;
  if (result.is_conj()) result = result.resolve_conj();
  if (result.is_neg()) result = result.resolve_neg();
  return result.requires_grad() ? result.detach() : result;
}

// Whether the tensor's bytes are really there: its storage may have been freed or faked.
bool has_memory(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  if (!tensor.has_storage() || tensor.storage().data() == nullptr) return false;
  const auto item = static_cast<int64_t>(tensor.element_size());
  int64_t last = tensor.storage_offset();
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return (last + 1) * item <= static_cast<int64_t>(tensor.storage().nbytes());
}

}  // namespace

Cache::Cache(::rust::Box<bridge::Handle> handle)
    : handle_(std::move(handle)),
      facts_(handle_->facts()),
      sizes_(facts_.dims.begin(), facts_.dims.end()),
      strides_(sizes_.size()),
      dtype_(c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(facts_.dtype))) {
  int64_t stride = 1;
  for (size_t i = sizes_.size(); i-- > 0;) {
    strides_[i] = stride;
    stride *= sizes_[i];
  }
}

std::shared_ptr<Cache> Cache::open(const bridge::Options& options) {
  return translated([&] { return std::make_shared<Cache>(bridge::open(options)); });
}

std::shared_ptr<Cache> Cache::by_id(int64_t id) {
  return translated(
      [&] { return std::make_shared<Cache>(bridge::by_id(static_cast<uint64_t>(id))); });
}

std::optional<at::Tensor> Cache::get(int64_t index) const {
  const auto found = look(index);
  if (found.state == bridge::Slot::Hit) return view(found.data);
  if (found.state == bridge::Slot::Outside) throw_outside_dataset(index);
  return std::nullopt;
}

bridge::Slot Cache::set(int64_t index, const at::Tensor& value, bool overwrite) const {
  check_value(value, sizes_, "value");
  return translated([&] { return handle_->store(index, plain(value), overwrite); });
}

std::tuple<at::Tensor, at::Tensor> Cache::get_many(const at::Tensor& indices,
                                                   const std::optional<at::Tensor>& out,
                                                   int64_t threads) {
  const at::Tensor at = check_indices(indices);
  const auto sizes = batch_sizes(at.numel());
  TORCH_CHECK_VALUE(threads >= 1 && threads <= 1024, "threads is ", threads,
                    ", it must be between 1 and 1024");
  if (out) {
    check_value(*out, sizes, "out");
    TORCH_CHECK_VALUE(out->is_contiguous(), "out is not contiguous; use a fresh torch.empty");
    TORCH_CHECK_VALUE(!out->requires_grad(), "out requires grad; use out.detach()");
    TORCH_CHECK_VALUE(!out->is_conj() && !out->is_neg(),
                      "out is a conjugated or negated view; use a fresh torch.empty");
    const auto* first = static_cast<const uint8_t*>(out->const_data_ptr());
    const uint8_t* base = handle_->base();
    TORCH_CHECK_VALUE(first + out->nbytes() <= base || first >= base + facts_.total_bytes,
                      "out is a view of the cache itself; use a fresh torch.empty");
  }
  const at::Tensor batch = out ? *out : buffers_.take(sizes, dtype_);
  const at::Tensor found = at::empty({at.numel()}, at::kBool);
  translated([&] { handle_->load_many(at, batch, found, static_cast<uint32_t>(threads)); });
  return {batch, found};
}

std::tuple<at::Tensor, bool> Cache::set_many(const at::Tensor& indices, const at::Tensor& values,
                                             bool overwrite) const {
  const at::Tensor at = check_indices(indices);
  check_value(values, batch_sizes(at.numel()), "batch");
  const at::Tensor stored = at::zeros({at.numel()}, at::kBool);
  const bool froze =
      translated([&] { return handle_->store_many(at, plain(values), stored, overwrite); });
  return {stored, froze};
}

at::Tensor Cache::slot_in_place(int64_t index) const {
  return translated([&] { return *handle_->slot_in_place(index); });
}

at::Tensor Cache::array() const {
  return translated([&] { return *handle_->array(); });
}

at::Tensor Cache::states() const {
  return translated([&] { return *handle_->states(); });
}

void Cache::clear() const {
  translated([&] { handle_->clear(); });
}

void Cache::throw_outside_dataset(int64_t index) const {
  TORCH_CHECK_INDEX(false, "Index ", index, " out of bounds for dataset of length ",
                    facts_.dataset_len);
}

void Cache::throw_outside_cache(int64_t index) const {
  TORCH_CHECK_INDEX(false, "Index ", index, " out of bounds of SharedCache of length ",
                    facts_.capacity);
}

void Cache::check_value(const at::Tensor& value, at::IntArrayRef sizes, const char* what) const {
  const auto type = static_cast<c10::ScalarType>(facts_.dtype);
  const bool dense = value.defined() && value.layout() == c10::kStrided && !value.is_quantized();
  TORCH_CHECK_VALUE(dense, what, " is not a dense tensor; convert it first (to_dense, dequantize)");
  TORCH_CHECK_VALUE(
      value.sizes() == sizes && value.scalar_type() == type && value.device().is_cpu(), what,
      " has ", describe(value.sizes(), value.scalar_type(), value.device().str()),
      "; this cache takes ", describe(sizes, type, "cpu"), "; convert it first");
  TORCH_CHECK_VALUE(has_memory(value), what, " has no memory behind it; use an ordinary tensor");
}

at::Tensor Cache::check_indices(const at::Tensor& indices) const {
  TORCH_CHECK_TYPE(c10::isIntegralType(indices.scalar_type(), /*includeBool=*/false),
                   "indices has dtype ", dtype_name(indices.scalar_type()),
                   "; integers are needed (for a mask: mask.nonzero().flatten())");
  TORCH_CHECK_VALUE(indices.dim() == 1, "indices has ", indices.dim(),
                    " dimensions; one is needed");
  TORCH_CHECK_VALUE(!indices.device().is_cpu() || has_memory(indices),
                    "indices has no memory behind it; use an ordinary tensor");
  if (indices.scalar_type() == at::kLong && indices.device().is_cpu() && indices.is_contiguous()) {
    return indices;  // as nearly always: two trips through the dispatcher saved
  }
  return indices.to(at::kCPU, at::kLong).contiguous();
}

std::vector<int64_t> Cache::batch_sizes(int64_t rows) const {
  std::vector<int64_t> sizes{rows};
  sizes.insert(sizes.end(), sizes_.begin(), sizes_.end());
  return sizes;
}

}  // namespace stocache
