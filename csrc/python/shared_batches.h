// Batches in memory that another process can map: how a DataLoader worker hands over a batch
// without a copy. See rust/core/src/batches/buffers/ for who may write to it when.
#pragma once

#include <Python.h>
// Python.h stays first.
#include <ATen/core/Tensor.h>

namespace stocache {

// A tensor over a batch buffer; over ordinary memory if none can be had. A small one lies in
// ordinary memory too, and travels inside the message.
at::Tensor shared_batch(at::IntArrayRef sizes, caffe2::TypeMeta dtype);

namespace python {

// batch_ticket(tensor) -> what `batch_tensor`, or for a small one `batch_copy`, takes in another
// process; None if the tensor is not a `shared_batch`. batch_sweep() gives back the memory of
// processes that have ended, as far as nobody here holds it. Up to an entry of nullptrs.
extern PyMethodDef batch_methods[];

}  // namespace python
}  // namespace stocache
