// cached(dataset, options): one line in front of a torch::data dataset.
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <stocache/shared_cache.h>
#include <torch/data/datasets/base.h>
#include <torch/data/example.h>

#include <optional>
#include <string>
#include <tuple>
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

template <typename Source>
class StackedDataset;

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
    return hits_ == Hits::views ? views(indices) : copies(indices);
  }

  // The samples as one tensor, and their targets as another: what Stack would make of get_batch(),
  // with each sample copied once.
  ExampleType get_stacked(c10::ArrayRef<size_t> indices) {
    const at::Tensor at = at::tensor(numbers(indices), at::kLong);
    // No structured bindings: a lambda below uses these, which clang refuses before 16.
    at::Tensor data, target, found;
    std::tie(data, found) = data_->get_many(at);
    if constexpr (has_target) {
      at::Tensor found_too;
      std::tie(target, found_too) = target_->get_many(at);
      found.logical_and_(found_too);
    }
    load_missing(indices, found.const_data_ptr<bool>(),
                 [&](size_t place, const ExampleType& example) {
                   const at::NoGradGuard no_grad;  // what comes out of a cache has no history
                   const auto row = static_cast<int64_t>(place);
                   data.select(0, row).copy_(example.data);
                   if constexpr (has_target) target.select(0, row).copy_(example.target);
                 });
    if constexpr (has_target) {
      return {data, target};
    } else {
      return data;
    }
  }

  // A dataset of such batches, in place of .map(Stack<>()).
  StackedDataset<Source> stacked() const& { return StackedDataset<Source>(*this); }
  StackedDataset<Source> stacked() && { return StackedDataset<Source>(std::move(*this)); }

  std::optional<size_t> size() const override { return size_; }

  // The caches themselves, for their counts.
  const SharedCache& data() const { return *data_; }
  const SharedCache& target() const
    requires has_target
  {
    return *target_;
  }

 private:
  static std::vector<int64_t> numbers(c10::ArrayRef<size_t> indices) {
    return {indices.begin(), indices.end()};
  }

  std::vector<ExampleType> copies(c10::ArrayRef<size_t> indices) {
    const ExampleType stacked = get_stacked(indices);
    std::vector<ExampleType> batch(indices.size());
    for (size_t i = 0; i < batch.size(); ++i) {
      const auto row = static_cast<int64_t>(i);
      batch[i].data = stacked.data.select(0, row);
      if constexpr (has_target) batch[i].target = stacked.target.select(0, row);
    }
    return batch;
  }

  std::vector<ExampleType> views(c10::ArrayRef<size_t> indices) {
    std::vector<ExampleType> batch(indices.size());
    std::vector<char> found(indices.size());
    for (size_t i = 0; i < batch.size(); ++i) {
      const auto index = static_cast<int64_t>(indices[i]);
      auto data = data_->get_slot(index);
      found[i] = data.has_value();
      if (data) batch[i].data = std::move(*data);
      if constexpr (has_target) {
        auto target = target_->get_slot(index);
        found[i] &= target.has_value();
        if (target) batch[i].target = std::move(*target);
      }
    }
    load_missing(indices, found.data(),
                 [&](size_t row, ExampleType& example) { batch[row] = std::move(example); });
    return batch;
  }

  // Loads and keeps what was not found, and tells `place` of each with its row in the batch.
  template <typename Found, typename Place>
  void load_missing(c10::ArrayRef<size_t> indices, const Found* found, Place place) {
    std::vector<size_t> rows, missing;
    for (size_t row = 0; row < indices.size(); ++row) {
      if (found[row]) continue;
      rows.push_back(row);
      missing.push_back(indices[row]);
    }
    if (missing.empty()) return;
    auto loaded = load(missing);
    for (size_t i = 0; i < rows.size(); ++i) {
      keep(static_cast<int64_t>(missing[i]), loaded[i]);
      place(rows[i], loaded[i]);
    }
  }

  std::vector<ExampleType> load(c10::ArrayRef<size_t> indices) {
    auto loaded = source_.get_batch(indices);
    TORCH_CHECK_VALUE(loaded.size() == indices.size(), "the dataset behind stocache::cached gave ",
                      loaded.size(), " samples for ", indices.size(), " indices");
    return loaded;
  }

  // Somebody else may have stored either part meanwhile, which is no error.
  void keep(int64_t at, const ExampleType& example) const {
    try {
      data_->offer(at, example.data);
      if constexpr (has_target) target_->offer(at, example.target);
    } catch (c10::Error& error) {
      error.add_context(c10::str("sample ", at, " of the dataset"));
      throw;
    }
  }

  Source source_;
  Hits hits_;
  size_t size_ = 0;
  std::optional<SharedCache> data_;
  std::optional<SharedCache> target_;
};

// Batches of a cached dataset, each two tensors that were gathered in one go.
template <typename Source>
class StackedDataset
    : public torch::data::datasets::BatchDataset<StackedDataset<Source>,
                                                 typename CachedDataset<Source>::ExampleType> {
 public:
  using BatchType = typename CachedDataset<Source>::ExampleType;

  explicit StackedDataset(CachedDataset<Source> dataset) : dataset_(std::move(dataset)) {}

  BatchType get_batch(c10::ArrayRef<size_t> indices) override {
    return dataset_.get_stacked(indices);
  }
  std::optional<size_t> size() const override { return dataset_.size(); }

 private:
  CachedDataset<Source> dataset_;
};

// Keeps the samples of `dataset` in shared memory:
//
//   auto dataset = stocache::cached(MyDataset(), stocache::Options(8).name("mine"))
//                      .map(torch::data::transforms::Stack<>());
//
// Where nothing is done to single samples any more, .stacked() in place of the last line is faster.
template <typename Source>
CachedDataset<Source> cached(Source dataset, const Options& options, Hits hits = Hits::copies) {
  return CachedDataset<Source>(std::move(dataset), options, hits);
}

}  // namespace stocache
