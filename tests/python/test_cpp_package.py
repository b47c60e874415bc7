"""What a C++ project builds against: headers, libraries, the CMake package, the pkg-config file."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import stocache
import torch
from building import ROOT, TORCH, compiler, configure, must, run
from probe import text, without_python

PREFIX = Path(stocache.include_path()).resolve().parent
MINOR = ".".join(torch.__version__.split(".")[:2])


def fake_torch(folder: Path, version: str, place: str = "headeronly/version.h") -> Path:
    header = folder / "include" / "torch" / place
    header.parent.mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    header.write_text("".join(f"#define TORCH_VERSION_{part} {n}\n" for part, n in parts))
    return folder


def configured(tmp_path: Path, line: str, *definitions: str) -> tuple[int, str]:
    """What CMake says of a project with that line, on one line."""
    source = tmp_path / "project"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.20)\nproject(user LANGUAGES NONE)\n{line}\n"
    )
    done = run(*configure(source, tmp_path / "build", *definitions))
    return done.returncode, " ".join(done.stdout.split())


@pytest.mark.parametrize("place", ["headeronly/version.h", "csrc/api/include/torch/version.h"])
def test_cmake_says_which_torch_is_wrong(tmp_path, place):
    torch_dir = fake_torch(tmp_path / "torch", "2.8.0", place)
    status, said = configured(
        tmp_path, "find_package(stocache REQUIRED)", f"-DSTOCACHE_TORCH_DIR={torch_dir}"
    )
    assert status != 0
    assert (
        f"this stocache was built for torch {MINOR} but torch 2.8 is in {torch_dir}; "
        f"pip install torch=={MINOR}.*"
    ) in said


def test_cmake_takes_a_libtorch_without_python(tmp_path):
    libtorch = fake_torch(tmp_path / "libtorch", f"{MINOR}.0")
    status, said = configured(
        tmp_path,
        "enable_language(CXX)\nfind_package(stocache REQUIRED)",
        f"-DSTOCACHE_TORCH_DIR={libtorch}",
    )
    assert status == 0, said


def test_cmake_says_that_torch_is_missing(tmp_path):
    moved = tmp_path / "alone" / "share" / "cmake"
    shutil.copytree(stocache.cmake_prefix_path, moved)
    status, said = configured(
        tmp_path,
        "find_package(stocache REQUIRED)",
        f"-DCMAKE_PREFIX_PATH={moved}",
    )
    assert status != 0
    assert f"stocache needs torch {MINOR} and found none in " in said
    assert f"pip install torch=={MINOR}.*, or set STOCACHE_TORCH_DIR" in said


def test_cmake_looks_nowhere_else_if_it_is_told_where_torch_is(tmp_path):
    status, said = configured(
        tmp_path, "find_package(stocache REQUIRED)", "-DSTOCACHE_TORCH_DIR=/nowhere/torch"
    )
    assert status != 0
    assert "found none in /nowhere/torch" in said


CORE = PREFIX.parent / "lib" / "libstocache_core.so"


def names(library: Path, which: str) -> list[str]:
    """But for those that may be missing."""
    return re.findall(r"(?m)^[0-9a-f]* +[A-VX-Z] (.*)$", must("nm", "-DC", which, library))


@pytest.mark.parametrize(
    "library, one", [(PREFIX / "lib/libstocache.so", "SharedCache::get_slot"), (CORE, "sweep")]
)
def test_the_library_shows_its_own_names_only(library, one):
    """What else is linked into it would take the place of a program's own functions."""
    shown = names(library, "--defined-only")
    assert any(one in name for name in shown)
    ours = ("stocache::", "stocache_", "stocache$", "rust::cxxbridge1::", "cxxbridge1$")
    assert [name for name in shown if not any(mark in name for mark in ours)] == []


def test_the_core_knows_no_torch():
    """There is one for all versions of torch: what it asks of one, libstocache has."""
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", must("readelf", "-dW", CORE))
    assert needed and not [name for name in needed if name.startswith(("libtorch", "libc10"))]
    asked = {name for name in names(CORE, "--undefined-only") if "@" not in name}
    assert "stocache_at_free" in asked
    assert asked <= set(names(PREFIX / "lib/libstocache.so", "--defined-only"))


@pytest.mark.parametrize("library", ["lib/libstocache.so", "_C*.so"])
def test_a_torch_without_cuda_has_all_that_is_linked(library):
    (path,) = PREFIX.glob(library)
    dynamic = must("readelf", "-dW", path)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    assert "libtorch_cpu.so" in needed
    assert {name for name in needed if name.startswith(("libtorch", "libc10"))} <= {
        "libtorch_cpu.so", "libtorch_python.so", "libc10.so",
    }  # fmt: skip
    assert not [name for name in needed if "cu" in name or "nv" in name]


