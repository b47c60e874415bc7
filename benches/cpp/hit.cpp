// One hit from C++, beside tensor.select(0, i): prints the nanoseconds of both, a line per round.
//
// hit ROUNDS

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <stocache/shared_cache.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace {

constexpr int64_t kSamples = 20'000;
constexpr int64_t kHits = 100'000;

// Nanoseconds for one call of `look`, its tensor made and dropped.
template <typename Look>
double nanoseconds(const std::vector<int64_t>& order, Look&& look) {
  int64_t bytes = 0;
  const auto start = std::chrono::steady_clock::now();
  for (const int64_t i : order) bytes += static_cast<int64_t>(look(i).nbytes());
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  TORCH_CHECK(bytes == 3 * 32 * 32 * kHits, "a sample has the wrong size");
  return took.count() / static_cast<double>(order.size());
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  const at::Tensor values = at::randint(0, 256, {kSamples, 3, 32, 32}, at::kByte);
  const stocache::SharedCache cache(stocache::Options(0.1), kSamples, {3, 32, 32});
  cache.set_many(at::arange(kSamples, at::kLong), values);
  std::mt19937_64 random(0);
  std::vector<int64_t> order(kHits);
  for (auto& i : order) i = static_cast<int64_t>(random() % kSamples);
  for (int64_t i = 0; i < kSamples; i += 199) {
    TORCH_CHECK(at::equal(*cache.get_slot(i), values.select(0, i)), "sample ", i, " differs");
  }
  for (int round = 0; round <= rounds; ++round) {
    const double select = nanoseconds(order, [&](int64_t i) { return values.select(0, i); });
    const double hit = nanoseconds(order, [&](int64_t i) { return *cache.get_slot(i); });
    if (round > 0) std::printf("%.2f %.2f\n", select, hit);  // the first one warms up
  }
}
