"""Types of the libraries that people train with."""

from __future__ import annotations

from typing import Any

from stocache._types.families import OverData, data_and_attributes
from stocache._types.registry import Named, register_type

# torchvision and MONAI: tensors with attributes, whose batches look at these alone.
for _name in (
    "torchvision.tv_tensors.Image",
    "torchvision.tv_tensors.Mask",
    "torchvision.tv_tensors.Video",
    "torchvision.tv_tensors.BoundingBoxes",
    "torchvision.tv_tensors.KeyPoints",
    "monai.data.MetaTensor",
):
    register_type(_name, data_and_attributes, OverData(Named(_name).find), stacks=True)


# Hugging Face: dicts with attributes.


def _encoding_parts(batch: Any) -> tuple[Any, ...]:
    """What a tokenizer of Rust knows of its tokens beside, if it does."""
    more = {name: value for name, value in vars(batch).items() if name != "data"}
    encodings = more.pop("_encodings", None)
    if encodings is not None:
        encodings = [encoding.__getstate__() for encoding in encodings]
    return dict(batch.data), more, encodings


def _encoding(data: dict[str, Any], more: dict[str, Any], encodings: list[bytes] | None) -> Any:
    made = _made("transformers.BatchEncoding", data, more)
    made._encodings = None if encodings is None else [_tokens(state) for state in encodings]
    return made


def _tokens(state: bytes) -> Any:
    made = Named("tokenizers.Encoding")()
    made.__setstate__(state)
    return made


def _feature_parts(batch: Any) -> tuple[Any, ...]:
    return dict(batch.data), {name: value for name, value in vars(batch).items() if name != "data"}


def _feature(data: dict[str, Any], more: dict[str, Any]) -> Any:
    return _made("transformers.BatchFeature", data, more)


def _made(name: str, data: dict[str, Any], more: dict[str, Any]) -> Any:
    """Without ``__init__``, which would look at what is in it."""
    cls = Named(name).find()
    made = cls.__new__(cls)
    vars(made).update(more, data=data)
    return made


register_type("transformers.BatchEncoding", _encoding_parts, _encoding)
register_type("transformers.BatchFeature", _feature_parts, _feature)


# PyTorch Geometric: stores of attributes. What begins with an underscore it keeps beside them.

_OF_A_STORE = frozenset(("_cached_attr", "_key", "_mapping", "_parent"))


def _beside(store: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(store).items() if name not in _OF_A_STORE}


def _own(graph: Any, stores: set[str]) -> dict[str, Any]:
    """What somebody put into its ``__dict__``, which every graph has some of."""
    usual = vars(type(graph)())
    return {
        name: value
        for name, value in vars(graph).items()
        if name not in stores and not (name in usual and usual[name] is value)
    }


def _graph_parts(graph: Any) -> tuple[Any, ...]:
    (store,) = graph.stores
    return dict(store.items()), _beside(store), _own(graph, {"_store"})


def _graph(items: dict[str, Any], beside: dict[str, Any], own: dict[str, Any]) -> Any:
    graph = Named("torch_geometric.data.Data").find()()
    (store,) = graph.stores
    for name, value in items.items():  # in their order, which from_dict does not keep
        store[name] = value
    vars(store).update(beside)
    vars(graph).update(own)
    return graph


def _graph_of_kinds_parts(graph: Any) -> tuple[Any, ...]:
    stores = {"_global_store", "_node_store_dict", "_edge_store_dict"}
    beside = [_beside(store) for store in graph.stores]
    return graph.to_dict(), beside, _own(graph, stores)


def _graph_of_kinds(
    items: dict[Any, Any], beside: list[dict[str, Any]], own: dict[str, Any]
) -> Any:
    graph = Named("torch_geometric.data.HeteroData").find().from_dict(items)
    for store, values in zip(graph.stores, beside, strict=True):
        vars(store).update(values)
    vars(graph).update(own)
    return graph


register_type("torch_geometric.data.Data", _graph_parts, _graph)
register_type("torch_geometric.data.HeteroData", _graph_of_kinds_parts, _graph_of_kinds)
