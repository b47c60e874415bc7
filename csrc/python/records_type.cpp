#include "python/records_type.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "python/acquiring_type.h"
#include "python/gathering.h"
#include "python/gathering_type.h"
#include "python/indices.h"
#include "python/records.h"
#include "python/servers_type.h"
#include "python/shards.h"
#include "python/shared_batches.h"
#include "python/support.h"

namespace stocache::python {
namespace {

struct PyRecords {
  PyObject_HEAD std::shared_ptr<RecordCache> cache;
};

PyTypeObject* records_type = nullptr;

// The reference keeps it open for the call, also if another thread closes it meanwhile.
std::shared_ptr<RecordCache> opened(PyObject* self) {
  const auto& cache = reinterpret_cast<PyRecords*>(self)->cache;
  TORCH_CHECK(cache, "this CachedDataset is closed; construct a new one");
  return cache;
}

// _open(limit_bytes, dataset_len, policy, name, backing, keep, fingerprint, huge_pages, instance,
// pid, fd): CachedDataset has checked the types.
PyObject* open_records(PyObject* self, PyObject* args) {
  unsigned long long limit = 0;
  long long dataset_len = 0;
  const char *policy = nullptr, *name = nullptr, *backing = nullptr, *fingerprint = nullptr,
             *huge_pages = nullptr, *instance = nullptr;
  int keep = 0, fd = -1;
  unsigned int pid = 0;
  if (!PyArg_ParseTuple(args, "KLssspsssIi", &limit, &dataset_len, &policy, &name, &backing, &keep,
                        &fingerprint, &huge_pages, &instance, &pid, &fd)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    bridge::RecordOptions options;
    options.limit_bytes = limit;
    options.dataset_len = dataset_len;
    options.policy = policy;
    options.name = name;
    options.backing = backing;
    options.keep = keep;
    options.fingerprint = fingerprint;
    options.huge_pages = huge_pages;
    options.instance = instance;
    options.pid = pid;
    options.fd = fd;
    reinterpret_cast<PyRecords*>(self)->cache = std::make_shared<RecordCache>(options);
    Py_RETURN_NONE;
  });
}

PyObject* arguments(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const auto o = translated([&] { return cache->records().options(); });
    return Py_BuildValue("KLsssNsssIi", o.limit_bytes, static_cast<long long>(o.dataset_len),
                         std::string(o.policy).c_str(), std::string(o.name).c_str(),
                         std::string(o.backing).c_str(), PyBool_FromLong(o.keep),
                         std::string(o.fingerprint).c_str(), std::string(o.huge_pages).c_str(),
                         std::string(o.instance).c_str(), o.pid, o.fd);
  });
}

// open_disk(path, budget, fingerprint, keys, table, compression): the level below. Keys are two
// numbers of 8 bytes for each sample, or none; or the number of a table that has them.
PyObject* open_disk(PyObject* self, PyObject* args) {
  Py_buffer path{}, keys{};
  const char *fingerprint = nullptr, *compression = nullptr;
  unsigned long long budget = 0, table = 0;
  if (!PyArg_ParseTuple(args, "y*Ksy*Ks", &path, &budget, &fingerprint, &keys, &table,
                        &compression)) {
    return nullptr;
  }
  struct Release {
    Py_buffer &path, &keys;
    ~Release() {
      PyBuffer_Release(&path);
      PyBuffer_Release(&keys);
    }
  } release{path, keys};
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    bridge::DiskOptions options;
    const auto* bytes = static_cast<const uint8_t*>(path.buf);
    std::copy(bytes, bytes + path.len, std::back_inserter(options.path));
    options.budget = budget;
    options.fingerprint = fingerprint;
    options.table = table;
    options.compression = compression;
    const auto* words = static_cast<const char*>(keys.buf);
    options.keys.reserve(static_cast<size_t>(keys.len) / 8);
    for (Py_ssize_t at = 0; at + 8 <= keys.len; at += 8) {
      uint64_t word = 0;
      std::memcpy(&word, words + at, 8);
      options.keys.push_back(word);
    }
    cache->open_disk(options);
    Py_RETURN_NONE;
  });
}

