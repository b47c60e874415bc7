#include "crew.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

namespace stocache {
namespace {

// Copying is bound by the memory: more threads do not make it faster.
constexpr size_t kMostHelpers = 7;

struct Job {
  size_t parts;
  const std::function<void(size_t)>& work;
  std::atomic<size_t> next{0};

  void help() {
    for (size_t i = next++; i < parts; i = next++) work(i);
  }
};

// Never destroyed: helpers may wait for work until the process ends.
struct Crew {
  const pid_t owner = getpid();
  std::atomic_flag busy;            // somebody's job is being done
  size_t helpers = 0;               // changed by whoever holds `busy`
  std::atomic<uint32_t> calls = 0;  // raised when there is a job
  std::atomic<Job*> job = nullptr;
  std::atomic<size_t> at_work = 0;  // helpers that may have seen the job

  void wait_for_work() {
    for (uint32_t seen = 0;;) {
      calls.wait(seen);
      seen = calls.load();
      // SYNC POINT job: the count before the look here, the job before the count in `run`, all
      // SeqCst: either this helper sees that the job is over, or `run` sees this helper.
      ++at_work;
      if (Job* found = job.load()) found->help();
      --at_work;
    }
  }

  void run(Job& mine, size_t wanted) {
    try {
      for (; helpers < wanted; ++helpers) std::thread([this] { wait_for_work(); }).detach();
    } catch (const std::system_error&) {  // no more threads to be had: fewer do it, too
    }
    job = &mine;
    ++calls;
    calls.notify_all();
    mine.help();
    job = nullptr;
    while (at_work.load() > 0) std::this_thread::yield();
  }
};

Crew& crew() {
  static std::atomic<Crew*> current = nullptr;
  Crew* found = current;
  // After a fork the threads are gone, and the state is whatever it was.
  while (!found || found->owner != getpid()) {
    auto* made = new Crew;
    if (current.compare_exchange_strong(found, made)) return *made;
    delete made;
  }
  return *found;
}

}  // namespace

void share(size_t parts, size_t threads, const std::function<void(size_t)>& work) {
  Job job{parts, work};
  const size_t helpers = std::min({parts, threads, kMostHelpers + 1});
  if (helpers > 1) {
    Crew& found = crew();
    if (!found.busy.test_and_set(std::memory_order_acquire)) {
      found.run(job, helpers - 1);
      found.busy.clear(std::memory_order_release);
      return;
    }
  }
  job.help();
}

}  // namespace stocache
