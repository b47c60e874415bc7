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


# PyTorch Geometric: stores of attributes.


def _graph(mapping: dict[str, Any]) -> Any:
    graph = Named("torch_geometric.data.Data").find()()
    for name, value in mapping.items():  # in their order, which from_dict does not keep
        graph[name] = value
    return graph


def _graph_of_kinds(mapping: dict[Any, Any]) -> Any:
    return Named("torch_geometric.data.HeteroData").find().from_dict(mapping)


register_type("torch_geometric.data.Data", lambda graph: (graph.to_dict(),), _graph)
register_type("torch_geometric.data.HeteroData", lambda graph: (graph.to_dict(),), _graph_of_kinds)
