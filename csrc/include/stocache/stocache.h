// stocache: training samples in shared memory, for every process of a job.
//
//   #include <stocache/stocache.h>
//
//   auto dataset = stocache::cached(MySlowDataset(), stocache::Options(/*size_limit_gib=*/8))
//                      .map(torch::data::transforms::Stack<>());
//
// shared_cache.h is the cache itself, cached.h the adaptor for torch::data.
#pragma once

#include <stocache/cached.h>
#include <stocache/errors.h>
#include <stocache/shared_cache.h>
#include <stocache/version.h>
