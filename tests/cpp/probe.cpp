// What the tests of the C++ API run: `probe <case> [arguments]`.
//
// Every answer is one line of JSON on stdout, {"ok": ...} or {"error": <Python's name for the
// type>, "text": ...}. What the answers must be is written in tests/python/test_cpp*.py.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <signal.h>
#include <stocache/stocache.h>
#include <sys/wait.h>
#include <torch/data.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iomanip>
#include <iostream>
#include <map>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <typeinfo>
#include <vector>

namespace {

using at::Tensor;
using stocache::Options;
using stocache::SharedCache;
using Words = std::vector<std::string>;

// JSON, as much of it as is needed

std::string in_quotes(std::string_view text) {
  std::ostringstream out;
  out << '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out << '\\' << c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", c);
      out << code;
    } else {
      out << c;
    }
  }
  out << '"';
  return out.str();
}

std::string json(bool value) { return value ? "true" : "false"; }
std::string json(int64_t value) { return std::to_string(value); }
std::string json(const std::string& value) { return in_quotes(value); }

template <typename Items>
std::string list(const Items& items) {
  std::string out;
  for (const auto& item : items) out += (out.empty() ? "" : ", ") + json(int64_t(item));
  return "[" + out + "]";
}

using Field = std::pair<const char*, std::string>;

std::string object(std::initializer_list<Field> fields) {
  std::string out;
  for (const auto& [key, value] : fields) {
    out += (out.empty() ? "" : ", ") + in_quotes(key) + ": " + value;
  }
  return "{" + out + "}";
}

std::string hex(const Tensor& tensor) {
  const Tensor whole = tensor.contiguous();
  const auto* bytes = static_cast<const uint8_t*>(whole.const_data_ptr());
  std::string out;
  for (size_t i = 0; i < whole.nbytes(); ++i) {
    out += "0123456789abcdef"[bytes[i] >> 4];
    out += "0123456789abcdef"[bytes[i] & 15];
  }
  return out;
}

