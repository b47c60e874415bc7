#include "tensor/one_thread.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

namespace stocache {
namespace {

using SetThreads = void (*)(int);

// That of the OpenMP which torch uses: a process may have several. at::set_num_threads would change
// more than this thread, and throw away what other operators keep.
SetThreads set_threads() {
  static const SetThreads found = [] {
    void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    return torch ? reinterpret_cast<SetThreads>(dlsym(torch, "omp_set_num_threads")) : nullptr;
  }();
  return found;
}

}  // namespace

OneThread::OneThread() {
  const int threads = at::get_num_threads();
  if (threads <= 1 || at::in_parallel_region() || !set_threads()) return;
  before_ = threads;
  set_threads()(1);
}

OneThread::~OneThread() {
  if (before_ > 0) set_threads()(before_);
}

}  // namespace stocache
