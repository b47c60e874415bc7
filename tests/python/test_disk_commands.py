"""The commands for disk levels: `stocache ls PATH`, `rm PATH`, `gc PATH`, `verify PATH`."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from command import COMMAND, run
from kernel import become_nobody, root_only
from samples import whole
from sources import INDEX, Fixed

WORDS = 512


class Pictures(Fixed):
    """Samples by whose class a folder is known."""


@pytest.fixture
def below(tmp_path) -> Path:
    return tmp_path / "below"


@pytest.fixture
def make(cached, below):
    """A dataset of so many samples, all of which are on disk."""

    def made(count=50, **options):
        samples = Pictures([whole(index, WORDS) for index in range(count)])
        dataset = cached(samples, INDEX + 4096, disk="16MiB", disk_path=below, **options)
        assert len(dataset[:]) == count
        assert dataset.flush()
        return dataset

    return made


def folder_of(below) -> Path:
    (folder,) = below.iterdir()
    return folder


def listed(path) -> list[dict]:
    done = run("ls", path, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def everything(folder) -> dict[str, tuple[bytes, float]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime) for p in folder.rglob("*") if p.is_file()}


def damage(folder, records) -> None:
    """Flips a bit in so many records."""
    (file,) = [file for file in folder.glob("*.dat") if b"stor" in file.read_bytes()[:4096]]
    contents = bytearray(file.read_bytes())
    heads = [at for at in range(0, len(contents), 64) if contents[at : at + 4] == b"stor"]
    for at in heads[:records]:
        contents[at + 100] ^= 1
    file.write_bytes(contents)


# ls


def test_ls_shows_a_level_in_use_and_at_rest(make, below):
    dataset = make()
    (found,) = listed(below)
    assert found["path"] == str(folder_of(below)) and found["made_for"] == "Pictures"
    assert (found["samples"], found["filled"], found["state"]) == (50, 50, "in use")
    assert found["mine"] and not found["trouble"] and found["used_bytes"] >= 50 * WORDS * 8
    dataset.close()
    assert listed(below)[0]["state"] == "kept"
    assert listed(folder_of(below)) == listed(below), "by its own folder, too"
    assert abs(listed(below)[0]["used_at"] - time.time()) < 60
    header, row = run("ls", below).stdout.splitlines()
    assert " ".join(header.split()) == "FOLDER USER FOR USED FILLED STATE LAST USED"
    assert " Pictures " in row and " 50 of 50 " in row and " kept " in row


def test_ls_changes_nothing(make, below):
    make().close()
    before = everything(below)
    assert run("ls", below).returncode == 0 and run("verify", below, "--quiet").returncode == 0
    assert everything(below) == before


def test_ls_shows_what_cannot_be_read_and_says_why(make, below):
    make().close()
    store = folder_of(below) / "store"
    contents = bytearray(store.read_bytes())
    contents[8] = 7
    store.write_bytes(contents)
    (found,) = listed(below)
    assert "it has format 7, this stocache reads format 1" in found["trouble"]
    assert "it has format 7" in run("ls", below).stdout
    assert store.read_bytes() == contents


def test_a_folder_without_a_level_and_one_that_is_not_there(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert run("ls", tmp_path).stdout == f"there are no disk levels in {tmp_path}\n"
    assert listed(tmp_path) == []
    for command in ("ls", "gc", "verify"):
        gone = run(command, tmp_path / "gone")
        assert gone.returncode == 2 and "No such file" in gone.stderr
    done = run("rm", tmp_path)
    assert done.returncode == 1 and "holds no disk level" in done.stderr
    assert run("verify", tmp_path).returncode == 2


def test_what_a_folder_is_called_does_not_reach_the_terminal(make, below):
    make().close()
    folder_of(below).rename(below / "\x1b[2Jgone")
    assert "\x1b" not in run("ls", below).stdout
    assert "\x1b" not in run("verify", below, "--quiet").stdout


# rm


def test_rm_removes_a_level_by_its_path_or_all_of_a_disk_path(make, below):
    make().close()
    done = run("rm", folder_of(below))
    assert done.returncode == 0 and done.stdout.startswith(f"removed {below}")
    assert not list(below.iterdir())
    make().close()
    make(60).close()
    assert len(listed(below)) == 2
    done = run("rm", below, "--json")
    assert len(json.loads(done.stdout)["removed"]) == 2 and below.exists()
    assert not list(below.iterdir())


def test_rm_refuses_what_is_in_use_and_by_force_lets_the_job_go_on(make, below):
    dataset = make()
    done = run("rm", below)
    assert done.returncode == 1 and "is in use; end its processes first" in done.stderr
    assert folder_of(below).exists()
    assert run("rm", below, "--force").returncode == 0
    assert not list(below.iterdir())
    with pytest.warns(RuntimeWarning, match="the disk level"):
        for index in range(50):
            assert torch.equal(dataset[index], whole(index, WORDS))
        dataset.flush()
        assert torch.equal(dataset[3], whole(3, WORDS))


def test_rm_leaves_a_folder_with_files_of_others(make, below):
    make().close()
    theirs = folder_of(below) / "thesis.tex"
    theirs.write_text("years of work")
    done = run("rm", below, "--force")
    assert done.returncode == 1 and 'holds "thesis.tex", which is not stocache\'s' in done.stderr
    assert theirs.read_text() == "years of work" and (folder_of(below) / "store").exists()


def test_rm_follows_no_link(make, below, tmp_path):
    make().close()
    link = tmp_path / "link"
    link.symlink_to(folder_of(below))
    outside = tmp_path / "outside"
    outside.write_text("mine")
    assert run("rm", link).returncode == 1
    (folder_of(below) / "schemas").unlink()
    (folder_of(below) / "schemas").symlink_to(outside)
    assert run("rm", below).returncode == 1
    assert outside.read_text() == "mine" and folder_of(below).exists()


@root_only
def test_a_level_of_another_user_is_shown_and_stays(make, below, tmp_path, in_child):
    make().close()
    folder = folder_of(below)
    for path in (below, folder):
        path.chmod(0o755)

    def other():
        become_nobody(tmp_path)
        (found,) = listed(below)
        return found["mine"], found["user"], run("rm", below).stderr, run("gc", below).stdout

    mine, user, said, gone = in_child(other)
    assert not mine and user == "root" and "belongs to user 0" in said
    assert gone == "nothing was left over\n" and folder.exists()


# gc


def test_gc_removes_what_is_left_over_and_what_was_not_used_for_long(make, below):
    dataset = make()
    assert run("gc", below, "--unused-for", "0").stdout == "nothing was left over\n"
    dataset.close()
    folder = folder_of(below)
    (folder / "about.77").write_text("half")
    (folder / "store.00000000000000aa").write_text("half")
    (below / "half-0123456789abcdef").mkdir(mode=0o700)
    (below / "half-0123456789abcdef" / "lock").write_text("")
    gone = json.loads(run("gc", below, "--json").stdout)["removed"]
    assert sorted(gone) == sorted(
        map(str, (folder / "about.77", folder / "store.00000000000000aa",
                  below / "half-0123456789abcdef"))
    )  # fmt: skip
    assert run("gc", below).stdout == "nothing was left over\n"
    assert run("gc", below, "--unused-for", "7").stdout == "nothing was left over\n"
    week = time.time() - 8 * 86400
    os.utime(folder / "lock", (week, week))
    assert run("gc", below, "--unused-for", "7").stdout == f"removed {folder}\n"
    assert not list(below.iterdir())
    for wrong, said in ((["--unused-for", "3"], "needs a PATH"), ([below, "--unused-for", "-1"],
                        "use 0 or more days")):  # fmt: skip
        done = run("gc", *wrong)
        assert done.returncode == 2 and said in done.stderr


# verify


def test_verify_reads_every_record_and_says_how_many_are_damaged(make, below):
    make(compression="lz4").close()
    done = run("verify", below)
    assert done.returncode == 0 and "50 records, all of them whole" in done.stdout
    assert "100%" in done.stderr and "50/50" in done.stderr
    damage(folder_of(below), 7)
    done = run("verify", below, "--quiet")
    assert done.returncode == 1 and done.stderr == ""
    assert "7 of 50 records are damaged, and will be loaded again" in done.stdout
    found = json.loads(run("verify", below, "--quiet", "--json").stdout)
    assert found["checked"][0]["damaged"] == 7 and found["failed"] == []
    again = make(probe=0)
    assert again.stats().misses == 7
    again.close()
    assert run("verify", below, "--quiet").returncode == 0, "they were written anew"


def test_verify_says_what_it_cannot_read(make, below):
    make().close()
    (folder_of(below) / "store").write_bytes(b"nothing of ours" * 10)
    done = run("verify", below, "--quiet")
    assert done.returncode == 1
    assert 'cannot be read as a disk level: its file "store" does not begin' in done.stderr
    assert run("rm", below).returncode == 0, "which is the remedy that messages name"


def test_the_command_of_the_shell_is_the_same(make, below):
    make().close()
    shell = subprocess.run([*COMMAND, "ls", below], capture_output=True, text=True, timeout=300)
    assert shell.returncode == 0 and shell.stdout == run("ls", below).stdout