// disk() -> what open_disk() takes in another process, or None.
PyObject* disk(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const auto o = translated([&] { return cache->records().disk_options(); });
    if (o.path.empty()) Py_RETURN_NONE;
    return Py_BuildValue(
        "y#Ksy#Ks", reinterpret_cast<const char*>(o.path.data()),
        static_cast<Py_ssize_t>(o.path.size()), static_cast<unsigned long long>(o.budget),
        std::string(o.fingerprint).c_str(), "", Py_ssize_t{0},
        static_cast<unsigned long long>(o.table), std::string(o.compression).c_str());
  });
}

// prefetch(indices): begins to read these from levels below.
PyObject* prefetch(PyObject* self, PyObject* argument) {
  std::vector<int64_t> indices;
  if (!to_indices(argument, indices)) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    translated([&] {
      WithoutGil free;
      cache->records().prefetch({indices.data(), indices.size()});
    });
    Py_RETURN_NONE;
  });
}

PyObject* disk_stats(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const auto s = translated([&] {
      WithoutGil free;
      return cache->records().disk_stats();
    });
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:N}", "hits", s.hits, "fills",
                         s.fills, "filled", s.records, "used_bytes", s.bytes, "data_bytes",
                         s.capacity, "evicted", s.evicted, "dropped", s.dropped, "waiting",
                         s.waiting, "errors", s.errors, "writes", PyBool_FromLong(s.writes));
  });
}

// open_cluster(url, name, fingerprint, secret, ttl_millis): the level below all others.
PyObject* open_cluster(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    bridge::ClusterOptions options;
    if (!to_cluster(args, options)) return nullptr;
    opened(self)->open_cluster(options);
    Py_RETURN_NONE;
  });
}

// cluster() -> what open_cluster() takes in another process, or None.
PyObject* cluster(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const auto o = translated([&] { return cache->records().cluster_options(); });
    if (o.url.empty()) Py_RETURN_NONE;
    return Py_BuildValue(
        "sssy#K", std::string(o.url).c_str(), std::string(o.name).c_str(),
        std::string(o.fingerprint).c_str(), reinterpret_cast<const char*>(o.secret.data()),
        static_cast<Py_ssize_t>(o.secret.size()), static_cast<unsigned long long>(o.ttl_millis));
  });
}

// cluster_servers(ask): what this process saw of each and, if they are asked, what they hold.
PyObject* cluster_servers(PyObject* self, PyObject* argument) {
  const int ask = PyObject_IsTrue(argument);
  if (ask < 0) return nullptr;
  return guarded([&] {
    const auto cache = opened(self);
    return server_dicts(translated([&] {
      WithoutGil free;
      return cache->records().cluster_servers(ask != 0);
    }));
  });
}

// cluster_stats(): counts of all processes of this node.
PyObject* cluster_stats(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const auto s = translated([&] { return cache->records().stats(); });
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K}", "hits", s.cluster_hits, "misses",
                         s.cluster_misses, "fills", s.cluster_fills, "dropped", s.cluster_dropped,
                         "errors", s.cluster_errors);
  });
}

// look_ups_of(rank): hits, misses and, of the hits, those from disk.
PyObject* look_ups_of(PyObject* self, PyObject* argument) {
  const unsigned long rank = PyLong_AsUnsignedLong(argument);
  if (PyErr_Occurred()) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const auto found =
        translated([&] { return cache->records().look_ups_of(static_cast<uint32_t>(rank)); });
    return Py_BuildValue("(KKK)", found.hits, found.misses, found.from_disk);
  });
}

