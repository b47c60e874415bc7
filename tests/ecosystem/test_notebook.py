"""A real notebook kernel: cells that are run again, interrupts, what is shown."""

from __future__ import annotations

import contextlib

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

SETUP = """
import time, torch
from stocache import CachedDataset
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __init__(self, first=0):
        self.first = first
    def __len__(self):
        return 32
    def __getitem__(self, i):
        return torch.full((256,), self.first + i)
"""
MAKE = 'dataset = CachedDataset(Numbers({first}), "16MiB", verbose=False)'
TRAIN = """
for _ in range(2):
    seen = torch.cat(list(DataLoader(dataset, 8, num_workers=1)))[:, 0].tolist()
print(seen[:3], dataset.stats().loads)
"""


@contextlib.contextmanager
def kernel():
    """Runs cells in a kernel of its own; gives what they print, or the HTML that they show."""
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=300, kernel_name="python3")
    with client.setup_kernel():

        def run(source: str) -> str:
            cell = nbformat.v4.new_code_cell(source)
            client.nb.cells.append(cell)
            client.execute_cell(cell, len(client.nb.cells) - 1)
            shown = []
            for output in cell.outputs:
                data = output.get("data", {})
                shown.append(output.get("text") or data.get("text/html") or data.get("text/plain"))
            return "".join(filter(None, shown))

        yield run


@pytest.fixture
def notebook():
    with kernel() as run:
        yield run


# The caches that the kernel has: others on this node are nobody's concern here.
OWN = """
import os, stocache
[each.name for each in stocache.node.caches() if os.getpid() in each.pids]
"""


def test_a_notebook(notebook):
    notebook(SETUP)
    notebook(MAKE.format(first=0))
    assert notebook(TRAIN).strip() == "[0, 1, 2] 32"

    shown = notebook("display(dataset)")  # Out[] would keep it, as everything that a cell returns
    assert "<table>" in shown and "32 of 32 samples" in shown and "memory" in shown
    assert "<table>" in notebook("dataset.stats()")
    assert "of the dataset" in notebook('import stocache; stocache.plan(Numbers(), "16MiB")')

    # The cell is run again, and once more after it was changed: the samples are the new ones.
    notebook(MAKE.format(first=0))
    assert notebook(TRAIN).strip() == "[0, 1, 2] 32"
    notebook(MAKE.format(first=100))
    assert notebook(TRAIN).strip() == "[100, 101, 102] 32"

    # Another definition of the class, under a name.
    named = 'dataset = CachedDataset(Numbers(), "16MiB", name="notebook-test", verbose=False)'
    notebook(named)
    notebook("dataset[0]")
    notebook(SETUP.replace("self.first + i", "self.first + 2 * i"))
    with pytest.raises(CellExecutionError, match="was made for other data"):
        notebook(named)
    notebook("del dataset")
    notebook(named)
    assert notebook("print(dataset[3][0].item())").strip() == "6"

    # What is deleted is gone from memory.
    assert "notebook-test" in notebook(OWN)
    notebook("del dataset; import gc; gc.collect()")
    assert notebook(OWN).strip() == "[]"


def test_an_interrupt(notebook):
    notebook(SETUP)
    notebook(MAKE.format(first=0))
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
        notebook(
            "dataset[0]; import signal, os; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
        )
    assert notebook(TRAIN).strip() == "[0, 1, 2] 32"
    notebook(MAKE.format(first=5))
    assert notebook(TRAIN).strip() == "[5, 6, 7] 32"


def test_a_restarted_kernel_finds_a_kept_cache():
    kept = MAKE.format(first=0).replace("verbose", 'name="notebook-kept", keep=True, verbose')
    for filled in (0, 32):
        with kernel() as notebook:
            notebook(SETUP)
            notebook(kept)
            assert notebook("print(dataset.stats().filled)").strip() == str(filled)
            notebook("for sample in dataset: pass")
            if filled:
                notebook("dataset.delete()")
