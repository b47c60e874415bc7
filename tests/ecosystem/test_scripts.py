"""Generated scripts see the same with and without the cache, whatever library a sample is of."""

from __future__ import annotations

import random

import differential
import numpy as np
import pandas as pd
import pytest
import test_differential
import torch
from differential import floats, octets
from monai.data import MetaTensor
from torch_geometric.data import Data
from torchvision import tv_tensors
from transformers import BatchEncoding, BatchFeature


def image(i, width):
    return tv_tensors.Image(octets(i, 3 * width).view(3, 1, width))


CONTENTS = {
    "tv_tensors": lambda i, w: (image(i, w), {
        "boxes": tv_tensors.BoundingBoxes(floats(i, 8).view(2, 4), format="XYXY",
                                          canvas_size=(9, 9 + i)),
        "masks": tv_tensors.Mask(octets(i, w).view(1, w) > 50), "id": i}),
    "MetaTensor": lambda i, w: {
        "image": MetaTensor(floats(i, w), meta={"name": f"{i}.nii", "size": np.array([w, i])}),
        "label": i},
    "BatchEncoding": lambda i, w: BatchEncoding({"input_ids": list(range(i + 1)), "x": [i]}),
    "BatchFeature": lambda i, w: BatchFeature({"pixels": floats(i, w), "label": i}),
    "Data": lambda i, w: Data(x=floats(i, w).view(-1, 1), y=torch.tensor([i]), name=f"{i}"),
    "DataFrame": lambda i, w: (pd.DataFrame({"a": floats(i, 5).numpy(), "b": ["x", None, "y"] +
                                             [str(i)] * 2}), i),
}  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_script_sees_the_same_with_and_without_the_cache(
    tmp_path, monkeypatch, content, workers
):  # fmt: skip
    monkeypatch.setitem(differential.CONTENTS, content, CONTENTS[content])
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    test_differential.compare(
        10 if workers == 0 else 3, seed, tmp_path, content=content, workers=workers
    )
