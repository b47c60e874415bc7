// The public class: a handle around a Cache, and one-line forwards.
#include <stocache/shared_cache.h>

#include <algorithm>
#include <iomanip>
#include <ostream>
#include <sstream>

#include "api/cache.h"

namespace stocache {

SharedCache::SharedCache(const Options& options, int64_t dataset_len, at::IntArrayRef data_dims,
                         at::ScalarType dtype)
    : cache_(Cache::open(options_of(options, dataset_len, data_dims, dtype))) {}

SharedCache SharedCache::join(const std::string& name) { return SharedCache(Cache::join(name)); }

Cache& SharedCache::opened() const {
  TORCH_CHECK(cache_, "this SharedCache is closed; construct a new one");
  return *cache_;
}

std::optional<at::Tensor> SharedCache::get_slot(int64_t idx, bool allow_oob_idx,
                                                bool allow_empty_slot) const {
  return opened().get_slot(idx, allow_oob_idx, allow_empty_slot);
}

bool SharedCache::set_slot(int64_t idx, const at::Tensor& value, bool allow_oob_idx,
                           bool allow_overwrite) const {
  const auto outcome = opened().set_slot(idx, value, allow_oob_idx, allow_overwrite);
  if (outcome == bridge::Slot::Froze) TORCH_WARN(opened().frozen_reason());
  return outcome == bridge::Slot::Stored;
}

bool SharedCache::offer(int64_t idx, const at::Tensor& value) const {
  return opened().offer(idx, value, /*allow_overwrite=*/false);
}

std::tuple<at::Tensor, at::Tensor> SharedCache::get_many(const at::Tensor& indices,
                                                         const std::optional<at::Tensor>& out,
                                                         int64_t threads) const {
  return opened().get_many(indices, out, threads);
}

at::Tensor SharedCache::set_many(const at::Tensor& indices, const at::Tensor& batch,
                                 bool allow_overwrite) const {
  auto [stored, froze] = opened().set_many(indices, batch, allow_overwrite);
  if (froze) TORCH_WARN(opened().frozen_reason());
  return stored;
}

at::Tensor SharedCache::array() const { return opened().array(); }
void SharedCache::clear() const { opened().clear(); }
Stats SharedCache::stats() const { return opened().stats(); }
int64_t SharedCache::size() const { return opened().geometry().capacity; }
int64_t SharedCache::dataset_len() const { return opened().geometry().dataset_len; }
std::vector<int64_t> SharedCache::data_dims() const { return opened().sizes().vec(); }
at::ScalarType SharedCache::dtype() const { return opened().dtype(); }
std::string SharedCache::name() const { return std::string(opened().location().name); }
std::string SharedCache::path() const { return std::string(opened().location().path); }
std::string SharedCache::backing() const { return std::string(opened().location().backing); }

double SharedCache::fill_fraction() const {
  const Stats now = stats();
  return static_cast<double>(now.filled) / static_cast<double>(std::max<int64_t>(1, now.capacity));
}

double Stats::hit_rate() const {
  return static_cast<double>(hits) / static_cast<double>(std::max<int64_t>(1, hits + misses));
}

std::ostream& operator<<(std::ostream& out, const Stats& stats) {
  std::ostringstream line;  // `out` keeps its precision and its flags
  line << std::fixed << std::setprecision(2) << stats.filled << " of " << stats.capacity
       << " slots filled (" << static_cast<double>(stats.filled * stats.slot_bytes) / (1 << 30)
       << " GiB), " << stats.hits << " hits, " << stats.misses << " misses ("
       << std::setprecision(1) << 100 * stats.hit_rate() << "% hit rate)"
       << (stats.frozen ? ", frozen" : "");
  return out << line.str();
}

}  // namespace stocache
