// Errors of the core as the exceptions that torch turns into Python's.
#pragma once

#include <stocache/errors.h>

#include <string>
#include <utility>

#include "rust/cxx.h"

namespace stocache {

// The operating system said no about a file of the caller's; the message is its path.
class PathError : public c10::Error {
 public:
  PathError(c10::SourceLocation here, std::string path, int number)
      : c10::Error(here, std::move(path)), number(number) {}
  int number;
};

// The caller asked to be let go (interrupt.h), and knows why.
class Interrupted : public c10::Error {
  using c10::Error::Error;
};

// Throws `error` as the type its kind asks for. The core writes "<kind>\x1f<message>".
[[noreturn]] inline void rethrow(const ::rust::Error& error) {
  std::string text = error.what();
  const auto split = text.find('\x1f');
  const std::string kind = split == std::string::npos ? "" : text.substr(0, split);
  std::string message = split == std::string::npos ? std::move(text) : text.substr(split + 1);
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  if (kind == "argument") throw c10::ValueError(here, std::move(message));
  if (kind == "type") throw c10::TypeError(here, std::move(message));
  if (kind == "index") throw c10::IndexError(here, std::move(message));
  if (kind == "space") throw SpaceError(here, std::move(message));
  if (kind == "system") throw SystemError(here, std::move(message));
  if (kind == "interrupted") throw Interrupted(here, std::move(message));
  if (kind.starts_with("errno"))
    throw PathError(here, std::move(message), std::stoi(kind.substr(5)));
  throw c10::Error(here, std::move(message));
}

// Runs `act`, translating what the bridge throws.
template <typename Act>
auto translated(Act&& act) -> decltype(act()) {
  try {
    return act();
  } catch (const ::rust::Error& error) {
    rethrow(error);
  }
}

}  // namespace stocache
