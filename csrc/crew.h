// Threads that wait for work, so that sharing pays for a batch of a fraction of a millisecond.
#pragma once

#include <cstddef>
#include <functional>

namespace stocache {

// Calls `work(i)` for every i below `parts`: in this thread, and in up to `threads` - 1 others that
// come when they can. Parts are handed out one by one, so a helper that wakes late costs nothing.
// `work` must not throw. Without the GIL, please: nothing here needs it.
//
// The helpers are made at the first call and sleep between calls. A forked process makes its own.
// A second call at the same time does its work alone.
void share(size_t parts, size_t threads, const std::function<void(size_t)>& work);

}  // namespace stocache