std::string dtype_name(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

std::string shown(const Tensor& tensor) {
  return object({{"dtype", in_quotes(dtype_name(tensor.scalar_type()))},
                 {"shape", list(tensor.sizes())},
                 {"bytes", in_quotes(hex(tensor))}});
}

std::string shown(const stocache::Stats& s) {
  return object({{"hits", json(s.hits)},
                 {"misses", json(s.misses)},
                 {"fills", json(s.fills)},
                 {"bytes", json(s.bytes)},
                 {"waits", json(s.waits)},
                 {"lost", json(s.lost)},
                 {"dropped", json(s.dropped)},
                 {"damaged", json(s.damaged)},
                 {"filled", json(s.filled)},
                 {"capacity", json(s.capacity)},
                 {"dataset_len", json(s.dataset_len)},
                 {"slot_bytes", json(s.slot_bytes)},
                 {"frozen", json(s.frozen)}});
}

// As it is printed into a stream that has formats of its own.
std::string line_of(const stocache::Stats& stats) {
  std::ostringstream out;
  out << std::hex << std::setprecision(1) << stats << ' ' << 255;
  std::string text = out.str();
  TORCH_CHECK(text.ends_with(" ff"), "printing changed the stream");
  return in_quotes(text.substr(0, text.size() - 3));
}

// Errors

// The exact type, as a base class would hide a wrong one.
std::string python_type(const std::exception& error) {
  const std::type_info& type = typeid(error);
  if (type == typeid(c10::ValueError)) return "ValueError";
  if (type == typeid(c10::IndexError)) return "IndexError";
  if (type == typeid(c10::TypeError)) return "TypeError";
  if (type == typeid(stocache::SpaceError)) return "MemoryError";
  if (type == typeid(stocache::SystemError)) return "OSError";
  if (type == typeid(c10::NotImplementedError)) return "NotImplementedError";
  if (type == typeid(c10::Error)) return "RuntimeError";
  return type.name();
}

std::string answer(const std::function<std::string()>& act) {
  try {
    return object({{"ok", act()}});
  } catch (const c10::Error& error) {
    return object({{"error", in_quotes(python_type(error))},
                   {"text", in_quotes(error.what_without_backtrace())}});
  } catch (const std::exception& error) {
    return object({{"error", in_quotes(python_type(error))}, {"text", in_quotes(error.what())}});
  }
}

// Samples whose every word names its sample, version and position: samples.py has the picture.

Tensor whole(int64_t index, int64_t words, int64_t version = 0) {
  return at::arange(words, at::kLong).add_(index << 47 | version << 24);
}

bool is_whole(int64_t index, const Tensor& row) {
  const int64_t version = row[0].item<int64_t>() >> 24 & ((1 << 23) - 1);
  return at::equal(row, whole(index, row.numel(), version));
}

SharedCache words_cache(const std::string& name, int64_t length, int64_t words,
                        const std::string& backing = "auto") {
  const double gib = static_cast<double>(length * (8 * words + 1) + 4096) / (1 << 30);
  return SharedCache(Options(gib).name(name).backing(backing), length, {words}, at::kLong);
}

// serve: runs the commands that come on stdin, so that a test can take turns with this process.
//
// A text is written in hex after an x; a sample is its bytes in hex, or a word for something odd.

std::string unhex(const std::string& word) {
  std::string out;
  for (size_t i = 1; i + 1 < word.size(); i += 2) {
    out += static_cast<char>(std::stoi(word.substr(i, 2), nullptr, 16));
  }
  return out;
}

std::vector<int64_t> numbers(const std::string& word, char separator) {
  std::vector<int64_t> out;
  std::istringstream in(word == "-" ? "" : word);
  for (std::string part; std::getline(in, part, separator);) out.push_back(std::stoll(part));
  return out;
}

at::ScalarType dtype_of(const std::string& name) {
  if (name == "undefined") return at::ScalarType::Undefined;
  if (name == "none") return static_cast<at::ScalarType>(99);
  return c10::getStringToDtypeMap().at(name);
}

Tensor freed(Tensor tensor) {
  tensor.storage().set_data_ptr_noswap(c10::DataPtr());
  tensor.storage().set_nbytes(0);
  return tensor;
}

Tensor value_of(const std::string& word, std::vector<int64_t> dims, at::ScalarType dtype) {
  if (word == "undefined") return Tensor();
  if (word == "longer") {
    dims.back() += 1;
    return at::zeros(dims, dtype);
  }
  if (word == "deeper") {
    dims.insert(dims.begin(), 1);
    return at::zeros(dims, dtype);
  }
  if (word == "zeros") return at::zeros(dims, dtype);
  if (word == "float64") return at::zeros(dims, at::kDouble);
  if (word == "meta") return at::empty(dims, at::TensorOptions(dtype).device(at::kMeta));
  if (word == "sparse") return at::zeros(dims, dtype).to_sparse();
  if (word == "quantized") return at::quantize_per_tensor(at::zeros(dims), 1.0, 0, at::kQUInt8);
  if (word == "freed") return freed(at::zeros(dims, dtype));
  if (word == "strided") {
    std::vector<int64_t> twice = dims;
    twice.back() *= 2;
    return at::ones(twice, dtype).slice(-1, 0, twice.back(), 2);
  }
  Tensor tensor = at::empty(dims, dtype);
  const std::string bytes = unhex(word);
  TORCH_CHECK(bytes.size() == tensor.nbytes(), "the test gave ", bytes.size(), " bytes");
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

Tensor indices_of(const std::string& word) {
  if (word == "undefined") return Tensor();
  if (word == "float") return at::zeros({2});
  if (word == "bool") return at::zeros({2}, at::kBool);
  if (word == "matrix") return at::zeros({2, 2}, at::kLong);
  if (word == "meta") return at::empty({2}, at::TensorOptions(at::kLong).device(at::kMeta));
  if (word == "sparse") return at::zeros({2}, at::kLong).to_sparse();
  if (word == "freed") return freed(at::zeros({2}, at::kLong));
  if (word == "int32") return at::arange(2, at::kInt);
  return at::tensor(numbers(word, ','), at::kLong);
}

class Server {
 public:
  std::string run(const Words& w) {
    const std::string& what = w.at(0);
    if (what == "open") return open(w);
    if (what == "join") return put(w.at(1), SharedCache::join(unhex(w.at(2))));
    if (what == "operator") {  // stocache::get, as a graph calls it
      std::vector<c10::IValue> stack{unhex(w.at(1)), int64_t(std::stoll(w.at(2)))};
      c10::Dispatcher::singleton().findSchemaOrThrow("stocache::get", "").callBoxed(stack);
      return shown(stack.at(0).toTensor());
    }
    if (what == "copy") return put(w.at(1), SharedCache(at(w.at(2))));
    if (what == "move") return put(w.at(1), SharedCache(std::move(at(w.at(2)))));
    if (what == "reset") {
      views_.clear();
      caches_.clear();
      return "null";
    }
    if (what == "view") return shown(views_.at(w.at(1)));
    if (what == "edit") {
      views_.at(w.at(1)).fill_(std::stoll(w.at(2)));
      return "null";
    }
    SharedCache& cache = at(w.at(1));
    if (what == "forget") {
      caches_.erase(w.at(1));
      return "null";
    }
    if (what == "close") {
      cache.close();
      return "null";
    }
    if (what == "closed") return json(cache.closed());
    if (what == "get") {
      const auto hit = cache.get_slot(std::stoll(w.at(2)), w.at(3) == "1", w.at(4) == "1");
      return hit ? shown(*hit) : "null";
    }
    if (what == "hold") {
      views_[w.at(3)] = w.at(2) == "array" ? cache.array() : *cache.get_slot(std::stoll(w.at(2)));
      return "null";
    }
    if (what == "set") {
      return json(
          cache.set_slot(std::stoll(w.at(2)), value(w.at(3)), w.at(4) == "1", w.at(5) == "1"));
    }
    if (what == "offer") return json(cache.offer(std::stoll(w.at(2)), value(w.at(3))));
    if (what == "get_many") return get_many(cache, w);
    if (what == "set_many") {
      const Tensor indices = indices_of(w.at(2));
      const Tensor batch = value(w.at(3), indices.defined() ? indices.numel() : 1);
      return shown(cache.set_many(indices, batch, w.at(4) == "1"));
    }
    if (what == "array") return shown(cache.array());
    if (what == "clear") {
      cache.clear();
      return "null";
    }
    if (what == "stats") return shown(cache.stats());
    if (what == "line") return line_of(cache.stats());
    if (what == "facts") return facts(cache);
    throw std::runtime_error("the test asked for " + what);
  }

 private:
  std::string open(const Words& w) {
    Options options(std::stod(w.at(2)));
    for (size_t i = 6; i < w.size(); ++i) {
      const auto split = w[i].find('=');
      const std::string key = w[i].substr(0, split), text = unhex(w[i].substr(split + 1));
      if (key == "name") options.name(text);
      if (key == "backing") options.backing(text);
      if (key == "keep") options.keep(true);
      if (key == "fingerprint") options.fingerprint(text);
      if (key == "verify") options.verify(text);
    }
    const auto dims = numbers(w.at(4), 'x');
    return put(w.at(1), SharedCache(options, std::stoll(w.at(3)), dims, dtype_of(w.at(5))));
  }

  SharedCache& at(const std::string& key) { return caches_.at(key); }

  std::string put(const std::string& key, SharedCache cache) {
    if (!cache.closed()) {
      dims_ = cache.data_dims();
      dtype_ = cache.dtype();
    }
    caches_.insert_or_assign(key, std::move(cache));
    return "null";
  }

  // A value for the cache that was opened last; a closed one cannot say what it takes.
  Tensor value(const std::string& word, std::optional<int64_t> rows = std::nullopt) const {
    std::vector<int64_t> dims = dims_;
    if (rows) dims.insert(dims.begin(), *rows);
    return value_of(word, dims, dtype_);
  }

  std::string get_many(const SharedCache& cache, const Words& w) const {
    const Tensor indices = indices_of(w.at(2));
    std::optional<Tensor> out;
    if (w.at(3) == "itself") {
      out = cache.array().narrow(0, 0, indices.numel());
    } else if (w.at(3) != "-") {
      out = value(w.at(3), indices.numel());
    }
    const auto [batch, found] = cache.get_many(indices, out, std::stoll(w.at(4)));
    TORCH_CHECK(!out || batch.is_same(*out), "the batch is not in out");
    return object({{"batch", shown(batch)}, {"found", shown(found)}});
  }

  static std::string facts(const SharedCache& cache) {
    std::ostringstream fraction;
    fraction << std::setprecision(17) << cache.fill_fraction();
    return object({{"size", json(cache.size())},
                   {"dataset_len", json(cache.dataset_len())},
                   {"data_dims", list(cache.data_dims())},
                   {"dtype", in_quotes(dtype_name(cache.dtype()))},
                   {"name", json(cache.name())},
                   {"path", json(cache.path())},
                   {"backing", json(cache.backing())},
                   {"fill_fraction", fraction.str()}});
  }

  std::map<std::string, SharedCache> caches_;
  std::map<std::string, Tensor> views_;
  std::vector<int64_t> dims_;
  at::ScalarType dtype_ = at::kByte;
};

void serve(const Words&) {
  Server server;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    Words words;
    for (std::string word; in >> word;) words.push_back(word);
    std::cout << answer([&] { return server.run(words); }) << std::endl;
  }
}

// Threads

// Runs `act` in so many threads; the first exception of theirs is thrown here.
void in_threads(int count, const std::function<void(int)>& act) {
  std::vector<std::exception_ptr> failed(count);
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t) {
    threads.emplace_back([&, t] {
      try {
        act(t);
      } catch (...) {
        failed[t] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : failed) {
    if (error) std::rethrow_exception(error);
  }
}

constexpr int64_t kLength = 48, kWords = 8192;

std::vector<int64_t> shuffled(int64_t length, uint32_t seed) {
  std::vector<int64_t> order(length);
  for (int64_t i = 0; i < length; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  return order;
}

// Four threads fill and read one cache. What they read is checked word by word.
std::string threads(const Words& w) {
  const SharedCache cache = words_cache(w.at(0), kLength, kWords);
  std::atomic<int64_t> hits{0}, stored{0}, copies{0}, wrong{0};
  // Views of samples that nobody replaces.
  in_threads(4, [&](int t) {
    for (int round = 0; round < 4; ++round) {
      for (const int64_t i : shuffled(kLength, t * 100 + round)) {
        if (const auto view = cache.get_slot(i)) {
          hits += 1;
          wrong += !is_whole(i, *view);
        } else {
          stored += cache.offer(i, whole(i, kWords));
        }
      }
    }
  });
  // Copies, while the samples are replaced by others and the cache is emptied.
  in_threads(4, [&](int t) {
    for (int round = 0; round < 6; ++round) {
      const auto order = shuffled(kLength, t * 100 + round + 50);
      for (const int64_t i : at::IntArrayRef(order).slice(0, 12)) {
        cache.set_slot(i, whole(i, kWords, 1 + t * 100 + round), true, true);
      }
      const Tensor indices = at::tensor(at::IntArrayRef(order), at::kLong);
      const auto [batch, found] = cache.get_many(indices, std::nullopt, 1 + t % 2);
      for (int64_t row = 0; row < kLength; ++row) {
        if (!found[row].item<bool>()) continue;
        copies += 1;
        wrong += !is_whole(order[row], batch[row]);
      }
      if (t == 0 && round % 3 == 2) cache.clear();
    }
  });
  // The check itself is checked: one foreign word is one wrong sample.
  cache.set_slot(0, whole(0, kWords), true, true);
  Tensor view = *cache.get_slot(0);
  const bool before = is_whole(0, view);
  view[kWords / 2] += 1 << 24;
  const bool after = is_whole(0, view);
  return object({{"hits", json(hits.load())},
                 {"stored", json(stored.load())},
                 {"copies", json(copies.load())},
                 {"wrong", json(wrong.load())},
                 {"control", "[" + json(before) + ", " + json(after) + "]"}});
}

// Four threads that open, use and close caches: one that all of them know, and their own.
std::string churn(const Words& w) {
  std::atomic<int64_t> wrong{0}, used{0};
  const int64_t rounds = std::stoll(w.at(2));
  in_threads(4, [&](int) {
    for (int64_t round = 0; round < rounds; ++round) {
      const bool own = round % 4 == 3;
      const SharedCache cache = words_cache(own ? "" : w.at(0), 8, 512, w.at(1));
      for (int64_t i = 0; i < 8; ++i) {
        if (const auto view = cache.get_slot(i)) {
          wrong += !is_whole(i, *view);
        } else {
          cache.offer(i, whole(i, 512));
        }
        used += 1;
      }
    }
  });
  return object({{"wrong", json(wrong.load())}, {"used", json(used.load())}});
}

// One thread finds a slot empty, another fills it, the first one fills it too.
std::string second_thread(const Words& w) {
  const SharedCache cache = words_cache(w.at(0), 8, 16);
  const bool missed = !cache.get_slot(1);
  in_threads(1, [&](int) { cache.set_slot(1, whole(1, 16)); });
  const bool offered = cache.offer(1, whole(1, 16));
  return object({{"missed", json(missed)},
                 {"offered", json(offered)},
                 {"set", answer([&] { return json(cache.set_slot(1, whole(1, 16))); })}});
}

// Processes

// What a forked child does; its exit status is 0 if all was well.
int child_of_fork(const SharedCache& cache, int64_t mine, int64_t length, int64_t words) {
  alarm(60);  // a hang ends as a signal
  if (!cache.offer(mine, whole(mine, words))) return 2;
  for (int64_t i = 0; i < length; ++i) {
    const auto view = cache.get_slot(i);
    if (view && !is_whole(i, *view)) return 3;
  }
  const auto [batch, found] = cache.get_many(at::arange(length, at::kLong));
  for (int64_t i = 0; i < length; ++i) {
    if (found[i].item<bool>() && !is_whole(i, batch[i])) return 4;
  }
  const SharedCache again = SharedCache::join(cache.name());
  if (!again.get_slot(mine)) return 5;
  const SharedCache other = words_cache("", 4, 16);
  return other.offer(0, whole(0, 16)) ? 0 : 6;
}

// Forks while three threads read and write; every child uses the cache.
std::string forks(const Words& w) {
  constexpr int64_t length = 72, words = 4096, busy = 48;
  const SharedCache cache = words_cache(w.at(0), length, words, w.at(1));
  std::atomic<bool> over{false};
  std::vector<int64_t> statuses;
  std::thread forker([&] {
    for (int64_t n = 0; n < length - busy; ++n) {
      const pid_t pid = fork();
      if (pid == 0) {
        const int status = child_of_fork(cache, busy + n, length, words);
        // exit() also runs what libraries registered for the end of a process, which torch's take
        // long to do.
        if (n % 8) std::_Exit(status);
        std::exit(status);
      }
      int status = -1;
      waitpid(pid, &status, 0);
      statuses.push_back(status);
    }
    over = true;
  });
  std::atomic<int64_t> wrong{0};
  in_threads(3, [&](int t) {
    for (uint32_t seed = t; !over; seed += 3) {
      for (const int64_t i : shuffled(busy, seed)) {
        cache.offer(i, whole(i, words));
        const auto view = cache.get_slot(i);
        wrong += view && !is_whole(i, *view);  // none: another thread is just writing it
      }
    }
  });
  forker.join();
  int64_t written = 0;
  for (int64_t i = busy; i < length; ++i) {
    const auto view = cache.get_slot(i);
    written += view && is_whole(i, *view);
  }
  return object({{"statuses", list(statuses)},
                 {"wrong", json(wrong.load())},
                 {"written", json(written)},
                 {"children", json(length - busy)}});
}

// A writer for every line on stdin; each replaces samples until it is killed.
void herd(const Words& w) {
  const int64_t length = std::stoll(w.at(1)), words = std::stoll(w.at(2));
  const SharedCache cache = words_cache(w.at(0), length, words);
  std::cout << object({{"ok", "null"}}) << std::endl;
  int64_t round = 0;
  for (std::string line; std::getline(std::cin, line);) {
    ++round;
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(60);
      for (int64_t version = 0;; ++version) {
        const int64_t i = (version * 7 + round) % length;
        const int64_t mark = (round * 1000 + version) % (1 << 23);
        if (round % 3) {
          cache.set_slot(i, whole(i, words, mark), true, true);
        } else {
          const Tensor both =
              at::stack({whole(i, words, mark), whole((i + 1) % length, words, mark)});
          cache.set_many(at::tensor({i, (i + 1) % length}, at::kLong), both, true);
        }
      }
    }
    std::cout << object({{"ok", json(int64_t(pid))}}) << std::endl;
    int status = 0;
    waitpid(pid, &status, 0);
    std::cout << object({{"ok", json(int64_t(status))}}) << std::endl;
  }
}

// Fills samples, tells so and waits: to be killed, or to end as main() ends.
void fill(const Words& w) {
  // Ends after main: nobody closes it by hand.
  static const SharedCache cache = words_cache(w.at(0), 8, 512, w.at(1));
  for (int64_t i = 0; i < 8; ++i) cache.offer(i, whole(i, 512));
  std::cout << object({{"ok", json(cache.path())}}) << std::endl;
  std::string line;
  std::getline(std::cin, line);
}

// Datasets

// Samples that say their index, and how often each was asked for. Copies count together.
struct Loads {
  explicit Loads(int64_t length) : of(length) {}
  std::vector<std::atomic<int64_t>> of;

  std::vector<int64_t> list() const { return {of.begin(), of.end()}; }
};

Tensor sample(size_t index) { return at::full({3, 4}, static_cast<int64_t>(index), at::kInt); }
Tensor label(size_t index) {
  return at::scalar_tensor(static_cast<int64_t>(index) + 100, at::kLong);
}

struct SourceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Labelled : public torch::data::datasets::Dataset<Labelled> {
 public:
  explicit Labelled(int64_t length) : loads(std::make_shared<Loads>(length)) {}

  torch::data::Example<> get(size_t index) override {
    loads->of.at(index) += 1;
    if (index == broken) throw SourceError("sample 3 cannot be read");
    if (index == odd) return {at::zeros({3, 5}, at::kInt), label(index)};
    return {sample(index), label(index)};
  }
  std::optional<size_t> size() const override { return loads->of.size(); }

  std::shared_ptr<Loads> loads;
  size_t broken = -1, odd = -1;
};

class Plain : public torch::data::datasets::Dataset<Plain, torch::data::TensorExample> {
 public:
  explicit Plain(int64_t length) : loads(std::make_shared<Loads>(length)) {}

  torch::data::TensorExample get(size_t index) override {
    loads->of.at(index) += 1;
    return sample(index);
  }
  std::optional<size_t> size() const override { return loads->of.size(); }

  std::shared_ptr<Loads> loads;
};

// A dataset that is asked for batches alone, and remembers for what.
class Batches : public torch::data::datasets::BatchDataset<Batches> {
 public:
  std::vector<torch::data::Example<>> get_batch(c10::ArrayRef<size_t> indices) override {
    asked->push_back({indices.begin(), indices.end()});
    std::vector<torch::data::Example<>> batch;
    for (const size_t index : indices) batch.push_back({sample(index), label(index)});
    if (asked->size() == short_one) batch.pop_back();
    return batch;
  }
  std::optional<size_t> size() const override { return 16; }

  std::shared_ptr<std::vector<std::vector<int64_t>>> asked =
      std::make_shared<std::vector<std::vector<int64_t>>>();
  size_t short_one = 0;  // which of the batches lacks a sample
};

class Unsized : public Labelled {
 public:
  using Labelled::Labelled;
  std::optional<size_t> size() const override { return std::nullopt; }
};

Options a_mib() { return Options(1.0 / 1024); }

stocache::Hits hits_of(const std::string& word) {
  return word == "views" ? stocache::Hits::views : stocache::Hits::copies;
}

bool is_right(size_t index, const torch::data::Example<>& example) {
  return at::equal(example.data, sample(index)) && at::equal(example.target, label(index)) &&
         example.data.scalar_type() == at::kInt && example.target.scalar_type() == at::kLong;
}

// All samples, `epochs` times: how often each was loaded, and whether all were right.
template <typename Cached>
std::string epochs(Cached& dataset, const Loads& loads, int epochs) {
  bool right = true;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (size_t i = 0; i < *dataset.size(); ++i) right &= is_right(i, dataset.get(i));
  }
  return object({{"right", json(right)},
                 {"loads", list(loads.list())},
                 {"data", shown(dataset.data().stats())},
                 {"target", shown(dataset.target().stats())}});
}

std::string dataset_twice(const Words&) {
  Labelled source(16);
  const auto loads = source.loads;
  auto dataset = stocache::cached(source, a_mib());
  return epochs(dataset, *loads, 2);
}

std::string dataset_small(const Words& w) {
  Labelled source(16);
  const auto loads = source.loads;
  auto dataset = stocache::cached(source, Options(std::stod(w.at(0)) / (1 << 30)));
  return epochs(dataset, *loads, 2);
}

std::string dataset_named(const Words& w) {
  Labelled source(16);
  const auto loads = source.loads;
  auto dataset = stocache::cached(source, a_mib().name(w.at(0)));
  std::cout << object({{"ok", epochs(dataset, *loads, 2)}}) << std::endl;
  std::string line;
  std::getline(std::cin, line);  // keeps the cache for the next process
  return object(
      {{"data", in_quotes(dataset.data().name())}, {"target", in_quotes(dataset.target().name())}});
}

// An in-place edit of a hit, and of what the source gave.
std::string dataset_edited(const Words& w) {
  const auto hits = hits_of(w.at(0));
  auto dataset = stocache::cached(Labelled(16), a_mib(), hits);
  const auto spoil = [](torch::data::Example<> example) {
    example.data.fill_(-1);
    example.target.fill_(-1);
  };
  spoil(dataset.get(5));
  const bool after_miss = is_right(5, dataset.get(5));
  spoil(dataset.get(5));
  const auto now = dataset.get(5);
  return object({{"after_miss", json(after_miss)},
                 {"after_hit", json(is_right(5, now))},
                 {"data", json(now.data[0][0].item<int64_t>())},
                 {"target", json(now.target.item<int64_t>())}});
}

std::string dataset_plain(const Words&) {
  Plain source(16);
  const auto loads = source.loads;
  auto dataset = stocache::cached(source, a_mib());
  bool right = true;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (size_t i = 0; i < 16; ++i) right &= at::equal(dataset.get(i).data, sample(i));
  }
  // Two batches at once: the second must not take the memory of the first.
  auto stacked = dataset.stacked();
  const std::vector<size_t> indices{5, 2, 5}, others{1, 3, 4};
  const at::Tensor batch = stacked.get_batch(indices).data, other = stacked.get_batch(others).data;
  for (int64_t i = 0; i < 3; ++i) {
    right &= at::equal(batch[i], sample(indices[i])) && at::equal(other[i], sample(others[i]));
  }
  return object({{"right", json(right)},
                 {"loads", list(loads->list())},
                 {"data", shown(dataset.data().stats())}});
}

// Samples that were mapped before they are cached, as a dataset's deterministic part is.
std::string dataset_mapped(const Words& w) {
  const auto hits = hits_of(w.at(0));
  int64_t mapped = 0;
  Labelled source(16);
  const auto loads = source.loads;
  auto dataset = stocache::cached(
      std::move(source).map(torch::data::transforms::Lambda<torch::data::Example<>>(
          [&](torch::data::Example<> example) {
            ++mapped;
            return torch::data::Example<>(example.data * 2, example.target);
          })),
      a_mib(), hits);
  bool right = true;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (size_t i = 0; i < 16; ++i) {
      const auto example = dataset.get(i);
      right &= at::equal(example.data, sample(2 * i)) && at::equal(example.target, label(i));
    }
  }
  return object({{"right", json(right)}, {"loads", list(loads->list())}, {"mapped", json(mapped)}});
}

