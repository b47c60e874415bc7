"""Private names of torch are in `_torch/` only: what breaks with another torch is found there."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import stocache
import torch
from torch.utils.data import dataloader

PACKAGE = Path(stocache.__file__).parent
# Attributes of torch's loaders and iterators, which look like anybody's own.
OF_LOADERS = set(re.findall(r"\bself\.(_[a-z]\w*)", inspect.getsource(dataloader)))
# Of tensors and their memory, whatever the variable is called that holds one.
_KINDS = (torch.Tensor, torch.TypedStorage, torch.UntypedStorage, torch.Generator)
OF_TENSORS = {name for kind in _KINDS for name in dir(kind) if re.match("_[a-z]", name)}
OF_TENSORS |= set(re.findall(r"\bself\.(_[a-z]\w*)", inspect.getsource(torch.storage)))


def is_private(path: str) -> bool:
    """Whether a dotted path leads to something private: `torch._utils`, not `torch.__version__`."""
    return any(re.match("_(?!_)", part) for part in path.split("."))


def private_names(source: str) -> set[str]:
    """The private names of torch in a module, with their lines."""
    found = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
            if node.attr in OF_TENSORS and ast.unparse(node.value) not in ("self", "cls"):
                found.add(f"{node.lineno}: {names[0]}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.findall(r"\btorch\.[\w.]+", node.value)
        found |= {
            f"{node.lineno}: {name}"
            for name in names
            if name.split(".")[0] == "torch" and is_private(name)
        }
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        if not any("Loader" in ast.unparse(base) for base in kind.bases):
            continue
        for node in ast.walk(kind):
            name = getattr(node, "attr", getattr(node, "name", None))
            if name in OF_LOADERS:
                found.add(f"{node.lineno}: {kind.name}.{name}")
    return found


def test_private_names_of_torch_are_in_one_folder():
    found = {
        f"{path.relative_to(PACKAGE)}:{name}"
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "_torch"
        for name in private_names(path.read_text())
    }
    assert not found
    assert private_names((PACKAGE / "_torch" / "compat.py").read_text()), "and they are there"


@pytest.mark.parametrize(
    "line",
    [
        "from torch._utils import ExceptionWrapper",
        "import torch.utils.data._utils.fetch",
        "from torch.utils.data.dataloader import _BaseDataLoaderIter",
        "torch.library._register_effectful_op('x')",
        "sys.modules.get('torch._inductor.lowering')",
        "class L(DataLoader):\n    def _get_iterator(self): pass",
        "class L(TorchDataLoader[Any]):\n    def f(self): return self._iterator",
        "memory = storage._untyped_storage",
        "picture.view(-1)._values()",
    ],
)
def test_control_private_names_are_seen(line):
    assert private_names(line)


def test_control_public_names_are_not():
    assert not private_names(
        "import torch\nfrom stocache import _C\nfrom torch.utils.data import DataLoader\n"
        "torch.__version__\ntorch.accelerator.is_available()\nself._iterator"
    )