// get_many(indices, allow_pickle, counted) -> list: samples in memory, and from levels below, read
// together; MISS for others.
PyObject* get_many(PyObject* self, PyObject* args) {
  PyObject* object = nullptr;
  int allow_pickle = 0, counted = 1;
  std::vector<int64_t> indices;
  if (!PyArg_ParseTuple(args, "Op|p", &object, &allow_pickle, &counted) ||
      !to_indices(object, indices)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const auto count = static_cast<Py_ssize_t>(indices.size());
    codec::Ref list = codec::checked(PyList_New(count));
    std::vector<size_t> places;
    std::vector<int64_t> below;
    uint64_t hits = 0;
    for (size_t k = 0; k < indices.size(); ++k) {
      PyObject* sample = cache->get(indices[k], allow_pickle);
      if (!sample && PyErr_Occurred()) return nullptr;
      if (sample) {
        ++hits;
      } else {
        places.push_back(k);
        below.push_back(indices[k]);
      }
      PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(k), or_miss(sample));
    }
    if (!below.empty()) {
      auto fetched = translated([&] {
        WithoutGil free;
        return cache->records().fetch({below.data(), below.size()});
      });
      for (size_t n = 0; n < places.size(); ++n) {
        PyObject* sample = cache->made_of(fetched->at(n), below[n], allow_pickle);
        if (!sample && PyErr_Occurred()) return nullptr;
        const auto place = static_cast<Py_ssize_t>(places[n]);
        if (!sample) continue;
        ++hits;
        if (PyList_SetItem(list.get(), place, sample) != 0) return nullptr;
      }
    }
    if (counted) cache->records().note(hits, 0);
    return list.release();
  });
}

PyObject* is_complete(PyObject* self, PyObject*) {
  return guarded([&] {
    const auto cache = opened(self);
    return PyBool_FromLong(translated([&] {
      WithoutGil free;
      return cache->records().is_complete();
    }));
  });
}

// flush(seconds) -> bool: whether what was given to levels below is where it belongs.
PyObject* flush(PyObject* self, PyObject* argument) {
  const double seconds = PyFloat_AsDouble(argument);
  if (PyErr_Occurred()) return nullptr;
  return guarded([&] {
    const auto cache = opened(self);
    const auto nanos = to_nanoseconds(seconds);
    bool done = false;
    {
      WithoutGil free;
      done = cache->records().flush(nanos);
    }
    return PyBool_FromLong(done);
  });
}

// news() -> str: what people should know of levels below, once.
PyObject* news(PyObject* self, PyObject*) {
  return guarded([&] {
    const auto text = std::string(opened(self)->records().news_below());
    return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  });
}

PyObject* location(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const auto p = translated([&] { return cache->records().location(); });
    return Py_BuildValue("{s:s,s:s,s:s,s:s}", "name", std::string(p.name).c_str(), "path",
                         std::string(p.path).c_str(), "backing", std::string(p.backing).c_str(),
                         "opened", std::string(p.opened).c_str());
  });
}

// get(i, allow_pickle, counted=True): the sample or MISS.
PyObject* get(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  int64_t index = 0;
  if (nargs < 2 || nargs > 3 || !to_index(args[0], index)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "get(i, allow_pickle, counted=True)");
    return nullptr;
  }
  const bool counted = nargs == 2 || args[2] == Py_True;
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    PyObject* sample = cache->get(index, args[1] == Py_True);
    if (sample && counted) cache->records().note(1, 0);
    return or_miss(sample);
  });
}

// gather(indices, threads, shared, visits=None, fused=None): a batch in the making. With visits the
// indices are numbers of these.
PyObject* gather(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  std::vector<int64_t> indices;
  int64_t threads = 1;
  if (nargs < 3 || nargs > 5 || !to_indices(args[0], indices) || !to_index(args[1], threads)) {
    if (!PyErr_Occurred()) {
      PyErr_SetString(PyExc_TypeError, "gather(indices, threads, shared, visits=None, fused=None)");
    }
    return nullptr;
  }
  bridge::Visits visits;
  const bool has_visits = nargs >= 4 && args[3] != Py_None;
  if (has_visits && !to_visits(args[3], visits)) return nullptr;
  return guarded([&]() -> PyObject* {
    Fused fused;
    if (nargs == 5 && !to_fused(args[4], fused)) return nullptr;
    if (has_visits && !indices.empty()) put_positions(indices, visits);
    return make_gathering({opened(self)}, {}, indices, threads, args[2] == Py_True,
                          std::move(fused));
  });
}

