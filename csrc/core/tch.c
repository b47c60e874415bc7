/* The C functions of torch-sys that our Rust reaches through tch, and no others. torch-sys would
   compile a wrapper of every function of one version of torch; these few are in libstocache
   (tensor/tch.cpp), which is compiled for each version, under names that are nobody else's. */
#include <stddef.h>
#include <stdint.h>

#define PASS_ON(kind, name, parameters, arguments) \
  kind stocache_##name parameters;                 \
  kind name parameters;                            \
  kind name parameters { return stocache_##name arguments; }

PASS_ON(char*, get_and_reset_last_err, (void), ())
PASS_ON(void*, at_shallow_clone, (void* tensor), (tensor))
PASS_ON(void*, at_data_ptr, (void* tensor), (tensor))
PASS_ON(int, at_is_contiguous, (void* tensor), (tensor))
PASS_ON(size_t, at_dim, (void* tensor), (tensor))
PASS_ON(int, at_scalar_type, (void* tensor), (tensor))

void stocache_at_free(void* tensor);
void at_free(void* tensor);
void at_free(void* tensor) { stocache_at_free(tensor); }

void stocache_at_shape(void* tensor, int64_t* sizes);
void at_shape(void* tensor, int64_t* sizes);
void at_shape(void* tensor, int64_t* sizes) { stocache_at_shape(tensor, sizes); }

void stocache_atg_contiguous(void** out, void* tensor);
void atg_contiguous(void** out, void* tensor);
void atg_contiguous(void** out, void* tensor) { stocache_atg_contiguous(out, tensor); }
