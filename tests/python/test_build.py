"""What setup.py says about the torch that it builds for. Nothing is compiled here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from building import ROOT

pytest.importorskip("setuptools", reason="setuptools is not installed: setup.py is not covered")


def fake(folder: Path, version: str) -> Path:
    package = folder / version / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text(f"__all__ = []\n__version__ = '{version}'\n")
    return package


@pytest.fixture
def asked(run_script, tmp_path):
    """What setup.py asks setuptools for, or says as it builds for these versions."""

    def ask(*versions: str | Path, build: bool = False):
        made = (v if isinstance(v, Path) else fake(tmp_path, v) for v in versions)
        folders = map(str, made)
        source = """
            import json, runpy, sys, setuptools
            asked = {}
            setuptools.setup = lambda **options: asked.update(options)
            names = runpy.run_path(sys.argv[1])
            if sys.argv[2] == "build":
                command = asked["cmdclass"]["build_ext"](setuptools.Distribution())
                command.build_extension(setuptools.Extension("stocache._C", []))
            print(json.dumps(asked["install_requires"]))
        """
        environment = {"STOCACHE_TORCH_DIRS": ":".join(folders)}
        what = "build" if build else "ask"
        done = run_script(source, ROOT / "setup.py", what, env=environment, check=not build)
        return done.stderr.strip().splitlines()[-1] if build else json.loads(done.stdout)[0]

    return ask


@pytest.mark.parametrize(
    "versions, expected",
    [
        (["2.13.0+cu130"], "torch>=2.13,<2.14"),
        (["2.16.0.dev20261101+cpu"], "torch>=2.16.dev0,<2.17"),
        (["2.10.0", "2.9.1"], "torch>=2.9,<2.11"),
        (["2.9.1", "2.11.0", "2.13.0"], "torch>=2.9,<2.14,!=2.10.*,!=2.12.*"),
    ],
)
def test_the_package_needs_a_torch_that_it_was_built_for(asked, versions, expected):
    assert asked(*versions) == expected


def test_a_torch_that_is_too_old_is_refused_in_one_sentence(asked, tmp_path):
    assert asked("2.9.1", "2.8.0", build=True) == (
        "stocache needs torch 2.9 or newer, and 2.8 is in "
        f"{tmp_path}/2.8.0/torch: pip install --upgrade torch"
    )


@pytest.mark.parametrize("exists", [True, False])
def test_a_libtorch_without_python_is_refused_in_one_sentence(asked, tmp_path, exists):
    libtorch = tmp_path / "libtorch"
    if exists:
        (libtorch / "include").mkdir(parents=True)
        (libtorch / "build-version").write_text("2.15.0+cpu\n")
    assert asked(libtorch, build=True) == (
        f"{libtorch} holds no torch for Python, and a libtorch alone is not enough to build "
        "stocache: pip install torch"
    )


def test_a_torch_of_no_known_version_is_refused_in_one_sentence(asked, tmp_path):
    named = tmp_path / "unknown" / "torch" / "version.py"
    assert asked("unknown", build=True) == (
        f"{named} does not say which torch it is: pip install torch"
    )


def test_without_torch_it_is_asked_for(run_script, tmp_path):
    source = """
        import importlib.util, runpy, sys, setuptools
        asked = {}
        setuptools.setup = lambda **options: asked.update(options)
        importlib.util.find_spec = lambda name: None
        runpy.run_path(sys.argv[1])
        print(asked["install_requires"][0])
        command = asked["cmdclass"]["build_ext"](setuptools.Distribution())
        command.build_extension(setuptools.Extension("stocache._C", []))
    """
    done = run_script(source, ROOT / "setup.py", env={"STOCACHE_TORCH_DIRS": ""}, check=False)
    assert done.stdout.strip() == "torch>=2.9" and done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "stocache builds against the torch it will run with: pip install torch, then "
        "pip install --no-build-isolation ."
    )


def test_the_same_versions_of_torch_are_built_tested_and_documented():
    makefile = (ROOT / "Makefile").read_text()
    (listed,) = re.findall(r"^TORCHES := (.*)$", makefile, re.MULTILINE)
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    (matrix,) = re.findall(r"torch: \[(.*)\]", workflow)
    assert [version.strip('" ') for version in matrix.split(",")] == listed.split()
    table = re.findall(
        r"^\| (\d+\.\d+\.\d+) \|", (ROOT / "docs/torch.md").read_text(), re.MULTILINE
    )
    assert table == listed.split()
