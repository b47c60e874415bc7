// torch.ops.stocache: the cache inside compiled and exported graphs.
//
// A cache is passed by its name, which means the same in every process of the node, in a saved
// graph and in a fork. A name that this process has not opened is joined at its first use.
//
// A graph relies on the shape and dtype that it was traced with, so in graphs the name is followed
// by what the samples look like, as in "imagenet:uint8[3,224,224]" (`SharedCache.handle`), and that
// is compared with the cache at every call.
//
// Everything returned is fresh memory: a compiler may write into what an operator returned once
// nobody needs it any more, so views of the cache stay out of here. For the same reason nothing is
// optional: a graph has one type. The cache itself is state outside the arguments, which no schema
// can say; python/stocache/_torch/ops.py tells the compiler that these calls have effects, and the
// conservative alias analysis tells TorchScript. The tag says that results depend on more than the
// arguments: without it torch calls an operator while tracing, if its tensors are constants.

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include "api/cache.h"
#include "api/stats.h"

namespace {

using at::Tensor;
using stocache::Cache;

std::string name_of(const std::string& handle) { return handle.substr(0, handle.find(':')); }

std::shared_ptr<Cache> by_handle(const std::string& handle) {
  const std::string name = name_of(handle);
  auto cache = Cache::by_name(name);
  if (name.size() < handle.size()) {
    std::string found(c10::getDtypeNames(cache->dtype()).first);
    const auto sizes = cache->sizes();
    found += '[';
    for (size_t i = 0; i < sizes.size(); ++i) found += (i ? "," : "") + std::to_string(sizes[i]);
    found += ']';
    TORCH_CHECK_VALUE(handle.compare(name.size() + 1, std::string::npos, found) == 0,
                      "the cache \"", name, "\" holds samples of ", found, " but ",
                      handle.substr(name.size() + 1),
                      " was asked for; make the graph again, or use another name");
  }
  return cache;
}

// As at::scalar_tensor, without its trip through a kernel that fills tensors of any size.
Tensor flag(bool value) {
  const Tensor result = at::empty({}, at::kBool);
  *result.mutable_data_ptr<bool>() = value;
  return result;
}

void open_cache(const std::string& cache, double size_limit_gib, int64_t dataset_len,
                at::IntArrayRef data_dims, at::ScalarType dtype, const std::string& backing,
                bool keep, const std::string& fingerprint, const std::string& verify) {
  const auto options = stocache::Options(size_limit_gib)
                           .name(name_of(cache))
                           .backing(backing)
                           .keep(keep)
                           .fingerprint(fingerprint)
                           .verify(verify);
  TORCH_CHECK_VALUE(!options.name().empty(),
                    "name \"\" is not allowed: use 1 to 100 letters, digits, dots, dashes and "
                    "underscores");
  Cache::open(stocache::options_of(options, dataset_len, data_dims, dtype))->hold();
  by_handle(cache);  // the handle may say otherwise than the arguments
}

void close_cache(const std::string& cache) { Cache::release(name_of(cache)); }

std::tuple<Tensor, Tensor> get(const std::string& cache, c10::SymInt index) {
  return by_handle(cache)->copy(index.expect_int());
}

Tensor set(const std::string& cache, c10::SymInt index, const Tensor& value, bool allow_overwrite) {
  return flag(by_handle(cache)->offer(index.expect_int(), value, allow_overwrite));
}

std::tuple<Tensor, Tensor> get_many(const std::string& cache, const Tensor& indices) {
  return by_handle(cache)->get_many(indices, std::nullopt, /*threads=*/1);
}

Tensor set_many(const std::string& cache, const Tensor& indices, const Tensor& batch,
                bool allow_overwrite) {
  return stocache::SharedCache(by_handle(cache)).set_many(indices, batch, allow_overwrite);
}

void clear(const std::string& cache) { by_handle(cache)->clear(); }

Tensor stats(const std::string& cache) {
  std::vector<int64_t> values;
  for (const auto& [name, value] : stocache::numbers(by_handle(cache)->stats())) {
    values.push_back(value);
  }
  return at::tensor(values, at::kLong);
}

}  // namespace

TORCH_LIBRARY(stocache, m) {
  m.set_python_module("stocache._torch.ops");
  const auto op = [&](const char* schema, auto* kernel) {
    m.def(torch::schema(schema, c10::AliasAnalysisKind::CONSERVATIVE),
          torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, kernel),
          {at::Tag::nondeterministic_seeded, at::Tag::pt2_compliant_tag});
  };
  op("open(str cache, float size_limit_gib, int dataset_len, int[] data_dims, ScalarType dtype, *,"
     " str backing=\"auto\", bool keep=False, str fingerprint=\"\", str verify=\"never\") -> ()",
     &open_cache);
  op("close(str cache) -> ()", &close_cache);
  op("get(str cache, SymInt index) -> (Tensor sample, Tensor found)", &get);
  op("set(str cache, SymInt index, Tensor value, bool allow_overwrite=False) -> Tensor stored",
     &set);
  op("get_many(str cache, Tensor indices) -> (Tensor batch, Tensor found)", &get_many);
  op("set_many(str cache, Tensor indices, Tensor batch, bool allow_overwrite=False)"
     " -> Tensor stored",
     &set_many);
  op("clear(str cache) -> ()", &clear);
  op("stats(str cache) -> Tensor", &stats);
}