// Batches in which some samples are cached: what the source is asked for, and what comes out.
std::string dataset_batches(const Words& w) {
  const auto hits = hits_of(w.at(0));
  Batches source;
  source.short_one = std::stoull(w.at(1));
  const auto asked = source.asked;
  auto dataset = stocache::cached(source, a_mib(), hits);
  bool right = true;
  for (const std::vector<size_t>& indices : std::vector<std::vector<size_t>>{
           {3, 1, 2}, {1, 7, 3, 0, 9, 7}, {9, 7, 1}, {}, {4}, {15, 15}}) {
    if (w.at(0) == "stacked") {
      const auto stacked = dataset.get_stacked(indices);
      const auto rows = static_cast<int64_t>(indices.size());
      right &= stacked.data.size(0) == rows && stacked.target.size(0) == rows;
      for (int64_t i = 0; i < rows; ++i) {
        right &= is_right(indices[i], {stacked.data[i], stacked.target[i]});
      }
      continue;
    }
    const auto batch = dataset.get_batch(indices);
    right &= batch.size() == indices.size();
    for (size_t i = 0; i < batch.size(); ++i) right &= is_right(indices[i], batch[i]);
  }
  std::string lists;
  for (const auto& indices : *asked) lists += (lists.empty() ? "" : ", ") + list(indices);
  return object({{"right", json(right)},
                 {"asked", "[" + lists + "]"},
                 {"data", shown(dataset.data().stats())},
                 {"target", shown(dataset.target().stats())}});
}

