// cached(dataset, options): one line in front of a torch::data dataset.
#pragma once

#include <stocache/shared_cache.h>
#include <torch/data/datasets/base.h>
#include <torch/data/example.h>

#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace stocache {

// What a dataset behind `cached` gives for a sample that is cached.
enum class Hits {
  copies,  // memory of its own: whatever a transform does to it, the cache stays as it is
  views,   // shared memory itself: faster, for code that never edits a sample in place
};

namespace detail {

// The examples of a batch that is not collated yet.
template <typename Batch>
struct ExampleIn {
  static_assert(!sizeof(Batch),
                "stocache::cached needs a dataset of Example<Tensor, Tensor> or TensorExample; "
                "what makes a batch of them, as Stack does, comes after it");
};
template <>
struct ExampleIn<std::vector<torch::data::Example<>>> {
  using type = torch::data::Example<>;
};
template <>
struct ExampleIn<std::vector<torch::data::TensorExample>> {
  using type = torch::data::TensorExample;
};

}  // namespace detail

// A dataset whose samples are kept in shared memory once they were loaded. Samples that do not fit
// are loaded from the source, always. The source must give the same sample for an index every time;
// what is random belongs behind the cache, in .map().
//
// The source may be any dataset that is asked by index: one of yours, or what .map() makes of it.
// What is missing in a batch is asked for in one call of its get_batch().
//
// The targets, where there are any, lie in a second cache: of options.name() and "-target".
template <typename Source>
class CachedDataset
    : public torch::data::datasets::Dataset<
          CachedDataset<Source>, typename detail::ExampleIn<typename Source::BatchType>::type> {
 public:
  using ExampleType = typename detail::ExampleIn<typename Source::BatchType>::type;
  static constexpr bool has_target = !std::is_same_v<ExampleType, torch::data::TensorExample>;
  static_assert(std::is_same_v<typename Source::BatchRequestType, c10::ArrayRef<size_t>>,
                "stocache::cached needs a dataset that is asked by index, not a stream");

  CachedDataset(Source source, const Options& options, Hits hits)
      : source_(std::move(source)), hits_(hits) {
    const auto length = source_.size();
    TORCH_CHECK_VALUE(length && *length > 0,
                      "stocache::cached needs a dataset that knows its size and is not empty");
    size_ = *length;
    // One sample says what all of them look like.
    const ExampleType first = std::move(load(size_t{0}).front());
    TORCH_CHECK_VALUE(first.data.defined(), "the data of sample 0 are an undefined tensor");
    Options rest = options;
    Options targets = options;
    if constexpr (has_target) {
      TORCH_CHECK_VALUE(first.target.defined(),
                        "the target of sample 0 is an undefined tensor; a dataset without targets "
                        "gives torch::data::TensorExample");
      constexpr size_t kLongest = 93;
      TORCH_CHECK_VALUE(options.name().size() <= kLongest, "name \"", options.name(),
                        "\" is too long for a cached dataset; use at most ", kLongest,
                        " characters");
      // The targets come out of the same budget: a byte of state and their own bytes each.
      const double gib = static_cast<double>(size_ * (first.target.nbytes() + 1)) / (1 << 30);
      TORCH_CHECK_VALUE(!(options.size_limit_gib() > 0) || options.size_limit_gib() > gib,
                        "size_limit_gib is ", options.size_limit_gib(), "; the targets of ", size_,
                        " samples alone take ", gib, " GiB");
      if (options.size_limit_gib() > 0) rest.size_limit_gib(options.size_limit_gib() - gib);
      if (!options.name().empty()) targets.name(options.name() + "-target");
    }
    const auto samples = static_cast<int64_t>(size_);
    data_.emplace(rest, samples, first.data.sizes(), first.data.scalar_type());
    if constexpr (has_target) {
      target_.emplace(targets, samples, first.target.sizes(), first.target.scalar_type());
    }
    keep(0, first);
  }

  ExampleType get(size_t index) override { return std::move(get_batch(index).front()); }

  std::vector<ExampleType> get_batch(c10::ArrayRef<size_t> indices) override {
    const std::vector<int64_t> at(indices.begin(), indices.end());
    const auto data = look(*data_, at);
    std::vector<at::Tensor> target;
    if constexpr (has_target) target = look(*target_, at);
    std::vector<ExampleType> batch(at.size());
    std::vector<size_t> rows, missing;  // places in the batch, and the samples that belong there
    for (size_t row = 0; row < at.size(); ++row) {
      if constexpr (has_target) {
        if (target[row].defined()) batch[row] = {data[row], target[row]};
      } else {
        batch[row] = data[row];
      }
      if (batch[row].data.defined()) continue;
      rows.push_back(row);
      missing.push_back(indices[row]);
    }
    if (missing.empty()) return batch;
    auto loaded = load(missing);
    for (size_t i = 0; i < rows.size(); ++i) {
      keep(at[rows[i]], loaded[i]);
      batch[rows[i]] = std::move(loaded[i]);
    }
    return batch;
  }

  std::optional<size_t> size() const override { return size_; }

  // The caches themselves, for their counts.
  const SharedCache& data() const { return *data_; }
  const SharedCache& target() const
    requires has_target
  {
    return *target_;
  }

 private:
  // A tensor for each sample, undefined where it is not cached.
  std::vector<at::Tensor> look(const SharedCache& cache, const std::vector<int64_t>& at) const {
    std::vector<at::Tensor> hits(at.size());
    if (hits_ == Hits::views) {
      for (size_t i = 0; i < at.size(); ++i) hits[i] = cache.get_slot(at[i]).value_or(at::Tensor());
      return hits;
    }
    const auto [rows, found] = cache.get_many(at::tensor(at, at::kLong));
    const bool* is_there = found.template const_data_ptr<bool>();
    for (size_t i = 0; i < at.size(); ++i) {
      if (is_there[i]) hits[i] = rows.select(0, static_cast<int64_t>(i));
    }
    return hits;
  }

  std::vector<ExampleType> load(c10::ArrayRef<size_t> indices) {
    auto loaded = source_.get_batch(indices);
    TORCH_CHECK_VALUE(loaded.size() == indices.size(), "the dataset behind stocache::cached gave ",
                      loaded.size(), " samples for ", indices.size(), " indices");
    return loaded;
  }

  // Somebody else may have stored either part meanwhile, which is no error.
  void keep(int64_t at, const ExampleType& example) const {
    data_->offer(at, example.data);
    if constexpr (has_target) target_->offer(at, example.target);
  }

  Source source_;
  Hits hits_;
  size_t size_ = 0;
  std::optional<SharedCache> data_;
  std::optional<SharedCache> target_;
};

// Keeps the samples of `dataset` in shared memory:
//
//   auto dataset = stocache::cached(MyDataset(), stocache::Options(8).name("mine"))
//                      .map(torch::data::transforms::Stack<>());
template <typename Source>
CachedDataset<Source> cached(Source dataset, const Options& options, Hits hits = Hits::copies) {
  return CachedDataset<Source>(std::move(dataset), options, hits);
}

}  // namespace stocache
