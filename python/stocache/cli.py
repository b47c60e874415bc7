"""The command ``stocache``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stocache import disk_caches, node
from stocache._cluster import listing, spawn
from stocache._file_names import Bar
from stocache.file_cache import FileCache
from stocache.sizes import show_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            # As one line, not as a place in the source.
            warnings.showwarning = lambda text, *_, **__: print(
                f"stocache: {text}", file=sys.stderr
            )
            return int(options.run(options))
    except KeyboardInterrupt:
        print("stocache: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as in `stocache ls | head`
        sys.stderr.close()
        return 141
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        print(f"stocache: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stocache", description="A dataset cache for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    caches = commands.add_parser(
        "ls",
        help="show the caches on this node",
        description="Shows every cache on this node: whose it is, how large, how full, and which "
        "processes use it. One that is kept stays until it is removed or the machine restarts; one "
        "that is left over belonged to a job that was killed, and goes with `stocache gc` or when "
        "its user makes the next cache. With a PATH, the disk levels there; with --cluster, what "
        "is on servers.",
    )
    caches.add_argument(
        "paths", metavar="PATH", nargs="*", help="a disk_path, or the folder of one disk level"
    )
    caches.add_argument(
        "--cluster", metavar="URL",
        help='the datasets on the servers redis://host:port,host:port; "spawn": on those that jobs '
        'of yours run on this node; "-": on those that standard input names, so that no list of '
        "processes shows a password",
    )  # fmt: skip
    caches.set_defaults(run=list_caches)
    removal = commands.add_parser(
        "rm",
        help="remove caches by name, disk levels by path",
        description="Removes caches of yours by their names, as `stocache ls` shows them, and disk "
        "levels by their paths, or all of those in a disk_path. A path has a slash in it: ./cache.",
    )
    removal.add_argument(
        "names", metavar="NAME_OR_PATH", nargs="+", help="as `stocache ls` and `ls PATH` show them"
    )
    removal.add_argument(
        "--force", action="store_true",
        help="also one that is in use: its name or its files go, and its processes go on with what "
        "they have open",
    )  # fmt: skip
    removal.set_defaults(run=remove)
    collection = commands.add_parser(
        "gc",
        help="remove what killed jobs left behind",
        description="Removes caches of yours that no process uses and nobody keeps. With a PATH, "
        "what killed jobs left of disk levels there.",
    )
    collection.add_argument(
        "paths", metavar="PATH", nargs="*", help="a disk_path, or the folder of one disk level"
    )
    collection.add_argument(
        "--unused-for", metavar="DAYS", type=float,
        help="also disk levels in PATH that nobody has used for so many days",
    )  # fmt: skip
    collection.set_defaults(run=collect)
    check = commands.add_parser(
        "verify",
        help="read every record of disk levels",
        description="Reads every record of the disk levels in PATH and says how many are damaged. "
        "A job loads such samples and writes them anew when it asks for them.",
    )
    check.add_argument(
        "paths", metavar="PATH", nargs="+", help="a disk_path, or the folder of one disk level"
    )
    check.add_argument("--quiet", action="store_true", help="no progress bar")
    check.set_defaults(run=verify)
    for command in (caches, removal, collection, check):
        command.add_argument("--json", action="store_true", help="print JSON, for programs")
    _add_warm_files(commands)
    return parser


def _add_warm_files(commands: Any) -> None:
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
    warm.set_defaults(run=warm_files)


def list_caches(options: argparse.Namespace) -> int:
    if options.cluster is not None:
        if options.paths:
            raise ValueError("a PATH and --cluster are both given; use one of them")
        return _list_servers(options)
    if options.paths:
        return _list_disk_caches(options)
    caches = node.caches()
    if options.json:
        print(json.dumps([cache.as_dict() for cache in caches], indent=2))
        return 0
    if not caches:
        print("there are no caches on this node")
        return 0
    header = (
        "NAME",
        "USER",
        "KIND",
        "WHERE",
        "FOR",
        "USED",
        "LIMIT",
        "FILLED",
        "STATE",
        "PROCESSES",
    )
    _print_table(header, list(map(_row, caches)))
    for line in _advice(caches):
        print(f"\n{line}")
    return 0


def _print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    rows = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = {"USED", "LIMIT", "FILLED", "SAMPLES", "BYTES", "P50", "P90", "P99"}
    for row in rows:
        cells = (
            text.rjust(width) if title in right else text.ljust(width)
            for title, text, width in zip(header, row, widths, strict=True)
        )
        print("  ".join(cells).rstrip())


def _list_disk_caches(options: argparse.Namespace) -> int:
    caches = _disk_caches_in(options.paths)
    if options.json:
        print(json.dumps([cache.as_dict() for cache in caches], indent=2))
        return 0
    if not caches:
        print(f"there are no disk levels in {' or '.join(map(_printable, options.paths))}")
        return 0
    header = ("FOLDER", "USER", "FOR", "USED", "FILLED", "STATE", "LAST USED")
    _print_table(header, [_disk_row(cache) for cache in caches])
    left = [cache for cache in caches if cache.state == "left over" and cache.mine]
    if left:
        size = show_bytes(sum(cache.used_bytes for cache in left))
        print(f"\n{len(left)} left over by killed jobs ({size}): `stocache gc PATH` removes them.")
    for cache in caches:
        if cache.trouble:
            print(f"\n{_printable(cache.path)}: {_printable(cache.trouble)}")
    return 0


def _list_servers(options: argparse.Namespace) -> int:
    url = options.cluster
    if url == "spawn":
        running = spawn.running()
        url = spawn.url_of(running) if running else None
    elif url == "-":
        url = sys.stdin.readline().strip()
    found = [] if url is None else listing.servers(url)
    failed = any(server.trouble for server in found)
    if options.json:
        print(json.dumps([server.as_dict() for server in found], indent=2))
        return int(failed)
    if not found:
        print("no job of yours runs a server on this node")
        return 0
    header = (
        "SERVER", "VERSION", "USED", "LIMIT", "P50", "P90", "P99", "DATASET", "SAMPLES", "BYTES",
    )  # fmt: skip
    _print_table(header, [row for server in found for row in _server_rows(server)])
    for server in found:
        if server.trouble:
            print(f"stocache: {server.address}: {_printable(server.trouble)}", file=sys.stderr)
    return int(failed)


def _server_rows(server: listing.ServerInfo) -> list[tuple[str, ...]]:
    """One for each dataset; what is the server's stands in the first."""
    if server.trouble:
        return [(server.address, "no answer", *["-"] * 8)]
    latency = [_show_latency(server.latency[part]) for part in ("p50", "p90", "p99")]
    limit = show_bytes(server.max_bytes) if server.max_bytes else "-"
    used = show_bytes(server.used_bytes)
    mine = (server.address, _printable(server.version) or "?", used, limit, *latency)
    rows = [
        (_printable(each.name), str(each.samples),
         "?" if each.bytes is None else show_bytes(each.bytes))
        for each in server.datasets
    ]  # fmt: skip
    first, *others = rows or [("-", "0", "-")]
    return [(*mine, *first), *((*[""] * len(mine), *row) for row in others)]


