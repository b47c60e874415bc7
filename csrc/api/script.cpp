// torch.classes.stocache.SharedCache: the cache inside TorchScript.
//
// The object survives torch.jit.save: what is saved are its arguments and its name, and loading
// joins the live cache of that name.

#include <torch/custom_class.h>

#include <atomic>

#include "api/cache.h"
#include "api/stats.h"

namespace {

using at::Tensor;
using stocache::Cache;
using stocache::SharedCache;

// What torch.jit.save writes: size_limit_gib; dtype, keep, dataset_len and data_dims; name,
// backing, verify, fingerprint (hashed) and if_gone.
using State = std::tuple<double, std::vector<int64_t>, std::vector<std::string>>;

class ScriptCache : public torch::CustomClassHolder {
 public:
  ScriptCache(std::shared_ptr<Cache> cache, std::string if_gone)
      : cache_(std::move(cache)), if_gone_(std::move(if_gone)) {
    TORCH_CHECK_VALUE(if_gone_ == "error" || if_gone_ == "empty", "if_gone \"", if_gone_,
                      "\" is not known; use \"error\" or \"empty\"");
  }

  // Threads of a C++ trainer may share the object, also while one of them closes it.
  SharedCache handle() const { return SharedCache(cache_.load()); }
  void close() { cache_.store(nullptr); }

  State state() const {
    const auto cache = cache_.load();
    TORCH_CHECK(cache, "this SharedCache is closed; construct a new one");
    const auto o = cache->options();
    std::vector<int64_t> numbers{o.dtype, o.keep, o.dataset_len};
    numbers.insert(numbers.end(), o.dims.begin(), o.dims.end());
    const auto word = [](const ::rust::String& text) { return std::string(text); };
    return {o.size_limit_gib,
            std::move(numbers),
            {word(o.name), word(o.backing), word(o.verify), word(o.fingerprint), if_gone_}};
  }

