// Types that are stored, apart from those of the encoder's fast path: found, studied, remembered.
#pragma once

#include <vector>

#include "codec/objects.h"

namespace stocache::codec {

// What was found out about a type.
struct Known {
  Kind kind;
  Ref type;
  // Of a namedtuple, a dataclass or an Enum:
  Ref module;                // its name
  std::vector<Ref> path;     // the qualified name, split at the dots
  std::vector<Ref> names;    // the fields, then the slots that are no fields
  size_t fields = 0;         // how many of these are fields
  std::string place;         // module and qualified name, as in the schema
  std::string fields_bytes;  // what the schema says of `names`
  // Of an object that is stored by its parts (python/stocache/_types/):
  Ref to_parts, from_parts;
  bool over_data = false;      // the first is its data, a tensor, and the second its attributes
  bool stacked = false;        // batches are made of the first part, a tensor
  uint64_t registrations = 0;  // how many there were when it was studied

  PyTypeObject* pytype() const { return reinterpret_cast<PyTypeObject*>(type.get()); }
};

// What is known of a type, or nullptr if it is not stored.
std::shared_ptr<const Known> study(PyTypeObject* type);
// How objects of a type are stored by their parts; nullptr if they are not. Also of types that have
// a kind of their own: for what that does not hold.
std::shared_ptr<const Known> study_parts(PyTypeObject* type);
// Somebody has registered a type: what is known of others may be out of date.
void note_registration();
bool is_current(const Known& known);

// A qualified name, split at the dots.
std::vector<Ref> split(std::string_view qualified);
// For messages.
std::string dotted(PyObject* module_name, const std::vector<Ref>& path);
// The object of this name in this module, which is imported if need be. ValueError if there is
// none.
Ref find(PyObject* module_name, const std::vector<Ref>& path);

}  // namespace stocache::codec