def _show_latency(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def _disk_row(cache: disk_caches.DiskCacheInfo) -> tuple[str, ...]:
    of = "" if cache.samples is None else f" of {cache.samples}"
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(cache.used_at)) if cache.used_at else "?"
    return (
        _printable(cache.path), cache.user, _printable(cache.made_for) or "-",
        show_bytes(cache.used_bytes), "?" if cache.trouble else f"{cache.filled}{of}", cache.state,
        used,
    )  # fmt: skip


def _disk_caches_in(paths: Sequence[str]) -> list[disk_caches.DiskCacheInfo]:
    found = {cache.path: cache for path in paths for cache in disk_caches.disk_caches(path)}
    return list(found.values())


def _row(cache: node.CacheInfo) -> tuple[str, ...]:
    filled = "?" if cache.filled is None else f"{cache.filled} of {cache.samples}"
    pids = " ".join(map(str, cache.pids[:6])) + (" ..." if len(cache.pids) > 6 else "")
    return (
        _printable(cache.name) or "(name removed)", cache.user, cache.kind or "?",
        "/dev/shm" if cache.path else "memory",
        _printable(cache.made_for) or "-",
        show_bytes(cache.used_bytes), show_bytes(cache.limit_bytes),
        "-" if cache.kind == "files" else filled, cache.state, pids or "-",
    )  # fmt: skip