// stack(samples, threads, shared): what default_collate makes of a list of samples, or MISS if it
// is to do so itself.
PyObject* stack(PyObject* self, PyObject* args) {
  PyObject* samples = nullptr;
  long long threads = 1;
  int shared = 0;
  if (!PyArg_ParseTuple(args, "O!Lp", &PyList_Type, &samples, &threads, &shared)) return nullptr;
  return guarded([&] {
    const auto rows = static_cast<size_t>(PyList_GET_SIZE(samples));
    Gathering batch(opened(self), rows, static_cast<size_t>(std::max(1LL, threads)), shared);
    Loaded loaded;
    loaded.samples = samples;
    return or_miss(batch.finish(loaded, {rows}));  // they were counted as they came
  });
}

// gather_from(stores, which, indices, threads, shared, fused=None): the same, each row of the store
// of that number.
PyObject* gather_from(PyObject*, PyObject* args) {
  PyObject *stores = nullptr, *numbers = nullptr, *object = nullptr, *of_images = Py_None;
  long long threads = 1;
  int shared = 0;
  std::vector<int64_t> indices, which;
  if (!PyArg_ParseTuple(args, "O!OOLp|O", &PyList_Type, &stores, &numbers, &object, &threads,
                        &shared, &of_images) ||
      !to_indices(numbers, which) || !to_indices(object, indices)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    Gathering::Caches caches;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(stores); ++i) {
      PyObject* store = PyList_GET_ITEM(stores, i);
      TORCH_CHECK_TYPE(PyObject_TypeCheck(store, records_type), "stores are a list of Records");
      caches.push_back(opened(store));
    }
    TORCH_CHECK_VALUE(!caches.empty() && which.size() == indices.size(),
                      "every index needs the number of its store");
    std::vector<uint32_t> places;
    for (const int64_t number : which) {
      TORCH_CHECK_VALUE(number >= 0 && number < static_cast<int64_t>(caches.size()),
                        "there is no store ", number);
      places.push_back(static_cast<uint32_t>(number));
    }
    Fused fused;
    if (!to_fused(of_images, fused)) return nullptr;
    return make_gathering(std::move(caches), std::move(places), indices, threads, shared,
                          std::move(fused));
  });
}

// pack(samples, fused=False): for another process that gathers; MISS if it must get the samples
// otherwise.
PyObject* pack_samples(PyObject*, PyObject* args) {
  PyObject* samples = nullptr;
  int fused = 0;
  if (!PyArg_ParseTuple(args, "O|p", &samples, &fused)) return nullptr;
  if (!PyDict_Check(samples)) {
    PyErr_SetString(PyExc_TypeError, "samples to pack are a dict, by row");
    return nullptr;
  }
  return guarded([&] { return or_miss(pack(samples, fused)); });
}

// missing(indices): which of them are in no level, by their place in the list.
PyObject* missing(PyObject* self, PyObject* argument) {
  std::vector<int64_t> indices;
  if (!to_indices(argument, indices)) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    PyObject* list = PyList_New(0);
    for (size_t i = 0; list && i < indices.size(); ++i) {
      if (cache->records().find(indices[i]).data || cache->records().is_below(indices[i])) continue;
      PyObject* place = PyLong_FromSize_t(i);
      const bool added = place && PyList_Append(list, place) == 0;
      Py_XDECREF(place);
      if (!added) Py_CLEAR(list);
    }
    return list;
  });
}

