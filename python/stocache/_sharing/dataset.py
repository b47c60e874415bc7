"""Who shares the cache of a dataset, and whether one that exists was made for the same data."""

from __future__ import annotations

import os
import warnings
from types import FrameType
from typing import Any

import torch

from stocache import _C
from stocache._cluster.options import Cluster
from stocache._sharing.change import (
    NOT_OPEN_ELSEWHERE,
    differing_parts,
    in_words,
    note,
    open_or_clear,
    others_at,
    use_a_fingerprint,
)
from stocache._sharing.disk import Disk
from stocache._sharing.fingerprint import Fingerprint, fingerprint
from stocache._sharing.job import count, stack
from stocache._sharing.launcher import Job, find_job
from stocache._sharing.sameness import digest
from stocache.sizes import parse_size


def open_records(
    records: _C.Records,
    dataset: Any,
    memory: Any,
    *,
    name: str | None,
    keep: bool,
    mark: str,
    on_change: str,
    policy: str,
    shared: bool,
    backing: str,
    huge_pages: str,
    caller: FrameType | None,
    disk: Disk | None,
    cluster: Cluster | None,
    label: str | None,
    part: str,
) -> str:
    """Opens ``records`` for ``dataset``, under the name that those who share it have in common, and
    the levels below. ``label`` is its name on the servers of a cluster.

    ``mark`` is the user's fingerprint, or "auto". Returns "created", "joined" or "resumed".
    """
    job = find_job()
    apart = None if job is None or not shared or name is not None else job
    # Nobody else asks for a cache that is private, and looking at a large dataset takes a while.
    kept = cluster is not None or (disk is not None and disk.key is None)
    look = mark == "auto" and (apart is not None or name is not None or kept)
    found = fingerprint(dataset) if look else Fingerprint("" if mark == "auto" else mark)
    if found.unseen and (name is not None or kept):
        where = f"the cache {name!r}" if disk is None else f"what is in {disk.path}"
        if cluster is not None:
            where = "what is on the servers"
        raise _unseen(found, f"{where} holds the samples of this dataset")
    if found.unseen and apart is not None:
        apart = None
        warnings.warn(
            f"{_first(found.unseen)} cannot be looked into, so nothing says whether the ranks of "
            "this node have the same samples, and each keeps a cache of its own; pass name= and "
            "fingerprint= to share one, or shared=False to say that they have not",
            RuntimeWarning,
            stacklevel=3,
        )
    # Who has another part must not take it for this one, under whichever name.
    hashed = _C.fingerprint_of(digest(found.text, part) if part else found.text)
    length = len(dataset)
    site = "" if apart is None else _site(apart, policy, caller)
    others = others_at(site, hashed) if site else []
    limit = parse_size("memory", memory)
    if disk is not None or cluster is not None:  # which may be all that there is
        limit = max(limit, _C.least_memory(max(1, length), policy))
    if isinstance(memory, float) and job is not None and name is None and (others or not apart):
        limit //= job.ranks  # each takes its part of what is free
    # The user's word says nothing of which dataset it is: a look has seen that.
    which = () if look else (_kind(dataset), length, list(stack(caller)))
    # No attribute, and yet the same file name or the same code may give another sample.
    which = (*which, _folder(), str(torch.get_default_dtype()), part)
    chosen = name or ("" if apart is None else _name(apart, policy, found.text, *which))
    open_or_clear(
        lambda: records.open(
            limit, max(1, length), policy, chosen, backing, keep, hashed, huge_pages,
            *NOT_OPEN_ELSEWHERE,
        ),
        chosen, on_change, found.notes(), dataset,
    )  # fmt: skip
    opened = str(records.location()["opened"])
    if disk is not None:
        _open_disk(records, disk, dataset, name, found, mark, on_change)
    if cluster is not None:
        _open_cluster(records, cluster, dataset, label, found, mark, part)
    if opened == "created" and chosen:
        note(chosen, type(dataset).__qualname__, site, found.notes())
    # Who came at the same moment may have left word since.
    if site and (others := others or others_at(site, hashed)):
        differing = differing_parts(found.notes(), others[0])
        remedy = use_a_fingerprint(dataset, differing) or (
            "; if they have the same samples at the same indices, pass name= and fingerprint= to "
            "share one"
        )
        warnings.warn(
            f"the ranks of this node have different datasets{in_words(differing)}, so each keeps a "
            f"cache of its own{remedy}, or shared=False to say that they have not",
            RuntimeWarning,
            stacklevel=3,
        )
    return opened


def _open_disk(
    records: _C.Records, disk: Disk, dataset: Any, name: str | None, found: Fingerprint, mark: str,
    on_change: str,
) -> None:  # fmt: skip
    """The level below. Unlike memory it outlives the job: what is there must be of the same data
    whoever asks for it, from wherever."""
    if disk.key is not None and mark == "auto":
        # What is there for each sample, the key stands for.
        found = fingerprint(dataset, of_each=False)
        if found.unseen:
            raise _unseen(found, "samples with the same key are the same")
    # The user's word says nothing of which dataset it is; and a look nothing of the folder that
    # file names are relative to.
    which = (_folder(),) if mark == "auto" else (_kind(dataset), disk.key is None and len(dataset))
    hashed = _C.fingerprint_of(digest(found.text, which, str(torch.get_default_dtype())))
    label = name or type(dataset).__name__
    about = f"{type(dataset).__qualname__}\n\n{found.notes()}"
    try:
        disk.open_below(records, dataset, label, hashed, about, name and on_change)
    except BaseException:
        records.close()
        raise


def _open_cluster(
    records: _C.Records, cluster: Cluster, dataset: Any, label: str | None, found: Fingerprint,
    mark: str, part: str,
) -> None:  # fmt: skip
    """The level below all others. As on disk, and other nodes have to come to the same."""
    which = (_folder(),) if mark == "auto" else (_kind(dataset), len(dataset))
    # The name as it was given: that on servers is for people, and several may come to the same.
    name = label or type(dataset).__name__
    which = (*which, str(torch.get_default_dtype()), part, name)
    try:
        cluster.open_below(records, name, _C.fingerprint_of(digest(found.text, which)))
    except BaseException:
        records.close()
        raise


def _unseen(found: Fingerprint, what: str) -> ValueError:
    return ValueError(
        f"fingerprint: {_first(found.unseen)} cannot be looked into, so nothing says whether "
        f"{what}; pass fingerprint= with a text that you change whenever the samples change"
    )


def _first(unseen: tuple[str, ...]) -> str:
    return unseen[0] + (f" and {len(unseen) - 1} more" if len(unseen) > 1 else "")


def _name(job: Job, policy: str, mark: str, *which: Any) -> str:
    """The name of a cache that nobody named: the ranks that wrap equal datasets find each other."""
    worker = torch.utils.data.get_worker_info()
    what = digest(job.name, policy, mark, worker and worker.id, which)
    return f"job-{what}-{count(what)}"


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _kind(dataset: Any) -> str:
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}"


def _site(job: Job, policy: str, caller: FrameType | None) -> str:
    """The line at which the cache is made, and which of those made there it is: where other ranks
    make theirs, whatever data they have."""
    worker = torch.utils.data.get_worker_info()
    line = digest(job.name, policy, list(stack(caller)), worker and worker.id)
    return f"{line}-{count(line)}"
