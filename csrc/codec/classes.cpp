#include "codec/classes.h"

#include <algorithm>

namespace stocache::codec {

std::string dotted(PyObject* module_name, const std::vector<Ref>& path) {
  std::string name = ascii(module_name);
  for (const auto& step : path) name += "." + ascii(step.get());
  return name;
}

Ref find(PyObject* module_name, const std::vector<Ref>& path) {
  const auto inside = [&](Ref module) {
    for (size_t i = 0; module && i < path.size(); ++i) {
      module = Ref(PyObject_GetAttr(module.get(), path[i].get()));
    }
    return module;
  };
  // Nearly always it is there. Not by PyImport_GetModule, which asks whether another thread is at
  // importing it; of `__main__` that is an error to make and to forget each time.
  PyObject* modules = PyImport_GetModuleDict();
  PyObject* module =
      PyDict_Check(modules) ? PyDict_GetItemWithError(modules, module_name) : nullptr;
  if (module && module != Py_None) {
    if (Ref found = inside(Ref::to(module))) return found;
  }
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw PythonError();
    PyErr_Clear();
  }
  if (Ref found = inside(Ref(PyImport_Import(module_name)))) return found;
  if (!PyErr_ExceptionMatches(PyExc_Exception)) throw PythonError();
  const std::string why = pending_error();
  PyErr_Clear();
  TORCH_CHECK_VALUE(false, "the class ", dotted(module_name, path),
                    ", of which a sample was stored, is not found (", why, ")");
}

std::vector<Ref> split(std::string_view qualified) {
  std::vector<Ref> path;
  while (true) {
    const size_t dot = qualified.find('.');
    path.push_back(interned(qualified.substr(0, dot)));
    if (dot == std::string_view::npos) return path;
    qualified.remove_prefix(dot + 1);
  }
}

namespace {

// Whether object.__new__ makes instances of this type: no base has a layout of its own.
bool is_plain_object(PyTypeObject* type) {
  PyObject* bases = type->tp_mro;
  for (Py_ssize_t i = 0; bases && i < PyTuple_GET_SIZE(bases); ++i) {
    auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(bases, i));
    if (base == &PyBaseObject_Type) continue;
    Ref dict = checked(PyObject_GetAttr(reinterpret_cast<PyObject*>(base), NAME("__dict__")));
    Ref maker(PyObject_GetItem(dict.get(), NAME("__new__")));
    if (!maker) PyErr_Clear();
    if (maker && PyCFunction_Check(maker.get())) return false;
  }
  return true;
}

void add_names(Known& known, PyObject* names) {
  Ref items = checked(PySequence_Tuple(names));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.get()); ++i) {
    PyObject* name = PyTuple_GET_ITEM(items.get(), i);
    TORCH_CHECK_TYPE(PyUnicode_CheckExact(name), type_name(known.pytype()),
                     " has a field whose name is no str");
    auto same = [&](const Ref& other) { return PyUnicode_Compare(other.get(), name) == 0; };
    if (std::any_of(known.names.begin(), known.names.end(), same)) continue;
    known.names.push_back(interned(utf8(name)));
  }
}

// What kind of class this is: NamedTuple, DataClass, Enum, or none of them.
std::optional<Kind> class_kind(PyTypeObject* type) {
  auto* object = reinterpret_cast<PyObject*>(type);
  Ref enum_module = loaded(NAME("enum"));
  Ref enum_class = enum_module ? attribute(enum_module.get(), NAME("Enum")) : Ref();
  if (is_subtype(type, enum_class.get())) return Kind::Enum;
  if (PyType_IsSubtype(type, &PyTuple_Type)) {
    Ref fields = attribute(object, NAME("_fields"));
    const bool good = fields && PyTuple_CheckExact(fields.get()) &&
                      PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) &&
                      type->tp_alloc == PyType_GenericAlloc &&
                      type->tp_itemsize == PyTuple_Type.tp_itemsize;
    return good ? std::optional(Kind::NamedTuple) : std::nullopt;
  }
  Ref fields = attribute(object, NAME("__dataclass_fields__"));
  return fields && is_plain_object(type) ? std::optional(Kind::DataClass) : std::nullopt;
}

// Where the class is found, as the schema says it.
void note_place(Known& known, PyObject* module, PyObject* name) {
  TORCH_CHECK_TYPE(PyUnicode_Check(module) && PyUnicode_Check(name), known.pytype()->tp_name,
                   " does not say in which module it is");
  std::string_view module_text = utf8(module);
  // What a spawned process calls the program that its parent calls __main__; it has both names.
  if (module_text == "__mp_main__") module_text = "__main__";
  known.module = interned(module_text);
  known.path = split(utf8(name));
  put_text(known.place, module_text);
  put_text(known.place, utf8(name));
}

std::shared_ptr<Known> known_as(Kind kind, PyTypeObject* type) {
  auto known = std::make_shared<Known>();
  known->kind = kind;
  known->type = Ref::to(reinterpret_cast<PyObject*>(type));
  return known;
}