PyObject* note(PyObject* self, PyObject* args) {
  unsigned long long hits = 0, misses = 0;
  if (!PyArg_ParseTuple(args, "KK", &hits, &misses)) return nullptr;
  return guarded([&]() -> PyObject* {
    opened(self)->records().note(hits, misses);
    Py_RETURN_NONE;
  });
}

// acquire(indices, patience): who loads these samples. Another process that loads one is waited
// for, so many seconds at the least.
PyObject* acquire(PyObject* self, PyObject* args) {
  PyObject* object = nullptr;
  double patience = 0;
  std::vector<int64_t> indices;
  if (!PyArg_ParseTuple(args, "Od", &object, &patience) || !to_indices(object, indices)) {
    return nullptr;
  }
  return guarded([&] { return make_acquiring(opened(self), indices, patience); });
}

PyObject* contains(PyObject* self, PyObject* argument) {
  int64_t index = 0;
  if (!to_index(argument, index)) return nullptr;
  return guarded([&] {
    const auto cache = opened(self);
    return PyBool_FromLong(cache->records().find(index).data != nullptr ||
                           cache->records().is_below(index));
  });
}

PyObject* differs(PyObject* self, PyObject* args) {
  long long index = 0;
  PyObject* sample = nullptr;
  int allow_pickle = 0;
  if (!PyArg_ParseTuple(args, "LOp", &index, &sample, &allow_pickle)) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto answer = opened(self)->differs(index, sample, allow_pickle);
    if (!answer) Py_RETURN_NONE;
    return PyBool_FromLong(*answer);
  });
}

PyObject* note_loads(PyObject* self, PyObject* args) {
  long long loads = 0;
  double seconds = 0;
  if (!PyArg_ParseTuple(args, "Ld", &loads, &seconds)) return nullptr;
  return guarded([&]() -> PyObject* {
    opened(self)->records().note_loads(static_cast<uint64_t>(loads),
                                       static_cast<uint64_t>(seconds * 1e9));
    Py_RETURN_NONE;
  });
}

PyObject* note_transforms(PyObject* self, PyObject* args) {
  long long samples = 0;
  double seconds = 0;
  if (!PyArg_ParseTuple(args, "Ld", &samples, &seconds)) return nullptr;
  return guarded([&]() -> PyObject* {
    opened(self)->records().note_transforms(static_cast<uint64_t>(samples),
                                            static_cast<uint64_t>(seconds * 1e9));
    Py_RETURN_NONE;
  });
}

PyObject* note_unsupported(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    opened(self)->records().note_unsupported(1);
    Py_RETURN_NONE;
  });
}

// is_first_to_tell(what): once per node, for each of the numbers 0 to 31.
PyObject* is_first_to_tell(PyObject* self, PyObject* argument) {
  int64_t what = 0;
  if (!to_index(argument, what)) return nullptr;
  return guarded([&] {
    return PyBool_FromLong(opened(self)->records().is_first_to_tell(static_cast<uint32_t>(what)));
  });
}

PyObject* stats(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    const auto s = translated([&] { return cache->records().stats(); });
    return Py_BuildValue(
        "{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:d,s:K,s:d,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:N}", "hits",
        s.hits, "misses", s.misses, "fills", s.fills, "bytes", s.bytes, "waits", s.waits, "lost",
        s.lost, "dropped", s.dropped, "loads", s.loads, "load_seconds",
        static_cast<double>(s.load_nanos) * 1e-9, "transforms", s.transforms, "transform_seconds",
        static_cast<double>(s.transform_nanos) * 1e-9, "too_large", s.too_large, "evicted",
        s.evicted, "unsupported", s.unsupported, "filled", s.filled, "used_bytes", s.used_bytes,
        "data_bytes", s.data_bytes, "dataset_len", s.dataset_len, "frozen",
        PyBool_FromLong(s.frozen));
  });
}

PyObject* clear(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto cache = opened(self);
    translated([&] {
      WithoutGil free;
      cache->records().clear();
    });
    Py_RETURN_NONE;
  });
}

