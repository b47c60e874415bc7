"""The command ``stocache``."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from stocache.file_cache import FileCache
from stocache.sizes import show_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="stocache", description="A dataset cache for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    warm = commands.add_parser(
        "warm-files",
        help="copy a folder's files into a FileCache",
        description="Copies the files below SRC into a FileCache at DST, so that a job which uses "
        "FileCache(SRC, DST) finds them there. What is there already is not copied again: after an "
        "interrupt, the same command goes on where it was.",
    )
    warm.add_argument("src", metavar="SRC", help="the folder with the files; sub-folders too")
    warm.add_argument("dst", metavar="DST", help="the cache folder, as given to FileCache")
    warm.add_argument("--limit", help='the most that copies may take, such as "200GiB"')
    warm.add_argument("--workers", type=int, default=2, help="copies made at a time (default: 2)")
    warm.add_argument(
        "--files-from", metavar="LIST", type=Path,
        help="copy only the files named in this text file, one per line, relative to SRC",
    )  # fmt: skip
    warm.add_argument("--verify", action="store_true", help="compare all copies byte by byte too")
    warm.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(arguments)
    # As one line, not as a place in the source.
    warnings.showwarning = lambda text, *_rest, **_more: print(f"stocache: {text}", file=sys.stderr)
    try:
        return warm_files(options)
    except KeyboardInterrupt:
        print("stocache: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    except (OSError, ValueError, TypeError) as error:
        print(f"stocache: {error}", file=sys.stderr)
        return 2


def warm_files(options: argparse.Namespace) -> int:
    names = None
    if options.files_from is not None:
        names = options.files_from.read_text().splitlines()
    # What does not fit is left where it is: making room would remove what was just copied.
    with FileCache(options.src, options.dst, options.limit, files=names, policy="freeze") as cache:
        began = time.perf_counter()
        left = cache.prefetch(num_workers=options.workers, progress=not options.quiet)
        took = time.perf_counter() - began
        stats = cache.stats()
        there = len(cache.files) - len(left) - stats.copies
        print(
            f"{stats.copies} files copied ({show_bytes(stats.copied_bytes)} in {took:.1f} s), "
            f"{max(0, there)} were there already; {cache.folder} holds {stats.files} files, "
            f"{show_bytes(stats.bytes)}"
        )
        if left:
            print(
                f"stocache: {len(left)} files have no copy, the first is {left[0]}; "
                "jobs will read them from the source",
                file=sys.stderr,
            )
        differing: list[str] = []
        if options.verify:
            differing = cache.verify(num_workers=options.workers, progress=not options.quiet)
            if differing:
                print(
                    f"stocache: {len(differing)} copies differed and were removed, the first is "
                    f"{differing[0]}; run the command again",
                    file=sys.stderr,
                )
            else:
                print("all copies are what their sources are")
        return 1 if left or differing else 0
