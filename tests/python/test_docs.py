"""What the documentation shows works as it stands."""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stocache.shared_cache
import torch
from building import ROOT, must, needs, tool
from stocache._types import registry


@pytest.mark.parametrize("module", [stocache.shared_cache, registry], ids=lambda m: m.__name__)
def test_the_example_in_the_docstring_runs(module):
    tried = doctest.testmod(module, extraglobs={"torch": torch})
    assert tried.attempted > 0 and tried.failed == 0


def complaints(stderr: str) -> list[str]:
    """What this package warns of, and what ends in an exception. Not looked for is the name of the
    package: the warnings of others show paths, and a clone's path has it."""
    return re.findall(r"^.*\b(?:RuntimeWarning|Exception|\w*Error)\b.*$", stderr, re.MULTILINE)


@pytest.mark.parametrize(
    "line, ours",
    [
        ("/home/me/stocache/torch/utils/data/dataloader.py:7: UserWarning: 4 worker processes", 0),
        ('/home/me/train.py:3: RuntimeWarning: the cache "a" is frozen: no space left', 1),
        ("RuntimeError: no cache named 'a' is open on this node", 1),
        ("Exception ignored in: <function CachedDataset.__del__>", 1),
    ],
)
def test_a_complaint_is_told_from_a_path(line, ours):
    assert len(complaints(f"first\n{line}\n  warnings.warn(\n")) == ours


def readme_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_one_line_of_the_readme_runs(capsys):
    samples = [{"x": torch.full((3,), float(i)), "name": f"sample {i}"} for i in range(4)]
    names = {"dataset": samples, "augment": lambda sample: (sample["name"], sample["x"] + 1)}
    block = readme_blocks()[0].replace("32GiB", "64MiB").replace("num_workers=8", "num_workers=1")
    exec(block, names)
    assert tuple(names["images"]) and names["labels"].shape == (4, 3)
    for _ in range(2):
        name, x = names["dataset"][2]
        assert name == "sample 2" and x.tolist() == [3.0] * 3
    names["dataset"].close()


def test_the_disk_of_the_readme_is_used(tmp_path):
    line = readme_blocks()[1].replace("32GiB", "1MiB").replace("300GiB", "16MiB")
    names = {
        "dataset": [torch.full((50_000,), i) for i in range(20)],
        "CachedDataset": stocache.CachedDataset,
    }
    exec(line.replace("/local/cache", str(tmp_path)), names)
    for _ in range(2):
        assert [int(sample[0]) for sample in names["dataset"]] == list(range(20))
    assert names["dataset"].stats().disk.hits > 10
    names["dataset"].close()


def test_the_slots_of_the_readme_run(capsys):
    code = readme_blocks()[2]
    loaded = []

    def load(idx: int) -> torch.Tensor:
        loaded.append(idx)
        return torch.full((3, 224, 224), idx, dtype=torch.uint8)

    # Nothing is reserved, so the 32 GiB of the example are a limit, not a need.
    names = {"N": 4, "load": load}
    exec(code, names)
    dataset = names["MyDataset"]()
    for _ in range(2):
        assert [int(dataset[i][0, 0, 0]) for i in range(4)] == [0, 1, 2, 3]
    assert loaded == [0, 1, 2, 3]
    dataset.cache.close()
    assert "cache all 4 samples" in capsys.readouterr().out


def files_of(page: str) -> dict[str, tuple[str, str]]:
    """The files of a page by the name in their first line: source, and the output shown next."""
    files: dict[str, tuple[str, str]] = {}
    last = None
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        named = re.match(r"(?:#|//) (\w+\.\w+)\n", body) if language not in ("", "sh") else None
        if named:
            last = named[1]
            files[last] = (body, "")
        elif last and not language:
            files[last] = (files[last][0], body)
            last = None
    return files


def test_the_files_in_scripts_md_print_what_is_shown(unique_name, run_script, tmp_path):
    page = (ROOT / "docs" / "scripts.md").read_text().partition("## The operators")[0]
    files = files_of(page.replace('"scripts-lesson"', f'"{unique_name()}"'))
    assert list(files) == ["prepare.py", "use.py", "compiled.py", "export.py", "run.py"]
    compiler = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "0",  # finding out takes long, and is not what is shown
    }
    source, shown = files.pop("prepare.py")
    first = run_script.start(source)
    assert "".join(first.stdout.readline() for _ in shown.splitlines()) == shown, (
        first.stderr.read()
    )
    for source, shown in files.values():
        done = run_script(source, env=compiler)
        assert done.stdout == shown
        assert not complaints(done.stderr), done.stderr
    first.communicate("\n")
    assert first.returncode == 0
    late = run_script(files["use.py"][0], check=False)
    assert late.returncode == 1
    assert late.stderr.splitlines()[-1].startswith("RuntimeError: no cache named ")