std::shared_ptr<Known> study_class(PyTypeObject* type, Kind kind) {
  auto* object = reinterpret_cast<PyObject*>(type);
  auto known = known_as(kind, type);
  Ref module = checked(PyObject_GetAttr(object, NAME("__module__")));
  Ref name = checked(PyObject_GetAttr(object, NAME("__qualname__")));
  note_place(*known, module.get(), name.get());
  if (kind == Kind::NamedTuple) {
    Ref fields = checked(PyObject_GetAttr(object, NAME("_fields")));
    add_names(*known, fields.get());
    TORCH_CHECK_TYPE(known->names.size() == static_cast<size_t>(PyObject_Length(fields.get())),
                     type_name(type), " has two fields of one name");
    known->fields = known->names.size();
  } else if (kind == Kind::DataClass) {
    Ref fields = checked(PyObject_CallOneArg(KEPT("dataclasses", "fields"), object));
    Ref names = checked(PyList_New(0));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fields.get()); ++i) {
      Ref field = checked(PyObject_GetAttr(PyTuple_GET_ITEM(fields.get(), i), NAME("name")));
      check(PyList_Append(names.get(), field.get()));
    }
    add_names(*known, names.get());
    known->fields = known->names.size();
    Ref slots = checked(PyObject_CallOneArg(KEPT("copyreg", "_slotnames"), object));
    add_names(*known, slots.get());
  }
  put_count(known->fields_bytes, known->fields);
  put_count(known->fields_bytes, known->names.size() - known->fields);
  for (const auto& field : known->names) put_text(known->fields_bytes, utf8(field.get()));
  return known;
}

// How many types were registered. With the GIL held, as everything here.
uint64_t registrations = 0;

// What Python knows of a type by its parts; `registered` is set if somebody said it of this type.
std::shared_ptr<Known> ask_parts(PyTypeObject* type, bool& registered) {
  Ref entry = checked(PyObject_CallOneArg(KEPT("stocache._types.registry", "entry_of"),
                                          reinterpret_cast<PyObject*>(type)));
  if (entry.get() == Py_None) return nullptr;
  PyObject *module = nullptr, *name = nullptr, *to_parts = nullptr, *from_parts = nullptr;
  int stacked = 0, over_data = 0, said = 0;
  if (!PyArg_ParseTuple(entry.get(), "UUOOppp", &module, &name, &to_parts, &from_parts, &stacked,
                        &over_data, &said)) {
    throw PythonError();
  }
  auto known = known_as(Kind::Object, type);
  note_place(*known, module, name);
  put_count(known->fields_bytes, 0);
  put_count(known->fields_bytes, 0);
  known->to_parts = Ref::to(to_parts);
  known->from_parts = Ref::to(from_parts);
  known->stacked = stacked;
  known->over_data = over_data && PyType_IsSubtype(type, tensor_type());
  registered = said;
  return known;
}

// What is known of types, unless somebody has registered one since.
class Types {
 public:
  std::shared_ptr<const Known> find(PyTypeObject* type) const {
    auto found = memory_.find(reinterpret_cast<PyObject*>(type));
    return found && is_current(*found) ? found : nullptr;
  }
  // `before`: how many had been registered when it was asked for. Others may have been meanwhile.
  std::shared_ptr<const Known> add(std::shared_ptr<Known> known, uint64_t before) {
    if (!known) return nullptr;
    known->registrations = before;
    memory_.add(known->type.get(), known);
    return known;
  }

 private:
  Memory<Known> memory_;
};

}  // namespace

void note_registration() { ++registrations; }

bool is_current(const Known& known) { return known.registrations == registrations; }

std::shared_ptr<const Known> study_parts(PyTypeObject* type) {
  static auto& types = *new Types;
  if (auto found = types.find(type)) return found;
  const uint64_t before = registrations;
  bool registered = false;
  return types.add(ask_parts(type, registered), before);
}

std::shared_ptr<const Known> study(PyTypeObject* type) {
  static auto& types = *new Types;
  auto* object = reinterpret_cast<PyObject*>(type);
  if (auto found = types.find(type)) return found;

  const uint64_t before = registrations;
  std::shared_ptr<Known> made;
  const Numpy* np = numpy_if_loaded();
  if (np && (object == np->ndarray || object == np->memmap)) {
    made = known_as(Kind::Array, type);
  } else if (np && object == np->str) {
    made = known_as(Kind::NumpyStr, type);
  } else if (np && object == np->bytes) {
    made = known_as(Kind::NumpyBytes, type);
  } else if (np && is_subtype(type, np->generic)) {
    // Only types of numpy itself; those that add something look like the one they derive from.
    Ref dtype(PyObject_CallOneArg(np->dtype, object));
    Ref its_type = dtype ? attribute(dtype.get(), NAME("type")) : Ref();
    PyErr_Clear();
    if (its_type.get() == object) made = known_as(Kind::NumpyScalar, type);
  } else {
    Ref images = loaded(NAME("PIL.Image"));
    Ref files = loaded(NAME("PIL.ImageFile"));
    Ref image = images ? attribute(images.get(), NAME("Image")) : Ref();
    Ref file = files ? attribute(files.get(), NAME("ImageFile")) : Ref();
    bool registered = false;
    auto by_parts = ask_parts(type, registered);
    const auto kind = registered ? std::nullopt : class_kind(type);
    if (registered) {
      made = std::move(by_parts);
    } else if (kind) {
      made = study_class(type, *kind);
    } else if (object == image.get() || is_subtype(type, file.get())) {
      made = known_as(Kind::Image, type);
    } else {
      made = std::move(by_parts);
    }
  }
  return types.add(std::move(made), before);
}

}  // namespace stocache::codec
