"""What holds for the samples of every library."""

from __future__ import annotations

from typing import Any

import stocache
from differential import picture
from samples import gathered_natively
from sources import Fixed
from stocache import _C
from torch.utils.data import DataLoader


def back(sample: Any) -> Any:
    """The sample as it comes out of a cache."""
    return _C.codec_decode(*_C.codec_encode(sample))


def comes_back(sample: Any, shown: Any = picture) -> Any:
    """Asserts that what comes out of a cache shows the same: types, values, attributes."""
    got = back(sample)
    assert shown(got) == shown(sample)
    assert type(got) is type(sample)
    assert _C.codec_encode(got)[0] == _C.codec_encode(sample)[0]
    return got


def batches_are_those_of_torch(
    cached: Any, samples: list[Any], native: bool, **options: Any
) -> None:
    """Asserts that loaders over a cache give what torch's gives without one; `native`: and that
    batches are gathered without making the samples."""
    for workers in (0, 2):
        expected = [
            picture(batch) for batch in DataLoader(samples, 4, num_workers=workers, **options)
        ]
        dataset = cached(Fixed(samples))
        for _ in range(3):
            for loader in (stocache.DataLoader, DataLoader):
                batches = loader(dataset, 4, num_workers=workers, **options)
                assert [picture(batch) for batch in batches] == expected, (workers, loader)
        assert dataset.stats().loads == len(samples)
        made = gathered_natively(dataset, list(range(4)))
        assert (made is not _C.MISS) == native
        if native and not options:
            assert picture(made) == expected[0]