// Three shuffled epochs of batches, each taken apart again.
template <typename Batches>
std::string three_epochs(Batches batches, const std::string& workers, const Loads& loads,
                         const SharedCache& data) {
  auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
      std::move(batches), torch::data::DataLoaderOptions(8).workers(std::stoull(workers)));
  std::vector<std::string> seen;
  bool right = true;
  for (int epoch = 0; epoch < 3; ++epoch) {
    std::vector<int64_t> labels;
    for (const auto& batch : *loader) {
      right &= batch.data.size(0) == batch.target.numel();
      for (int64_t row = 0; row < batch.target.numel(); ++row) {
        const int64_t index = batch.target[row].template item<int64_t>() - 100;
        right &= at::equal(batch.data[row], sample(index));
        labels.push_back(index);
      }
    }
    std::sort(labels.begin(), labels.end());
    seen.push_back(list(labels));
  }
  return object({{"right", json(right)},
                 {"seen", "[" + seen[0] + ", " + seen[1] + ", " + seen[2] + "]"},
                 {"loads", list(loads.list())},
                 {"data", shown(data.stats())}});
}

std::string dataset_loader(const Words& w) {
  Labelled source(50);
  const auto loads = source.loads;
  auto cached = stocache::cached(source, a_mib(), hits_of(w.at(0)));
  const SharedCache data = cached.data();
  if (w.at(0) == "stacked") {
    return three_epochs(std::move(cached).stacked(), w.at(1), *loads, data);
  }
  return three_epochs(std::move(cached).map(torch::data::transforms::Stack<>()), w.at(1), *loads,
                      data);
}

