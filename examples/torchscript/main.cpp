// Runs a module that preprocess.py has saved, over all samples, twice.
//
// The cache is inside the module: loading it joins the cache that the Python process has open.

#include <ATen/Parallel.h>
#include <torch/script.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <string>

int64_t count(const torch::jit::Module& module, const std::string& what) {
  return module.get_method("stats")({}).toGenericDict().at(what).toInt();
}

// Runs the module over all samples and prints what that took; returns the sum of all values.
double pass(torch::jit::Module& module, const char* name) {
  const int64_t samples = module.get_method("samples")({}).toInt();
  const int64_t hits_before = count(module, "hits");
  const auto start = std::chrono::steady_clock::now();
  double sum = 0, seconds = 0, next_line = 2;
  for (int64_t index = 0; index < samples; ++index) {
    sum += module.forward({index}).toTensor().sum().item<double>();
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (seconds > next_line) {
      std::printf("%s: %ld of %ld samples, %.1f s\n", name, index + 1, samples, seconds);
      std::fflush(stdout);
      next_line = seconds + 2;
    }
  }
  std::printf("%s: %ld samples in %.3f s, %ld of them from the cache\n", name, samples, seconds,
              count(module, "hits") - hits_before);
  std::fflush(stdout);
  return sum;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: run_module MODULE, a file that preprocess.py has saved\n");
    return 2;
  }
  try {
    const torch::NoGradGuard no_grad;
    at::set_num_threads(1);  // samples are small: more threads would wait for each other
    auto module = torch::jit::load(argv[1]);
    module.eval();
    std::printf("C++ loaded the module: %ld samples are cached already\n", count(module, "filled"));
    const double first = pass(module, "first pass");
    const double second = pass(module, "second pass");
    TORCH_CHECK(first == second, "the sums of both passes differ by ", second - first);
    std::printf("check: the sums of both passes are equal (%.3f)\n", first);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {  // out of a method: with TorchScript's traceback
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