 private:
  std::atomic<std::shared_ptr<Cache>> cache_;
  std::string if_gone_;
};

using Self = c10::intrusive_ptr<ScriptCache>;

// torch's number of a dtype, which is how TorchScript passes one.
at::ScalarType to_dtype(int64_t dtype) {
  TORCH_CHECK_VALUE(dtype >= 0 && dtype < static_cast<int64_t>(at::ScalarType::Undefined),
                    "Unsupported dtype: ", dtype, "; use a torch.dtype such as torch.uint8");
  return static_cast<at::ScalarType>(dtype);
}

Self make(double size_limit_gib, int64_t dataset_len, const std::vector<int64_t>& data_dims,
          int64_t dtype, const std::string& name, const std::string& if_gone,
          const std::string& backing, bool keep, const std::string& fingerprint,
          const std::string& verify) {
  const auto options = stocache::Options(size_limit_gib)
                           .name(name)
                           .backing(backing)
                           .keep(keep)
                           .fingerprint(fingerprint)
                           .verify(verify);
  return c10::make_intrusive<ScriptCache>(
      Cache::open(stocache::options_of(options, dataset_len, data_dims, to_dtype(dtype))), if_gone);
}

Self join(const std::string& name, const std::string& if_gone) {
  return c10::make_intrusive<ScriptCache>(Cache::join(name), if_gone);
}

Self load(const State& state) {
  const auto& [size_limit_gib, numbers, words] = state;
  const auto is_hex = [](const std::string& text) {
    return text.size() == 32 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
  };
  TORCH_CHECK_VALUE(
      numbers.size() >= 3 && words.size() == 5 && !words[0].empty() && is_hex(words[3]),
      "this file was not saved by stocache " STOCACHE_VERSION "; save it again");
  const auto asked = stocache::Options(size_limit_gib)
                         .name(words[0])
                         .backing(words[1])
                         .keep(numbers[1] != 0)
                         .verify(words[2]);
  const auto data_dims = at::IntArrayRef(numbers).slice(3);
  auto options = stocache::options_of(asked, numbers[2], data_dims, to_dtype(numbers[0]));
  options.fingerprint = ::rust::String::lossy(words[3]);
  options.if_gone = ::rust::String::lossy(words[4]);
  return c10::make_intrusive<ScriptCache>(Cache::open(options), words[4]);
}

c10::Dict<std::string, int64_t> stats(const Self& self) {
  c10::Dict<std::string, int64_t> result;
  for (const auto& [name, value] : stocache::numbers(self->handle().stats())) {
    result.insert(name, value);
  }
  return result;
}

// def_static takes no names and defaults of arguments before torch 2.12.
void name_arguments_of_join() {
  const auto type = torch::getCustomClass("__torch__.torch.classes.stocache.SharedCache");
  auto* join = type->findStaticMethod("join");
  const auto text = c10::StringType::get();
  join->setSchema(join->getSchema().cloneWithArguments(
      {c10::Argument("name", text), c10::Argument("if_gone", text, std::nullopt, "error")}));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(stocache, m) {
  using torch::arg;
  m.class_<ScriptCache>("SharedCache")
      .def(torch::init(&make),
           "A cache of equal-shaped samples in shared memory. if_gone says what loading a saved "
           "module does when no process has the cache open any more: \"error\" or \"empty\".",
           {arg("size_limit_gib"), arg("dataset_len"), arg("data_dims"),
            arg("dtype") = static_cast<int64_t>(at::kByte), arg("name") = "",
            arg("if_gone") = "error", arg("backing") = "auto", arg("keep") = false,
            arg("fingerprint") = "", arg("verify") = "never"})
      .def_static("join", &join, "The cache of that name, whatever it holds.")
      .def("get_slot",
           [](const Self& self, int64_t idx, bool allow_oob_idx, bool allow_empty_slot) {
             return self->handle().get_slot(idx, allow_oob_idx, allow_empty_slot);
           },
           "The sample as a view of shared memory, or None if it is not cached.",
           {arg("idx"), arg("allow_oob_idx") = true, arg("allow_empty_slot") = true})
      .def("set_slot",
           [](const Self& self, int64_t idx, const Tensor& value, bool allow_oob_idx,
              bool allow_overwrite) {
             return self->handle().set_slot(idx, value, allow_oob_idx, allow_overwrite);
           },
           "Stores a copy of the sample; returns whether it was stored.",
           {arg("idx"), arg("value"), arg("allow_oob_idx") = true, arg("allow_overwrite") = false})
      .def("get_many",
           [](const Self& self, const Tensor& indices, const std::optional<Tensor>& out,
              int64_t threads) { return self->handle().get_many(indices, out, threads); },
           "Copies of many samples, and which of them were cached; the other rows are zero.",
           {arg("indices"), arg("out") = std::nullopt, arg("threads") = 1})
      .def("set_many",
           [](const Self& self, const Tensor& indices, const Tensor& batch, bool allow_overwrite) {
             return self->handle().set_many(indices, batch, allow_overwrite);
           },
           "Stores many samples; returns which were stored.",
           {arg("indices"), arg("batch"), arg("allow_overwrite") = false})
      .def("array", [](const Self& self) { return self->handle().array(); })
      .def("clear", [](const Self& self) { self->handle().clear(); })
      .def("stats", &stats, "Counts of all processes so far, by name.")
      .def("fill_fraction", [](const Self& self) { return self->handle().fill_fraction(); })
      .def("__len__", [](const Self& self) { return self->handle().size(); })
      .def("dataset_len", [](const Self& self) { return self->handle().dataset_len(); })
      .def("data_dims", [](const Self& self) { return self->handle().data_dims(); })
      .def("dtype", [](const Self& self) { return static_cast<int64_t>(self->handle().dtype()); })
      .def("name", [](const Self& self) { return self->handle().name(); })
      .def(
          "close", [](const Self& self) { self->close(); },
          "Detaches this object; views stay valid.")
      .def("closed", [](const Self& self) { return self->handle().closed(); })
      .def_pickle([](const Self& self) { return self->state(); },
                  [](const State& state) { return load(state); });
  name_arguments_of_join();
}
