// cached(dataset, options): one line in front of a torch::data dataset.
#pragma once

#include <stocache/shared_cache.h>
#include <torch/data/datasets/base.h>
#include <torch/data/example.h>

#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace stocache {

// What a dataset behind `cached` gives for a sample that is cached.
enum class Hits {
  copies,  // a tensor of its own: whatever a transform does to it, the cache stays as it is
  views,   // shared memory itself: faster, for code that never edits a sample in place
};

// A dataset whose samples are kept in shared memory once they were loaded. Samples that do not fit
// are loaded from the source, always. The source must give the same sample for an index every time;
// what is random belongs behind the cache, in .map().
//
// The targets, where there are any, lie in a second cache: of options.name() and "-target".
template <typename Source>
class CachedDataset
    : public torch::data::datasets::Dataset<CachedDataset<Source>, typename Source::ExampleType> {
 public:
  using ExampleType = typename Source::ExampleType;
  static constexpr bool has_target = !std::is_same_v<ExampleType, torch::data::TensorExample>;
  static_assert(std::is_same_v<ExampleType, torch::data::Example<>> || !has_target,
                "stocache::cached needs a dataset of Example<Tensor, Tensor> or TensorExample");

  CachedDataset(Source source, const Options& options, Hits hits)
      : source_(std::move(source)), hits_(hits) {
    const auto length = source_.size();
    TORCH_CHECK_VALUE(length && *length > 0,
                      "stocache::cached needs a dataset that knows its size and is not empty");
    size_ = *length;
    // One sample says what all of them look like.
    const ExampleType first = source_.get(0);
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
    data_.emplace(rest, size_, first.data.sizes(), first.data.scalar_type());
    if constexpr (has_target) {
      target_.emplace(targets, size_, first.target.sizes(), first.target.scalar_type());
    }
    keep(0, first);
  }

  ExampleType get(size_t index) override {
    const auto at = static_cast<int64_t>(index);
    if (auto data = data_->get_slot(at)) {
      if constexpr (has_target) {
        if (auto target = target_->get_slot(at)) return {handed(*data), handed(*target)};
      } else {
        return {handed(*data)};
      }
    }
    ExampleType loaded = source_.get(index);
    keep(at, loaded);
    return loaded;
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
  at::Tensor handed(at::Tensor& hit) const {
    return hits_ == Hits::copies ? hit.clone() : std::move(hit);
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
