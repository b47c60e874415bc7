// The schemas of torch.ops.stocache, and one-line forwards.
//
// A cache is passed as the number `SharedCache.handle`, valid in the process that opened it and
// in its forks. Views returned by `get` alias the cache, which is no tensor argument.

#include <torch/library.h>

#include "cache.h"

namespace {

using at::Tensor;
using stocache::Cache;

std::optional<Tensor> get(int64_t cache, int64_t index) { return Cache::by_id(cache)->get(index); }

bool set(int64_t cache, int64_t index, const Tensor& value, bool allow_overwrite) {
  const auto opened = Cache::by_id(cache);
  const auto outcome = opened->set(index, value, allow_overwrite);
  if (outcome == stocache::bridge::Slot::Outside) opened->throw_outside_dataset(index);
  return outcome == stocache::bridge::Slot::Stored;
}

std::tuple<Tensor, Tensor> get_many(int64_t cache, const Tensor& indices) {
  return Cache::by_id(cache)->get_many(indices, std::nullopt, /*threads=*/1);
}

Tensor get_many_out(int64_t cache, const Tensor& indices, Tensor out, int64_t threads) {
  return std::get<1>(Cache::by_id(cache)->get_many(indices, out, threads));
}

Tensor set_many(int64_t cache, const Tensor& indices, const Tensor& values, bool allow_overwrite) {
  return std::get<0>(Cache::by_id(cache)->set_many(indices, values, allow_overwrite));
}

}  // namespace

TORCH_LIBRARY(stocache, m) {
  // The cache changes behind the arguments, which no schema can say: TorchScript must neither drop
  // nor reorder nor merge these calls.
  const auto effects = [](const char* schema) {
    return torch::schema(schema, c10::AliasAnalysisKind::CONSERVATIVE);
  };
  m.def(effects("get(int cache, int index) -> Tensor?"), &get);
  m.def(effects("set(int cache, int index, Tensor value, bool allow_overwrite=False) -> bool"),
        &set);
  m.def(effects("get_many(int cache, Tensor indices) -> (Tensor, Tensor)"), &get_many);
  m.def(effects("get_many_out(int cache, Tensor indices, Tensor(a!) out, int threads=1) -> Tensor"),
        &get_many_out);
  m.def(effects("set_many(int cache, Tensor indices, Tensor values, bool allow_overwrite=False)"
                " -> Tensor"),
        &set_many);
}
