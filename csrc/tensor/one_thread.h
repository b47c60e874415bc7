// Operators of torch without its threads.
#pragma once

namespace stocache {

// While it lives, operators that this thread calls use no other threads. Those of others are as
// they were, and so is what torch.get_num_threads() says elsewhere. Where torch was built without
// OpenMP nothing changes.
class OneThread {
 public:
  OneThread();
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_ = 0;
};

}  // namespace stocache
