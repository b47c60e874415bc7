#include "api/cache.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <stocache/version.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

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

// A torch that differs so little that the linker did not notice may still have other structures.
void check_torch() {
  const uint64_t running = aoti_torch_abi_version();
  const uint64_t major = running >> 56, minor = running >> 48 & 0xff, patch = running >> 40 & 0xff;
  TORCH_CHECK(major == TORCH_VERSION_MAJOR && minor == TORCH_VERSION_MINOR,
              "this stocache was built for torch " STOCACHE_TORCH_VERSION
              " but the program runs torch ",
              major, ".", minor, ".", patch, "; link or install torch " STOCACHE_TORCH_VERSION);
}

}  // namespace

Cache::Cache(::rust::Box<bridge::Handle> handle)
    : handle_(std::move(handle)),
      geometry_(handle_->geometry()),
      sizes_(geometry_.dims.begin(), geometry_.dims.end()),
      strides_(sizes_.size()),
      type_(c10::scalarTypeToTypeMeta(dtype())) {
  int64_t stride = 1;
  for (size_t i = sizes_.size(); i-- > 0;) {
    strides_[i] = stride;
    stride *= sizes_[i];
  }
}

std::shared_ptr<Cache> Cache::open(const bridge::Options& options) {
  check_torch();
  return translated([&] { return std::make_shared<Cache>(bridge::open(options)); });
}

// What is not UTF-8 is no name either, and is told so by the core.
std::shared_ptr<Cache> Cache::join(const std::string& name) {
  check_torch();
  const auto text = ::rust::String::lossy(name);
  return translated([&] { return std::make_shared<Cache>(bridge::join(text)); });
}

std::shared_ptr<Cache> Cache::by_name(const std::string& name) {
  check_torch();
  const auto text = ::rust::String::lossy(name);
  return translated([&] { return std::make_shared<Cache>(bridge::by_name(text)); });
}

bool Cache::release(const std::string& name) {
  return bridge::release(::rust::String::lossy(name));
}

std::optional<at::Tensor> Cache::get_slot(int64_t index, bool allow_beyond,
                                          bool allow_empty) const {
  const auto found = handle_->look(index);
  switch (found.state) {
    case bridge::Slot::Hit:
      return view(found.data);
    case bridge::Slot::Outside:
      throw_outside_dataset(index);
    case bridge::Slot::Beyond:
      if (!allow_beyond) throw_outside_cache(index);
      return std::nullopt;
    default:
      TORCH_CHECK(allow_empty, "Tried to read from an empty slot idx=", index, " in SharedCache.");
      return std::nullopt;
  }
}

bridge::Slot Cache::set_slot(int64_t index, const at::Tensor& value, bool allow_beyond,
                             bool allow_overwrite) const {
  const auto outcome = store(index, value, allow_overwrite);
  if (outcome == bridge::Slot::Beyond && !allow_beyond) throw_outside_cache(index);
  TORCH_CHECK(outcome != bridge::Slot::Occupied, "Tried to overwrite non-empty slot idx=", index,
              " in SharedCache. allow_overwrite=True replaces it.");
  return outcome;
}

bool Cache::offer(int64_t index, const at::Tensor& value, bool allow_overwrite) const {
  const auto outcome = store(index, value, allow_overwrite);
  if (outcome == bridge::Slot::Froze) TORCH_WARN(frozen_reason());
  return outcome == bridge::Slot::Stored;
}

bridge::Slot Cache::store(int64_t index, const at::Tensor& value, bool allow_overwrite) const {
  check_value(value, sizes_, "value");
  const auto outcome =
      translated([&] { return handle_->store(index, plain(value), allow_overwrite); });
  if (outcome == bridge::Slot::Outside) throw_outside_dataset(index);
  return outcome;
}

std::tuple<at::Tensor, at::Tensor> Cache::copy(int64_t index) const {
  const at::Tensor sample = at::empty(sizes_, at::TensorOptions().dtype(type_));
  const at::Tensor found = at::empty({}, at::kBool);
  const at::Tensor indices = at::empty({}, at::kLong);  // scalar_tensor would take longer
  *indices.mutable_data_ptr<int64_t>() = index;
  translated([&] { handle_->load_many(indices, sample, found, 1); });
  return {sample, found};
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
    TORCH_CHECK_VALUE(first + out->nbytes() <= base || first >= base + geometry_.total_bytes,
                      "out is a view of the cache itself; use a fresh torch.empty");
  }
  const at::Tensor batch = out ? *out : buffers_.take(sizes, type_);
  const at::Tensor found = at::empty({at.numel()}, at::kBool);
  translated([&] { handle_->load_many(at, batch, found, static_cast<uint32_t>(threads)); });
  return {batch, found};
}

std::tuple<at::Tensor, bool> Cache::set_many(const at::Tensor& indices, const at::Tensor& batch,
                                             bool allow_overwrite) const {
  const at::Tensor at = check_indices(indices);
  check_value(batch, batch_sizes(at.numel()), "batch");
  const at::Tensor stored = at::zeros({at.numel()}, at::kBool);
  const bool froze =
      translated([&] { return handle_->store_many(at, plain(batch), stored, allow_overwrite); });
  return {stored, froze};
}

