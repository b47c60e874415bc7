"""Generated scripts see the same with and without the cache, whatever library a sample is of."""

from __future__ import annotations

import copy
import random

import differential
import hypothesis
import numpy as np
import pandas as pd
import pytest
import stocache
import test_differential
import torch
from differential import Product, difference, floats, octets, picture
from hypothesis import Phase
from monai.data import MetaTensor
from torch_geometric.data import Data, HeteroData
from torchvision import tv_tensors
from transformers import BatchEncoding, BatchFeature


def image(i, width):
    return tv_tensors.Image(octets(i, 3 * width).view(3, 1, width))


def detection(i, width):
    boxes = tv_tensors.BoundingBoxes(floats(i, 8).view(2, 4), format="XYXY", canvas_size=(9, 9 + i))
    masks = tv_tensors.Mask(octets(i, width).view(1, width) > 50)
    points = tv_tensors.KeyPoints(floats(i, 6).view(3, 2), canvas_size=(9, 9 + i))
    return image(i, width), {"boxes": boxes, "masks": masks, "points": points, "id": i}


def video(i, width):
    return tv_tensors.Video(octets(i, 6 * width).view(2, 3, 1, width)), i


def scan(i, width):
    meta = {"name": f"{i}.nii", "size": np.array([width, i])}
    return {"image": MetaTensor(floats(i, width), meta=meta), "label": i}


# Their own way to be copied loses an attribute.
def encoding(i, _width):
    return copy.deepcopy(BatchEncoding({"input_ids": list(range(i + 1)), "x": [i]}))


def feature(i, width):
    return copy.deepcopy(BatchFeature({"pixels": floats(i, width), "label": i}))


def graph(i, width):
    return Data(x=floats(i, width).view(-1, 1), y=torch.tensor([i]), name=f"{i}")


def graph_of_kinds(i, width):
    made = HeteroData(name=f"{i}")
    made["author"].x = floats(i, width).view(-1, 1)
    made["paper"].x = octets(i, 4)
    made["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [i % 4, 0]])
    return made


def table(i, _width):
    texts = ["x", None, "y"] + [str(i)] * 2
    made = pd.DataFrame({"a": floats(i, 5).numpy(), "b": texts}, index=range(i, i + 5))
    made.attrs["from"] = f"{i}.csv"
    return made, i


def column(i, _width):
    return pd.Series(floats(i, 5).numpy(), index=list("abcde"), name=f"column {i}"), i


CONTENTS = {
    "tv_tensors": detection,
    "Video": video,
    "MetaTensor": scan,
    "BatchEncoding": encoding,
    "BatchFeature": feature,
    "Data": graph,
    "HeteroData": graph_of_kinds,
    "DataFrame": table,
    "Series": column,
}
# What default_collate makes no batch of: an epoch would end at its first.
LISTED = ("BatchEncoding", "Data", "HeteroData", "DataFrame", "Series")


def options(content):
    return {"content": content, **({"collate": "list"} if content in LISTED else {})}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_script_sees_the_same_with_and_without_the_cache(
    tmp_path, monkeypatch, seed, scale, content, workers
):
    monkeypatch.setitem(differential.CONTENTS, content, CONTENTS[content])
    count = scale(10, 300) if workers == 0 else scale(3, 60)
    test_differential.compare(count, seed, tmp_path, workers=workers, **options(content))


def lost(sample, content):
    """The sample without something that its library keeps in it."""
    if content == "tv_tensors":
        sample[1]["points"].canvas_size = (1, 1)
    elif content == "Video":
        sample = torch.Tensor(sample[0]), sample[1]
    elif content == "MetaTensor":
        sample["image"].meta.pop("name", None)
    elif content in ("BatchEncoding", "BatchFeature"):
        sample.data.popitem()
    elif content in ("Data", "HeteroData"):
        del sample.name
    elif content == "DataFrame":
        sample[0].attrs.clear()
    else:
        sample[0].name = None
    return sample


@pytest.mark.parametrize("content", CONTENTS)
def test_control_a_lost_attribute_is_seen(tmp_path, monkeypatch, seed, content):
    class Loses(stocache.CachedDataset):
        def __getitem__(self, index):
            return lost(super().__getitem__(index), content)

        def __getitems__(self, indices):
            return [self[index] for index in indices]

    monkeypatch.setitem(differential.CONTENTS, content, CONTENTS[content])
    quiet = {"verbose": False, "before": "nothing", "source": "Dataset", "workers": 0}
    seen = hypothesis.find(
        test_differential.cases(loader="stock", override="none", **quiet, **options(content)),
        lambda case: difference(case, tmp_path, Product(cached=Loses)) is not None,
        settings=test_differential.limits(50, Phase.generate),
        random=random.Random(seed),
    )
    assert difference(seen, tmp_path) is None


@pytest.mark.parametrize("content", CONTENTS)
def test_a_picture_shows_what_a_sample_is(content):
    """Equal ones are equal, another one is another, and none is shown by its address."""
    make = CONTENTS[content]
    assert picture(make(3, 5)) == picture(make(3, 5)) != picture(make(4, 5))
    assert " at 0x" not in repr(picture(make(3, 5)))
    assert picture(lost(make(3, 5), content)) != picture(make(3, 5))
