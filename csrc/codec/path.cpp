#include "codec/path.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace stocache::codec {

std::string with_article(const std::string& name) {
  const bool vowel = !name.empty() && std::strchr("aeiouAEIOU", name[0]);
  return (vowel ? "an " : "a ") + name;
}

std::string text_of(const Path& where) {
  constexpr size_t most = 12;
  std::vector<const Path*> steps;
  for (const Path* step = &where; step->parent; step = step->parent) steps.push_back(step);
  std::reverse(steps.begin(), steps.end());
  std::string text = "sample";
  for (size_t i = 0; i < steps.size(); ++i) {
    if (steps.size() > most && i == most / 2) {
      i = steps.size() - most / 2;
      text += "...";
    }
    const Path& step = *steps[i];
    if (step.attribute) {
      text += "." + ascii(step.attribute);
    } else if (step.key) {
      // A key here is built in, so its repr runs no code of the sample.
      text += "[" + ascii(Ref(PyObject_ASCII(step.key)).get(), 60) + "]";
    } else {
      text += "[" + std::to_string(step.index) + "]";
    }
  }
  return text;
}

}  // namespace stocache::codec