def test_the_commands_of_cpp_md_do_what_is_shown(unique_name, tmp_path, scale):
    """Every command of the page but the installation, in one folder, with the files it shows. The
    largest program is compiled a second time, by pkg-config's words, only with --long: smaller ones
    are compiled so, too. Nor does the compiler optimize without --long."""
    page = (ROOT / "docs" / "cpp.md").read_text().replace('"lesson', f'"{unique_name()}')
    files = files_of(page)
    assert list(files) == ["CMakeLists.txt", "main.cpp", "fill.py", "views.cpp", "errors.cpp"]
    for name, (source, _) in files.items():
        (tmp_path / name).write_text(source)
    install, *commands = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert "pip install" in install
    for name in ("cmake", "ninja", "c++"):
        tool(name, "README.md says how to get it")
    if not shutil.which("pkg-config"):
        pytest.skip("pkg-config is not installed: the commands of docs/cpp.md are not covered")
    commands[1] = scale(
        re.sub(r"(?m)^c\+\+ .*main.cpp.*\n", "cp build/trainer .\n", commands[1]), commands[1]
    )
    commands = scale(
        [re.sub("-O2|-DCMAKE_BUILD_TYPE=Release", "", command) for command in commands], commands
    )
    script = "set -eo pipefail\n" + "echo '=== next'\n".join(commands)
    beside_python = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    said = must("bash", "-c", script, cwd=tmp_path, env={**os.environ, "PATH": beside_python})
    trained, packaged, mixed, views, errors = said.split("=== next\n")
    for text, first in ((trained, 1), (packaged, 1), (mixed, 500)):
        hits = re.findall(r"^epoch \d: \S+ s, (\d+) of 500 samples", text, re.MULTILINE)
        assert list(map(int, hits)) == [first, 500, 500], text
        assert re.search(r"^500 of 500 slots filled .* hit rate\)$", text, re.MULTILINE), text
    assert views == files["views.cpp"][1]
    sentence, status = errors.splitlines()
    assert sentence.startswith("no cache named") and status == "status 1"


TIFF = ["examples/tiff_files.py", "--images", "16", "--epochs", "2", "--wait", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.parametrize(
    "command, shown, packages",
    [
        (["examples/cached_dataset.py"], "1000 of 1000 samples in memory", []),
        (["examples/batch_dataset.py"], "hit", []),
        ([*TORCHRUN, "examples/ddp_train.py"], "1024 samples stored for a dataset of 1024", []),
        (
            [*TIFF, "--plot", "{tmp}/plot.png"],
            "all runs computed the same losses, and every file was copied once",
            ["tifffile", "matplotlib"],
        ),
        (
            ["examples/augmented.py", "--plot", "{tmp}/plot.png"],
            "epoch 6: ",
            ["torchvision", "matplotlib"],
        ),
        (
            [
                "examples/imagenet_like.py",
                "--images",
                "80",
                "--epochs",
                "2",
                "--batch",
                "16",
                "--side",
                "32",
            ],
            "epoch 2: loss",
            ["torchvision"],
        ),
    ],
    ids=[
        "cached_dataset",
        "batch_dataset",
        "ddp_train",
        "tiff_files",
        "augmented",
        "imagenet_like",
    ],
)
def test_an_example_runs_without_a_warning(command, shown, packages, tmp_path):
    needs(*packages)
    command = [part.replace("{tmp}", str(tmp_path)) for part in command]
    answer = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert shown in answer.stdout, answer.stdout
    assert not complaints(answer.stderr), answer.stderr


def test_the_files_in_datasets_md_print_what_is_shown(unique_name, run_script):
    needs("PIL")
    page = (ROOT / "docs" / "datasets.md").read_text()
    files = files_of(page.replace("datasets-lesson", unique_name()))
    assert len(files) == 15
    for name, (source, shown) in files.items():
        done = run_script(source)
        assert done.stdout == shown, name
        assert not complaints(done.stderr), done.stderr
        if name == "run.py":
            again = run_script(source).stdout
            assert again == "100 samples at the start, 0 loaded in this run\n"


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("files", ["pictures.py", "changed.py", "pairs.py"]),
        ("tiers", ["restart.py", "packed.py", "bilevel.py"]),
        ("sharding", ["parts.py"]),
        ("augmentation", ["augmented.py", "refused.py"]),
    ],
)
def test_the_files_of_a_page_print_what_is_shown(run_script, page, names):
    if page == "augmentation":
        needs("torchvision")
    files = files_of((ROOT / "docs" / f"{page}.md").read_text())
    assert list(files) == names
    for name, (source, shown) in files.items():
        done = run_script(source)
        # As newer ones of torchvision say it.
        printed = re.sub(r"InterpolationMode\.(\w+)", lambda name: name[1].lower(), done.stdout)
        assert printed == shown, name
        assert not complaints(done.stderr), done.stderr
