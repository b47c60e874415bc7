// Memory for single records, used again once nobody holds it.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace stocache {

// Fresh memory costs more than the copy into it: the kernel zeroes every page at first touch, and
// malloc gives large pieces back as soon as they are free. So what records leave is kept for the
// next ones, up to a bound, by this process. Aligned to 16 bytes. Any thread may give it back.
//
// Small pieces are malloc's, not of torch's allocator, which asks for memory aligned to 64 bytes:
// glibc then needs a hole that is larger than the record. The hole that a record of this size has
// left, below a label that somebody keeps, would not do, and the process would grow by every
// record.
c10::DataPtr recycled(size_t bytes);

}  // namespace stocache
