// SharedCache: a tensor slot per sample, shared by every process of a job.
#pragma once

#include <ATen/core/Tensor.h>
#include <stocache/errors.h>
#include <stocache/version.h>
#include <torch/arg.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace stocache {

class Cache;

// How a cache is made, in the words of Python's SharedCache.
struct Options {
  explicit Options(double size_limit_gib) : size_limit_gib_(size_limit_gib) {}

  // The most the cache may take, in GiB; may be fractional.
  TORCH_ARG(double, size_limit_gib);
  // Shares with any process of this user on this node that gives the same name; empty shares with
  // forked children only.
  TORCH_ARG(std::string, name);
  // "shm" is a file in /dev/shm, "memfd" memory outside of it; "auto" takes /dev/shm where it has
  // room.
  TORCH_ARG(std::string, backing) = "auto";
  // Leaves the cache in /dev/shm when the last process exits, for the next run.
  TORCH_ARG(bool, keep) = false;
  // Any text that says what the data are. A cache made with another is refused.
  TORCH_ARG(std::string, fingerprint);
  // "always" checks a checksum per slot at every hit.
  TORCH_ARG(std::string, verify) = "never";
  // "yes" fills the cache with huge pages and is an error where there are none, "auto" uses them
  // where there are.
  TORCH_ARG(std::string, huge_pages) = "no";
};

// What a cache did so far, summed over all processes that used it.
struct Stats {
  int64_t hits, misses, fills, bytes, waits, lost, dropped, damaged;
  int64_t filled;       // slots that hold a sample now
  int64_t capacity;     // slots
  int64_t dataset_len;  // samples in the dataset
  int64_t slot_bytes;
  bool frozen;  // no more samples are taken until clear()

  // Share of look-ups that found the sample; 0 before the first.
  double hit_rate() const;
};

// One line, as Python prints it.
std::ostream& operator<<(std::ostream& out, const Stats& stats);

// A handle. Copies share the cache; the last one to go detaches the process from it. Threads may
// use one handle at once, as long as none of them closes or assigns it.
//
// A hit is a view of shared memory, not a copy: editing it in place edits the cache. A view stays
// valid when every handle is gone.
class SharedCache {
 public:
  // Joins the cache of that name, or makes it.
  SharedCache(const Options& options, int64_t dataset_len, at::IntArrayRef data_dims,
              at::ScalarType dtype = at::kByte);

  // Joins the cache of that name, whatever it holds; an error if no process has it open.
  static SharedCache join(const std::string& name);

  // The sample as a view, or nothing if it is not cached.
  std::optional<at::Tensor> get_slot(int64_t idx, bool allow_oob_idx = true,
                                     bool allow_empty_slot = true) const;

  // Stores a copy of the sample; returns whether it was stored. Nothing happens beyond the cache,
  // or where another process has just stored it.
  bool set_slot(int64_t idx, const at::Tensor& value, bool allow_oob_idx = true,
                bool allow_overwrite = false) const;

  // As above where a slot that is occupied, or beyond the cache, is no error.
  bool offer(int64_t idx, const at::Tensor& value) const;

  // Copies of many samples, and which of them were cached; the other rows are zero. Without `out`,
  // the memory of an earlier batch is used again once nothing refers to it.
  std::tuple<at::Tensor, at::Tensor> get_many(const at::Tensor& indices,
                                              const std::optional<at::Tensor>& out = std::nullopt,
                                              int64_t threads = 1) const;

  // Stores many samples; returns which were stored.
  at::Tensor set_many(const at::Tensor& indices, const at::Tensor& batch,
                      bool allow_overwrite = false) const;

  // All slots as one tensor. Reserves the memory of every slot first, filled or not.
  at::Tensor array() const;

  // Empties every slot and lets a frozen cache take values again.
  void clear() const;

  Stats stats() const;
  double fill_fraction() const;
  int64_t size() const;  // slots
  int64_t dataset_len() const;
  std::vector<int64_t> data_dims() const;
  at::ScalarType dtype() const;
  std::string name() const;
  std::string path() const;  // empty for a memfd
  std::string backing() const;

  // Detaches this handle; views stay valid.
  void close() { cache_.reset(); }
  bool closed() const { return !cache_; }

  // For stocache itself.
  explicit SharedCache(std::shared_ptr<Cache> cache) : cache_(std::move(cache)) {}

 private:
  Cache& opened() const;

  std::shared_ptr<Cache> cache_;
};

}  // namespace stocache
