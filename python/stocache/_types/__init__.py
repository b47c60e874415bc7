"""Types that are stored by their parts: a tuple of what the codec stores, made by ``to_parts`` and
given back to ``from_parts``. In the cache stand the name of the type and its parts, never code.

| module | role |
| --- | --- |
| ``registry`` | ``register_type``; what is known of a type |
| ``families`` | types that nobody registered, known by what they derive from |
| ``stacking`` | batches of tensor subclasses |
| ``values``, ``tensors``, ``arrays``, ``libraries``, ``tables`` | what is registered here |

Nothing here imports a library that a sample may come from: types are registered by name, and looked
up where somebody has imported them.
"""

from stocache._types import arrays, libraries, tables, tensors, values

__all__ = ["arrays", "libraries", "tables", "tensors", "values"]
