// Where in a sample something lies, and how it is refused there.
#pragma once

#include <Python.h>
// Python.h stays first.
#include <c10/util/StringUtil.h>

#include <string>

#include "codec/objects.h"

namespace stocache::codec {

// Path in the sample an object lies. Lives on the stack; becomes text only in errors.
struct Path {
  const Path* parent = nullptr;   // none: the sample itself
  PyObject* container = nullptr;  // what it lies in
  Py_ssize_t index = 0;
  PyObject* key = nullptr;
  PyObject* attribute = nullptr;
};

// As in "sample[1]['boxes']".
std::string text_of(const Path& where);

// "a set", "an object"
std::string with_article(const std::string& name);

// Raises UnsupportedSample.
template <typename... Words>
[[noreturn]] void refuse(const Path& where, const Words&... words) {
  throw_unsupported(text_of(where), c10::str(text_of(where), words...));
}

[[noreturn]] inline void changed(const Path& where) {
  TORCH_CHECK(false, text_of(where), " changed while it was being stored");
}

}  // namespace stocache::codec
