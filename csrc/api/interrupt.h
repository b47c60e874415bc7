// Whether who called wants to be let go: asked by the core wherever it waits or works for long.
#pragma once

namespace stocache {

// From now on `ask` says so, of the thread that it is called on. It must not throw.
void ask_with(bool (*ask)());

namespace bridge {

bool is_interrupted() noexcept;

}  // namespace bridge
}  // namespace stocache