@pytest.mark.parametrize("library", ["lib/libstocache.so", "_C*.so"])
def test_the_places_of_errors_are_named_as_in_the_project(library):
    (path,) = PREFIX.glob(library)
    code = path.read_bytes()
    assert b"csrc/" in code
    assert os.fsencode(ROOT / "csrc") not in code, "a folder of the machine that built it"


def test_cmake_knows_the_version_of_stocache(tmp_path):
    # The package is refused before it is read, so no compiler is needed to ask.
    status, said = configured(tmp_path, "find_package(stocache 9.9 REQUIRED)")
    assert status != 0
    assert stocache.__version__ in said and "9.9" in said


def test_headers_of_another_torch_stop_the_compiler(tmp_path):
    torch_dir = fake_torch(tmp_path / "torch", "2.8.0")
    source = tmp_path / "a.cpp"
    source.write_text("#include <stocache/version.h>\nint main() {}\n")
    check = [compiler(), "-fsyntax-only", "-I", stocache.include_path()]
    right = ["-I", TORCH / "include", "-I", TORCH / "include/torch/csrc/api/include"]
    other = run(*check, "-I", torch_dir / "include", *right, source)
    assert other.returncode != 0
    assert f"this stocache was built for torch {MINOR}" in other.stdout
    assert run(*check, *right, source).returncode == 0


def test_another_torch_at_run_time_is_told_at_every_door(start_probe, unique_name, tmp_path):
    """A torch whose libraries fit so well that the loader takes them, but of another version."""
    source, other = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text(
        """
        extern "C" unsigned long aoti_torch_abi_version() {
          return 2ul << 56 | 99ul << 48 | 1ul << 40;  // 2.99.1
        }
        """
    )
    must(compiler(), "-shared", "-fPIC", source, "-o", other)
    probe = start_probe("serve", env={**without_python(), "LD_PRELOAD": str(other)})
    name = text(unique_name())
    for door in (f"open a 0.001 8 4 uint8 name={name}", f"join a {name}", f"operator {name} 0"):
        assert probe.ask(door) == {
            "error": "RuntimeError",
            "text": f"this stocache was built for torch {MINOR} but the program runs torch 2.99.1; "
            f"link or install torch {MINOR}",
        }, door


def test_the_library_stays_when_a_plug_in_that_brought_it_is_closed(run_script):
    """Views end in its code, and torch cannot take back what it has registered."""
    library = PREFIX / "lib" / "libstocache.so"
    said = run_script(
        """
        import _ctypes, ctypes, sys
        for _ in range(2):
            _ctypes.dlclose(ctypes.CDLL(sys.argv[1])._handle)
            print("libstocache.so" in open("/proc/self/maps").read())
        """,
        library,
        fresh=True,
    )
    assert said.stdout.split() == ["True", "True"]


def test_pkg_config_is_enough_to_build_a_program(tmp_path, unique_name):
    pkg_config = shutil.which("pkg-config")
    if not pkg_config:
        pytest.skip("pkg-config is not installed: building with it is not covered")
    environment = {**os.environ, "PKG_CONFIG_PATH": str(PREFIX / "lib" / "pkgconfig")}
    assert must(pkg_config, "--modversion", "stocache", env=environment).strip() == (
        stocache.__version__
    )
    flags = shlex.split(must(pkg_config, "--cflags", "--libs", "stocache", env=environment))
    source, program = tmp_path / "tiny.cpp", tmp_path / "tiny"
    source.write_text(
        """
        #include <stocache/shared_cache.h>
        #include <cstdio>
        int main(int, char** argv) {
          const stocache::SharedCache cache(stocache::Options(0.001).name(argv[1]), 8, {4});
          std::printf("%s %d\\n", STOCACHE_VERSION, int(cache.size()));
        }
        """
    )
    must(compiler(), source, "-o", program, *flags)
    said = must(program, unique_name(), env=without_python())
    assert said.split() == [stocache.__version__, "8"]


def mapped(pid: int | str) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[-1]).name for line in lines if ".so" in line}


def test_the_library_needs_no_python(start_probe, unique_name):
    probe = start_probe("serve", env={})
    probe.result(f"open a 0.001 8 4 uint8 name={text(unique_name())}")
    assert probe.result("set a 0 x01020304 1 0") is True
    libraries = mapped(probe.child.pid)
    assert "libstocache.so" in libraries and "libtorch_cpu.so" in libraries
    snakes = ("libpython", "libtorch_python", "_C.")
    assert not [name for name in libraries if name.startswith(snakes)]
    # The same look at this process finds them.
    assert [name for name in mapped("self") if name.startswith(snakes)]
    probe.end()


def test_the_folders_that_python_names_are_there():
    assert Path(stocache.cmake_prefix_path, "stocache", "stocacheConfig.cmake").is_file()
    for header in ("stocache.h", "shared_cache.h", "cached.h", "errors.h", "version.h"):
        assert Path(stocache.include_path(), "stocache", header).is_file()
    assert (PREFIX / "lib" / "libstocache.so").is_file()