// Samples with a history, as a module makes them: what a miss and what a hit gives.
std::string dataset_history(const Words&) {
  class Computed : public torch::data::datasets::Dataset<Computed, torch::data::TensorExample> {
   public:
    torch::data::TensorExample get(size_t index) override { return weight_ * double(index); }
    std::optional<size_t> size() const override { return 4; }

   private:
    Tensor weight_ = at::ones({2}).requires_grad_();
  };
  auto dataset = stocache::cached(Computed(), a_mib());
  std::vector<bool> with_history{Computed().get(2).data.requires_grad()};
  for (int look = 0; look < 2; ++look) {
    with_history.push_back(dataset.get(2).data.requires_grad());
    with_history.push_back(dataset.get_stacked(size_t{3}).data.requires_grad());
  }
  return list(with_history);
}

std::string dataset_broken(const Words& w) {
  Labelled source(16);
  (w.at(0) == "throws" ? source.broken : source.odd) = 3;
  auto dataset = stocache::cached(source, a_mib());
  std::string type;
  const std::string first = answer([&] { return json(dataset.get(3).data.numel()); });
  const std::string second = answer([&] {
    try {
      dataset.get(3);
    } catch (const SourceError&) {
      type = "SourceError";
      throw;
    }
    return std::string("null");
  });
  return object({{"first", first},
                 {"second", second},
                 {"type", in_quotes(type)},
                 {"good", json(is_right(4, dataset.get(4)))},
                 {"data", shown(dataset.data().stats())},
                 {"target", shown(dataset.target().stats())}});
}