PyObject* close_records(PyObject* self, PyObject*) {
  reinterpret_cast<PyRecords*>(self)->cache.reset();
  Py_RETURN_NONE;
}

PyObject* is_open(PyObject* self, PyObject*) {
  return PyBool_FromLong(reinterpret_cast<PyRecords*>(self)->cache != nullptr);
}

PyMethodDef methods[] = {
    {"open", open_records, METH_VARARGS, nullptr},
    {"arguments", arguments, METH_NOARGS, nullptr},
    {"open_disk", open_disk, METH_VARARGS, nullptr},
    {"disk", disk, METH_NOARGS, nullptr},
    {"disk_stats", disk_stats, METH_NOARGS, nullptr},
    {"open_cluster", open_cluster, METH_VARARGS, nullptr},
    {"cluster", cluster, METH_NOARGS, nullptr},
    {"cluster_servers", cluster_servers, METH_O, nullptr},
    {"cluster_stats", cluster_stats, METH_NOARGS, nullptr},
    {"look_ups_of", look_ups_of, METH_O, nullptr},
    {"prefetch", prefetch, METH_O, nullptr},
    {"get_many", get_many, METH_VARARGS, nullptr},
    {"is_complete", is_complete, METH_NOARGS, nullptr},
    {"flush", flush, METH_O, nullptr},
    {"news", news, METH_NOARGS, nullptr},
    {"location", location, METH_NOARGS, nullptr},
    {"get", as_method(get), METH_FASTCALL, nullptr},
    {"gather", as_method(gather), METH_FASTCALL, nullptr},
    {"stack", stack, METH_VARARGS, nullptr},
    {"missing", missing, METH_O, nullptr},
    {"note", note, METH_VARARGS, nullptr},
    {"acquire", acquire, METH_VARARGS, nullptr},
    {"contains", contains, METH_O, nullptr},
    {"differs", differs, METH_VARARGS, nullptr},
    {"note_loads", note_loads, METH_VARARGS, nullptr},
    {"note_transforms", note_transforms, METH_VARARGS, nullptr},
    {"note_unsupported", note_unsupported, METH_NOARGS, nullptr},
    {"is_first_to_tell", is_first_to_tell, METH_O, nullptr},
    {"stats", stats, METH_NOARGS, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {"close", close_records, METH_NOARGS, nullptr},
    {"is_open", is_open, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyObject* records_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<PyRecords*>(type->tp_alloc(type, 0));
  if (self) new (&self->cache) std::shared_ptr<RecordCache>();
  return reinterpret_cast<PyObject*>(self);
}

void records_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<PyRecords*>(self)->cache.~shared_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(records_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(records_dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("The native half of stocache.CachedDataset.")},
    {0, nullptr},
};

PyType_Spec spec = {"stocache._C.Records", sizeof(PyRecords), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

// least_memory(dataset_len, policy): what a store takes at the least.
PyObject* least_memory(PyObject*, PyObject* args) {
  long long dataset_len = 0;
  const char* policy = nullptr;
  if (!PyArg_ParseTuple(args, "Ls", &dataset_len, &policy)) return nullptr;
  return guarded([&] {
    return PyLong_FromUnsignedLongLong(
        translated([&] { return bridge::least_memory(dataset_len, policy); }));
  });
}

PyMethodDef functions[] = {
    {"least_memory", least_memory, METH_VARARGS, nullptr},
    {"gather_from", gather_from, METH_VARARGS, nullptr},
    {"pack", pack_samples, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_records(PyObject* module) {
  records_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return records_type && add_acquiring(module) && add_gathering(module) &&
         PyModule_AddObjectRef(module, "Records", reinterpret_cast<PyObject*>(records_type)) == 0 &&
         PyModule_AddFunctions(module, functions) == 0 &&
         PyModule_AddFunctions(module, batch_methods) == 0;
}

}  // namespace stocache::python
