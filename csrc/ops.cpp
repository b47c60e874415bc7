// torch.ops.stocache: the cache inside compiled and exported graphs.
//
// A cache is passed by its name, which means the same in every process of the node, in a saved
// graph and in a fork. A name that this process has not opened is joined at its first use.
//
// Everything returned is fresh memory: a compiler may write into what an operator returned once
// nobody needs it any more, so views of the cache stay out of here. For the same reason nothing is
// optional: a graph has one type. The cache itself is state outside the arguments, which no schema
// can say; python/stocache/_ops.py tells the compiler that these calls have effects, and the
// conservative alias analysis tells TorchScript.

#include <ATen/Functions.h>
#include <torch/library.h>

#include "cache.h"
#include "stats.h"

namespace {

using at::Tensor;
using stocache::Cache;

Tensor flag(bool value) { return at::scalar_tensor(value, at::kBool); }

void open_cache(const std::string& cache, double size_limit_gib, int64_t dataset_len,
                at::IntArrayRef data_dims, at::ScalarType dtype, const std::string& backing,
                bool keep, const std::string& fingerprint, const std::string& verify) {
  const auto options = stocache::Options(size_limit_gib)
                           .name(cache)
                           .backing(backing)
                           .keep(keep)
                           .fingerprint(fingerprint)
                           .verify(verify);
  TORCH_CHECK_VALUE(!cache.empty(),
                    "name \"\" is not allowed: use 1 to 100 letters, digits, dots, dashes and "
                    "underscores");
  Cache::open(stocache::options_of(options, dataset_len, data_dims, dtype))->hold();
}

void close_cache(const std::string& cache) { Cache::release(cache); }

std::tuple<Tensor, Tensor> get(const std::string& cache, c10::SymInt index) {
  auto [sample, found] = Cache::by_name(cache)->copy(index.expect_int());
  return {std::move(sample), flag(found)};
}

Tensor set(const std::string& cache, c10::SymInt index, const Tensor& value, bool allow_overwrite) {
  return flag(Cache::by_name(cache)->offer(index.expect_int(), value, allow_overwrite));
}

std::tuple<Tensor, Tensor> get_many(const std::string& cache, const Tensor& indices) {
  return Cache::by_name(cache)->get_many(indices, std::nullopt, /*threads=*/1);
}

Tensor set_many(const std::string& cache, const Tensor& indices, const Tensor& batch,
                bool allow_overwrite) {
  return stocache::SharedCache(Cache::by_name(cache)).set_many(indices, batch, allow_overwrite);
}

void clear(const std::string& cache) { Cache::by_name(cache)->clear(); }

Tensor stats(const std::string& cache) {
  std::vector<int64_t> values;
  for (const auto& [name, value] : stocache::numbers(Cache::by_name(cache)->stats())) {
    values.push_back(value);
  }
  return at::tensor(values, at::kLong);
}

}  // namespace

TORCH_LIBRARY(stocache, m) {
  m.set_python_module("stocache._ops");
  const auto op = [&](const char* schema, auto* kernel) {
    m.def(torch::schema(schema, c10::AliasAnalysisKind::CONSERVATIVE),
          torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, kernel));
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