std::string dataset_wrong(const Words& w) {
  const auto make = [](auto source, const Options& options) {
    auto dataset = stocache::cached(std::move(source), options);
    return json(int64_t(*dataset.size()));
  };
  if (w.at(0) == "empty") return make(Labelled(0), a_mib());
  if (w.at(0) == "unsized") return make(Unsized(4), a_mib());
  if (w.at(0) == "name") return make(Labelled(4), a_mib().name("a/b"));
  if (w.at(0) == "index") {
    auto dataset = stocache::cached(Labelled(4), a_mib());
    dataset.get(4);
  }
  return make(Labelled(4), Options(std::stod(w.at(0))));
}

using Case = std::function<std::string(const Words&)>;

const std::map<std::string, Case> kAnswers{
    {"threads", threads},
    {"churn", churn},
    {"second_thread", second_thread},
    {"forks", forks},
    {"dataset_twice", dataset_twice},
    {"dataset_small", dataset_small},
    {"dataset_named", dataset_named},
    {"dataset_edited", dataset_edited},
    {"dataset_plain", dataset_plain},
    {"dataset_mapped", dataset_mapped},
    {"dataset_batches", dataset_batches},
    {"dataset_loader", dataset_loader},
    {"dataset_history", dataset_history},
    {"dataset_broken", dataset_broken},
    {"dataset_wrong", dataset_wrong},
};

const std::map<std::string, std::function<void(const Words&)>> kTalks{
    {"serve", serve},
    {"herd", herd},
    {"fill", fill},
};

}  // namespace

int main(int argc, char** argv) {
  // A forked child hangs in OpenMP if its parent has ever run a parallel region.
  at::set_num_threads(1);
  const std::string name = argc > 1 ? argv[1] : "";
  const Words rest(argv + std::min(argc, 2), argv + argc);
  if (const auto talk = kTalks.find(name); talk != kTalks.end()) {
    talk->second(rest);
    return 0;
  }
  const auto found = kAnswers.find(name);
  if (found == kAnswers.end()) {
    std::cerr << "probe: there is no case '" << name << "'\n";
    return 2;
  }
  std::cout << answer([&] { return found->second(rest); }) << std::endl;
  return 0;
}