at::Tensor Cache::slot_in_place(int64_t index) const {
  return translated([&] { return *handle_->slot_in_place(index); });
}

at::Tensor Cache::array() const {
  return translated([&] { return *handle_->array(); });
}

at::Tensor Cache::states() const {
  // Of each state the lower byte: the other one is 0 unless somebody is writing (claim.rs).
  return translated([&] { return handle_->states()->slice(0, std::nullopt, std::nullopt, 2); });
}

void Cache::clear() const {
  translated([&] { handle_->clear(); });
}

Stats Cache::stats() const {
  const auto s = translated([&] { return handle_->stats(); });
  const auto count = [](uint64_t n) { return static_cast<int64_t>(n); };
  return {.hits = count(s.hits),
          .misses = count(s.misses),
          .fills = count(s.fills),
          .bytes = count(s.bytes),
          .waits = count(s.waits),
          .lost = count(s.lost),
          .dropped = count(s.dropped),
          .damaged = count(s.damaged),
          .filled = count(s.filled),
          .capacity = geometry_.capacity,
          .dataset_len = geometry_.dataset_len,
          .slot_bytes = count(geometry_.slot_bytes),
          .frozen = s.frozen};
}

void Cache::throw_outside_dataset(int64_t index) const {
  TORCH_CHECK_INDEX(false, "Index ", index, " out of bounds for dataset of length ",
                    geometry_.dataset_len);
}

void Cache::throw_outside_cache(int64_t index) const {
  TORCH_CHECK_INDEX(false, "Index ", index, " out of bounds of SharedCache of length ",
                    geometry_.capacity);
}

void Cache::check_value(const at::Tensor& value, at::IntArrayRef sizes, const char* what) const {
  const auto type = dtype();
  TORCH_CHECK_VALUE(value.defined(), what, " is an undefined tensor; use an ordinary tensor");
  const bool dense = value.layout() == c10::kStrided && !value.is_quantized() && !value.is_nested();
  TORCH_CHECK_VALUE(dense, what, " is not a dense tensor; convert it first (to_dense, dequantize)");
  TORCH_CHECK_VALUE(
      value.sizes() == sizes && value.scalar_type() == type && value.device().is_cpu(), what,
      " has ", describe(value.sizes(), value.scalar_type(), value.device().str()),
      "; this cache takes ", describe(sizes, type, "cpu"), "; convert it first");
  TORCH_CHECK_VALUE(has_memory(value), what, " has no memory behind it; use an ordinary tensor");
}

at::Tensor Cache::check_indices(const at::Tensor& indices) const {
  TORCH_CHECK_VALUE(indices.defined(), "indices is an undefined tensor; use an ordinary tensor");
  TORCH_CHECK_TYPE(!indices.is_nested(),
                   "indices is no ordinary tensor; a one-dimensional tensor of integers is needed");
  TORCH_CHECK_TYPE(c10::isIntegralType(indices.scalar_type(), /*includeBool=*/false),
                   "indices has dtype ", dtype_name(indices.scalar_type()),
                   "; integers are needed (for a mask: mask.nonzero().flatten())");
  TORCH_CHECK_VALUE(indices.dim() == 1, "indices has ", indices.dim(),
                    " dimensions; one is needed");
  TORCH_CHECK_VALUE(!indices.is_meta() && (!indices.device().is_cpu() || has_memory(indices)),
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

bridge::Options options_of(const Options& options, int64_t dataset_len, at::IntArrayRef data_dims,
                           at::ScalarType dtype) {
  // An enumeration of C++ may be any number of its type.
  const auto number = static_cast<int>(dtype), end = static_cast<int>(at::ScalarType::Undefined);
  TORCH_CHECK_VALUE(number >= 0 && number < end,
                    "Unsupported dtype: ", number == end ? "undefined" : std::to_string(number),
                    "; use a torch.dtype such as torch.uint8");
  TORCH_CHECK_VALUE(!c10::isQIntType(dtype), "Unsupported dtype: ", dtype_name(dtype),
                    " is quantized; cache int_repr() and keep the scale yourself");
  bridge::Options result;
  result.size_limit_gib = options.size_limit_gib();
  result.dataset_len = dataset_len;
  for (const int64_t dim : data_dims) result.dims.push_back(dim);
  result.dtype = static_cast<int32_t>(dtype);
  result.item_bytes = c10::elementSize(dtype);
  result.name = ::rust::String::lossy(options.name());
  result.backing = ::rust::String::lossy(options.backing());
  result.keep = options.keep();
  result.verify = ::rust::String::lossy(options.verify());
  const auto& mark = options.fingerprint();
  result.fingerprint =
      bridge::fingerprint_of({reinterpret_cast<const uint8_t*>(mark.data()), mark.size()});
  result.if_gone = "empty";
  result.huge_pages = ::rust::String::lossy(options.huge_pages());
  result.pid = 0;
  result.fd = -1;
  return result;
}

}  // namespace stocache
