// Trains a small CNN on pictures from a slow source, without and with a cache in shared memory.
// All that the cache needs is the call of stocache::cached in run().

#include <stocache/stocache.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <thread>
#include <vector>

constexpr int64_t kSide = 64;    // pixels
constexpr int64_t kClasses = 4;  // flat, vertical, horizontal and diagonal stripes

struct Settings {
  int64_t samples, epochs, delay_ms;
  std::string cache;
};

// Sample `index`: made of its number alone, so that anybody can check what comes out of a cache.
// examples/mixed/fill.py has the same formula in Python.
torch::data::Example<> picture(int64_t index) {
  const int64_t label = index % kClasses;
  const auto channel = torch::arange(3).view({3, 1, 1});
  const auto y = torch::arange(kSide).view({1, kSide, 1});
  const auto x = torch::arange(kSide).view({1, 1, kSide});
  const auto values = 7 * index + 50 * channel + 8 * (label % 2) * x + 8 * (label / 2) * y;
  return {values.remainder(256).to(torch::kUInt8), torch::tensor(label)};
}

// The dataset as it was before anyone thought of a cache. The wait is that for a network disk.
class SlowPictures : public torch::data::datasets::Dataset<SlowPictures> {
 public:
  explicit SlowPictures(const Settings& settings) : settings_(settings) {}

  torch::data::Example<> get(size_t index) override {
    ++*loads_;
    std::this_thread::sleep_for(std::chrono::milliseconds(settings_.delay_ms));
    return picture(static_cast<int64_t>(index));
  }

  std::optional<size_t> size() const override { return settings_.samples; }
  int64_t loads() const { return *loads_; }

 private:
  Settings settings_;
  // The DataLoader copies the dataset for every worker; the copies count together.
  std::shared_ptr<std::atomic<int64_t>> loads_ = std::make_shared<std::atomic<int64_t>>(0);
};

// Shows that an epoch goes on: a moving line on a terminal, elsewhere a line every two seconds.
void show(const std::string& what, int64_t done, int64_t total, double seconds) {
  static const bool live = isatty(STDOUT_FILENO) != 0;
  static int64_t shown = 0;
  const auto now = static_cast<int64_t>(seconds / 2);
  if (live || now > shown) {
    std::printf("%s%s: %ld of %ld samples, %.1f s%s", live ? "\r\033[K" : "", what.c_str(), done,
                total, seconds, live ? "" : "\n");
    if (live && done == total) std::printf("\r\033[K");
    std::fflush(stdout);
  }
  shown = now;
}

struct Epoch {
  double seconds, loss, hit_rate;
};

// Trains a new model. The seed is fixed: two runs over the same data have the same losses.
template <typename Dataset>
std::vector<Epoch> train(Dataset dataset, const SlowPictures& source, const std::string& what,
                         const Settings& settings) {
  using namespace torch::nn;
  torch::manual_seed(0);
  Sequential model(Conv2d(Conv2dOptions(3, 8, 5).stride(4).padding(2)), ReLU(),
                   Conv2d(Conv2dOptions(8, 16, 3).stride(2).padding(1)), ReLU(), Flatten(),
                   Linear(16 * kSide * kSide / 64, kClasses));
  torch::optim::Adam optimizer(model->parameters());
  const auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
      std::move(dataset).map(torch::data::transforms::Stack<>()),
      torch::data::DataLoaderOptions().batch_size(32).workers(2));
  std::vector<Epoch> epochs;
  for (int64_t epoch = 1; epoch <= settings.epochs; ++epoch) {
    const int64_t loads_before = source.loads();
    const auto start = std::chrono::steady_clock::now();
    double loss_sum = 0, seconds = 0;
    int64_t done = 0;
    for (const auto& batch : *loader) {
      const auto images = batch.data.to(torch::kFloat) / 255 - 0.5;
      const auto loss = torch::cross_entropy_loss(model->forward(images), batch.target);
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      loss_sum += loss.template item<double>() * batch.target.size(0);
      done += batch.target.size(0);
      seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      show(what + ", epoch " + std::to_string(epoch), done, settings.samples, seconds);
    }
    const double loads = source.loads() - loads_before;
    epochs.push_back({seconds, loss_sum / done, 1 - loads / done});
  }
  return epochs;
}