def _printable(text: str) -> str:
    """Any user can name a file, and a terminal obeys what it prints."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _advice(caches: list[node.CacheInfo]) -> list[str]:
    left = [cache for cache in caches if cache.state in ("left over", "unused")]
    mine = [cache for cache in left if cache.mine]
    advice = []
    if mine:
        size = show_bytes(sum(cache.used_bytes for cache in mine))
        advice.append(f"{len(mine)} left over by killed jobs ({size}): `stocache gc` removes them.")
    for user in sorted({cache.user for cache in left if not cache.mine}):
        theirs = [cache for cache in left if cache.user == user]
        size = show_bytes(sum(cache.used_bytes for cache in theirs))
        advice.append(
            f"{len(theirs)} of {user}'s that nobody seems to use ({size}): only {user} can remove "
            f"them (sudo -u {user} stocache gc, or rm for those that are kept)."
        )
    for cache in caches:
        if cache.trouble and cache.mine:
            advice.append(f"{_printable(cache.name)}: {cache.trouble}")
    return advice


def remove(options: argparse.Namespace) -> int:
    removed, failed, left = [], [], []
    for name in dict.fromkeys(options.names):
        try:
            if os.sep in name:
                for cache in _disk_caches_to_remove(name):
                    disk_caches.remove(cache, force=options.force)
                    removed.append(cache)
            else:
                removed += node.remove(name, force=options.force)
                left += _left(name)
        except (OSError, RuntimeError, ValueError) as error:
            failed.append(str(error))
    if options.json:
        print(json.dumps({"removed": removed, "failed": failed, "left": left}, indent=2))
    else:
        for path in removed:
            print(f"removed {path}")
        for sentence in left + failed:
            print(f"stocache: {sentence}", file=sys.stderr)
    return 1 if failed else 0


def _disk_caches_to_remove(path: str) -> list[str]:
    found = [cache.path for cache in disk_caches.disk_caches(path)]
    if not found:
        raise ValueError(f"{path} holds no disk level; `stocache ls PATH` shows those of a folder")
    return found


def _left(name: str) -> list[str]:
    """What else has the name after a file of that name was removed."""
    others = [cache for cache in node.caches() if cache.name == name and cache.mine]
    return [
        f"{cache.path or f'a cache named {name} without a file'} is in use by {_users(cache.pids)}"
        for cache in others
    ]


def _users(pids: list[int]) -> str:
    if not pids:
        return "processes that cannot be seen from here and stays until they end"
    if len(pids) == 1:
        return f"process {pids[0]} and stays until it ends"
    return f"processes {', '.join(map(str, pids))} and stays until they end"


def collect(options: argparse.Namespace) -> int:
    if options.paths:
        return _collect_disk_caches(options)
    if options.unused_for is not None:
        raise ValueError("--unused-for needs a PATH, the disk_path of disk levels")
    before = {cache.path: cache.used_bytes for cache in node.caches()}
    removed = [f"/dev/shm/{name}" for name in node.sweep()]
    if options.json:
        print(json.dumps({"removed": removed}, indent=2))
        return 0
    for path in removed:
        print(f"removed {path} ({show_bytes(before.get(path, 0))})")
    if not removed:
        print("nothing was left over")
    return 0


def _collect_disk_caches(options: argparse.Namespace) -> int:
    removed = [
        gone for path in options.paths for gone in disk_caches.sweep(path, options.unused_for)
    ]
    if options.json:
        print(json.dumps({"removed": removed}, indent=2))
        return 0
    for path in removed:
        print(f"removed {_printable(path)}")
    if not removed:
        print("nothing was left over")
    return 0


def verify(options: argparse.Namespace) -> int:
    caches = _disk_caches_in(options.paths)
    if not caches:
        raise ValueError(f"there are no disk levels in {' or '.join(options.paths)}")
    total = sum(cache.filled for cache in caches)
    found, failed = [], []
    with Bar(total=total, desc="reading", unit="record", disable=options.quiet) as bar:
        for cache in caches:
            try:
                records, damaged = disk_caches.verify(cache.path, bar.update)
                found.append({"path": cache.path, "records": records, "damaged": damaged})
            except (OSError, RuntimeError, ValueError) as error:
                failed.append(str(error))
    if options.json:
        print(json.dumps({"checked": found, "failed": failed}, indent=2))
    else:
        for each in found:
            print(_verdict(each))
        for sentence in failed:
            print(f"stocache: {sentence}", file=sys.stderr)
    return 1 if failed or any(each["damaged"] for each in found) else 0


def _verdict(found: dict[str, Any]) -> str:
    path, records, damaged = _printable(found["path"]), found["records"], found["damaged"]
    if not damaged:
        return f"{path}: {records} records, all of them whole"
    return f"{path}: {damaged} of {records} records are damaged, and will be loaded again"


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
