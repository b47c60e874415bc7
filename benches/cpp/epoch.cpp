// Warm, shuffled epochs of a C++ DataLoader with two threads: over tensors in the program's memory,
// and over stocache::cached with copies, with views and stacked. Prints the milliseconds of the
// four, a line per round.
//
// epoch ROUNDS SIDE: samples are uint8, 3 x SIDE x SIDE; an epoch reads 60 MB of them.

#include <stocache/stocache.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace {

// The limit: nothing is loaded, nothing is shared, a sample is a view.
class InMemory : public torch::data::datasets::Dataset<InMemory> {
 public:
  explicit InMemory(int64_t side) {
    const int64_t samples = 60'000'000 / (3 * side * side);
    data_ = torch::randint(0, 256, {samples, 3, side, side}, torch::kByte);
    target_ = torch::arange(samples);
  }

  torch::data::Example<> get(size_t index) override {
    const auto row = static_cast<int64_t>(index);
    return {data_.select(0, row), target_.select(0, row)};
  }
  std::optional<size_t> size() const override { return data_.size(0); }

 private:
  torch::Tensor data_, target_;
};

template <typename Batches>
auto loader_of(Batches batches) {
  return torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
      std::move(batches), torch::data::DataLoaderOptions().batch_size(256).workers(2));
}

// Milliseconds of an epoch. The targets are the indices, so that a missing sample is noticed.
template <typename Loader>
double epoch(Loader& loader, int64_t samples) {
  int64_t sum = 0;
  const auto start = std::chrono::steady_clock::now();
  for (const auto& batch : *loader) sum += batch.target.sum().template item<int64_t>();
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  TORCH_CHECK(sum == samples * (samples - 1) / 2, "an epoch lacks samples");
  return took.count();
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  const InMemory source(argc > 2 ? std::atoi(argv[2]) : 32);
  const auto samples = static_cast<int64_t>(*source.size());
  const stocache::Options options(0.2);
  const torch::data::transforms::Stack<> stack;
  auto memory = loader_of(InMemory(source).map(stack));
  auto copies = loader_of(stocache::cached(source, options).map(stack));
  auto views = loader_of(stocache::cached(source, options, stocache::Hits::views).map(stack));
  auto stacked = loader_of(stocache::cached(source, options).stacked());
  for (int round = -1; round <= rounds; ++round) {
    const double times[] = {epoch(memory, samples), epoch(copies, samples), epoch(views, samples),
                            epoch(stacked, samples)};
    // The first fills the caches, the second warms up.
    if (round > 0) std::printf("%.3f %.3f %.3f %.3f\n", times[0], times[1], times[2], times[3]);
  }
}