// The columns without cache are there if that was measured.
void print_table(const std::vector<Epoch>& plain, const std::vector<Epoch>& cached) {
  const bool both = !plain.empty();
  std::printf("\n%-10s%s%13s%s%11s\n", "", both ? "  without cache" : "", "with cache",
              both ? "   speed-up" : "", "hit rate");
  for (size_t i = 0; i < cached.size(); ++i) {
    std::printf("epoch %-4zu", i + 1);
    if (both) std::printf("%13.2f s", plain[i].seconds);
    std::printf("%11.2f s", cached[i].seconds);
    if (both) std::printf("%9.2f x", plain[i].seconds / cached[i].seconds);
    std::printf("%9.1f %%\n", 100 * cached[i].hit_rate);
  }
}

void run(const Settings& settings) {
  torch::set_num_threads(1);  // leaves the other cores to the workers
  const SlowPictures source(settings);
  std::vector<Epoch> plain;
  if (settings.cache.empty()) plain = train(source, source, "without cache", settings);

  // This is the cache: at most 1 GiB. An empty name keeps it to this process.
  const auto dataset = stocache::cached(source, stocache::Options(1).name(settings.cache));
  const auto cached = train(dataset, source, "with cache", settings);
  print_table(plain, cached);

  int64_t checked = 0;
  for (int64_t i = 0; i < settings.samples; ++i) {
    const auto data = dataset.data().get_slot(i), target = dataset.target().get_slot(i);
    if (!data || !target) continue;  // did not fit
    const auto [pixels, label] = picture(i);
    TORCH_CHECK(data->equal(pixels) && target->equal(label), "cached sample ", i, " is wrong");
    ++checked;
  }
  for (size_t i = 0; i < plain.size(); ++i) {
    TORCH_CHECK(plain[i].loss == cached[i].loss, "the losses of epoch ", i + 1, " differ by ",
                cached[i].loss - plain[i].loss, "; with and without cache they must be equal");
  }
  std::printf("check: %ld cached samples equal the source's; ", checked);
  if (plain.empty()) {
    const int64_t loads = source.loads();  // what we did not load came from another process
    std::printf("%ld loaded, %ld found\n", loads, std::max<int64_t>(0, settings.samples - loads));
  } else {
    std::printf("losses of both runs identical (%.6f in the last epoch)\n", cached.back().loss);
  }
}

Settings parse(int argc, char** argv) {
  const auto stop = [](int status, const std::string& text) {
    std::fprintf(status ? stderr : stdout, "%s\n", text.c_str());
    std::exit(status);
  };
  std::map<std::string, std::string> given{
      {"--samples", "1000"}, {"--epochs", "3"}, {"--delay-ms", "4"}, {"--cache", ""}};
  for (int i = 1; i < argc; i += 2) {
    const std::string option = argv[i];
    if (option == "--help")
      stop(0,
           "cpp_trainer trains without and with a cache, and compares the two.\n"
           "  --samples N    samples per epoch (1000)\n"
           "  --epochs N     epochs of each run (3)\n"
           "  --delay-ms N   milliseconds that the source takes for a sample (4)\n"
           "  --cache NAME   train with the cache only, shared with all processes that use NAME");
    if (!given.contains(option)) stop(2, option + " is not an option; --help lists them");
    if (i + 1 == argc || !*argv[i + 1]) stop(2, option + " needs a value");
    given[option] = argv[i + 1];
  }
  const auto number = [&](const char* option, int64_t least) {
    const std::string& text = given[option];
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || *end || value < least || value > 1'000'000) {
      const std::string range = std::to_string(least) + " to 1000000";
      stop(2, option + (" is " + text) + ", not a whole number from " + range);
    }
    return value;
  };
  return {number("--samples", 1), number("--epochs", 1), number("--delay-ms", 0), given["--cache"]};
}

int main(int argc, char** argv) {
  try {
    try {
      run(parse(argc, argv));
    } catch (const torch::data::WorkerException& error) {  // what a worker thread has thrown
      std::rethrow_exception(error.original_exception);
    }
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  }
}
