"""Loaders and trainers that people have, over a cache: what they give is what they give without."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import stocache
import torch
from sources import Fixed
from stocache import _C
from stocache._dataset import samples as module
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EXAMPLES = Path(__file__).parents[2] / "examples" / "ecosystem"


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "cache of its own" not in done.stderr
    return done.stdout


# What the examples print: ranks, hits and loads of all of them together.
SHARED = re.compile(r"2 ranks, 128 hits, 64 loads")


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_ranks_of_lightning_share_one_cache(tmp_path, strategy):
    assert SHARED.search(
        run(sys.executable, EXAMPLES / "lightning_ddp.py", strategy, folder=tmp_path)
    )


def test_ranks_of_accelerate_share_one_cache(tmp_path):
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert SHARED.search(run(*launch, EXAMPLES / "accelerate_loop.py", folder=tmp_path))


@pytest.fixture
def native(monkeypatch):
    """The batches that this process gathered natively."""
    found, finished = [], module.finished

    def noted(*arguments):
        batch = finished(*arguments)
        if batch is not _C.MISS:
            found.append(batch)
        return batch

    monkeypatch.setattr(module, "finished", noted)
    return found


def collating(dataset, *arguments, **options):
    """A loader of torch's whose batches are gathered natively."""
    return DataLoader(dataset, *arguments, collate_fn=stocache.collate, **options)


def test_what_tools_make_of_a_loader_of_torchs_stays_native(cached, native, tmp_path):
    import lightning
    from accelerate import Accelerator
    from torchdata.stateful_dataloader import StatefulDataLoader

    samples = [{"x": torch.full((4,), float(i)), "y": i} for i in range(16)]
    seen = []

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, _index):
            seen.append({name: value.tolist() for name, value in batch.items()})
            return self.layer(batch["x"]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    def accelerated(source, **options):
        loader = DataLoader(source, 4, shuffle=True, **options)
        for batch in Accelerator(cpu=True).prepare(loader):
            seen.append({name: value.tolist() for name, value in batch.items()})

    def stateful(source, **options):
        for batch in StatefulDataLoader(source, 4, shuffle=True, **options):
            seen.append({name: value.tolist() for name, value in batch.items()})

    def trained(source, **options):
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Model(), DataLoader(source, 4, shuffle=True, **options))

    dataset = cached(Fixed(samples))
    for use in (accelerated, stateful, trained):
        for source, options in ((samples, {}), (dataset, {"collate_fn": stocache.collate})):
            torch.manual_seed(3)
            before = len(native)
            use(source, **options)
            assert len(native) - before == (4 if source is dataset else 0)
        assert len(seen) == 8 and seen[:4] == seen[4:]
        seen.clear()


def test_lightning_makes_loaders_anew_and_keeps_the_cache(cached):
    """With a sampler of its own, and of our loader too, though it is a subclass."""
    from lightning.pytorch.utilities import data as lightning_data

    samples = [torch.full((4,), i) for i in range(16)]
    dataset = cached(Fixed(samples))
    for kind in (DataLoader, stocache.DataLoader, collating):
        loader = kind(dataset, 4, shuffle=True)
        sampler = DistributedSampler(dataset, 2, 0, seed=1)
        again = lightning_data._update_dataloader(loader, sampler)
        assert again.dataset is dataset
        expected = list(DataLoader(samples, 4, sampler=sampler))
        for _ in range(2):
            assert all(map(torch.equal, again, expected))
    assert dataset.stats().loads == 8


@pytest.mark.parametrize("kind", [DataLoader, stocache.DataLoader, collating])
def test_prepare_of_accelerate_gives_the_same_batches(cached, kind):
    from accelerate import Accelerator

    samples = [(torch.full((4,), float(i)), i) for i in range(16)]
    dataset = cached(Fixed(samples))
    batches = []
    for source, loader in ((Fixed(samples), DataLoader), (dataset, kind), (dataset, kind)):
        torch.manual_seed(3)
        prepared = Accelerator(cpu=True).prepare(loader(source, 4, shuffle=True))
        batches.append([(x.tolist(), y.tolist()) for x, y in prepared])
    assert batches[0] == batches[1] == batches[2]
    assert dataset.stats().loads == 16 and dataset.stats().hits == 16


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"collate_fn": stocache.collate}])
def test_torchdata_goes_on_in_mid_epoch(cached, workers, options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    samples = [torch.full((4,), i) for i in range(32)]
    seen = []
    for source in (Fixed(samples), cached(Fixed(samples))):
        for _ in range(2):
            torch.manual_seed(2)
            loader = StatefulDataLoader(source, 4, shuffle=True, num_workers=workers, **options)
            iterator = iter(loader)
            first = [next(iterator) for _ in range(3)]
            state = loader.state_dict()
            again = StatefulDataLoader(source, 4, shuffle=True, num_workers=workers, **options)
            again.load_state_dict(state)
            rest = list(again)
            assert len(rest) == 5 and all(map(torch.equal, rest, iterator))
            seen.append(torch.cat([*first, *rest]).tolist())
    assert all(each == seen[0] for each in seen)


def pictures(folder: Path) -> Path:
    for k in range(8):
        path = folder / f"class{k % 2}" / f"{k}.png"
        path.parent.mkdir(exist_ok=True)
        noise = np.random.RandomState(k).randint(256, size=(40, 48, 3), dtype="u1")
        PIL.Image.fromarray(noise).save(path)
    return folder


@pytest.mark.parametrize("training", [True, False])
def test_create_loader_of_timm_gives_the_same_batches(cached, tmp_path, training):
    from timm.data import create_dataset, create_loader

    folder = pictures(tmp_path)
    dataset = cached(create_dataset("folder", root=str(folder)))
    epochs = []
    for source in (create_dataset("folder", root=str(folder)), dataset, dataset):
        loader = create_loader(
            source, (3, 32, 32), 4, is_training=training, use_prefetcher=False, num_workers=1,
            persistent_workers=False,
        )  # fmt: skip
        torch.manual_seed(5)
        epochs.append([(x.clone(), y.clone()) for x, y in loader])
    for epoch in epochs[1:]:
        for (x, y), (wanted, expected) in zip(epoch, epochs[0], strict=True):
            assert torch.equal(x, wanted) and torch.equal(y, expected)
    assert dataset.stats().loads == 8


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 2)
        self.losses = []

    def forward(self, x, labels):
        logits = self.layer(x)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        self.losses.append(loss.item())
        return {"loss": loss, "logits": logits}


def test_the_trainer_of_hugging_face_computes_the_same(cached, tmp_path):
    import datasets
    from transformers import Trainer, TrainingArguments

    table = {
        "x": np.random.RandomState(0).rand(32, 4).tolist(),
        "labels": [i % 2 for i in range(32)],
    }
    rows = datasets.Dataset.from_dict({**table, "unused": ["text"] * 32}).with_format("torch")
    dataset = cached(rows)
    losses = []
    for source in (rows, dataset):
        arguments = TrainingArguments(
            str(tmp_path), num_train_epochs=3, per_device_train_batch_size=8, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True, seed=7,
        )  # fmt: skip
        model = Line()
        Trainer(model, arguments, train_dataset=source).train()
        losses.append(model.losses)
    assert losses[0] == losses[1] and len(losses[0]) == 12
    assert dataset.stats().loads == 32 and dataset.stats().hits == 64


class Opened(Dataset):
    """Opens its file at its first sample, as people do for workers."""

    def __init__(self, kind, path):
        self.kind, self.path, self.file = kind, path, None

    def __len__(self):
        return 48

    def __getitem__(self, i):
        if self.file is None:
            self.file = OPEN[self.kind](self.path)
        return torch.from_numpy(np.array(self.file[i])), i


def open_h5py(path):
    import h5py

    return h5py.File(path)["rows"]


def open_zarr(path):
    import zarr

    return zarr.open(path, mode="r")


class Lmdb:
    def __init__(self, path):
        import lmdb

        self.environment = lmdb.open(str(path), readonly=True, lock=False)

    def __getitem__(self, i):
        with self.environment.begin() as transaction:
            return np.frombuffer(transaction.get(str(i).encode()), "f4")


class Tar:
    """A shard as webdataset writes it, with an index of where its samples begin."""

    def __init__(self, path):
        self.file = tarfile.open(path)  # noqa: SIM115
        self.members = {member.name: member for member in self.file}

    def __getitem__(self, i):
        return np.load(io.BytesIO(self.file.extractfile(self.members[f"{i:06}.npy"]).read()))


OPEN = {"h5py": open_h5py, "zarr": open_zarr, "lmdb": Lmdb, "tar": Tar}


def write(kind, path):
    rows = np.arange(48 * 8, dtype="f4").reshape(48, 8)
    if kind == "h5py":
        import h5py

        with h5py.File(path, "w") as file:
            file["rows"] = rows
    elif kind == "zarr":
        import zarr

        zarr.save_array(str(path), rows)
    elif kind == "tar":
        with tarfile.open(path, "w") as file:
            for i, row in enumerate(rows):
                octets = io.BytesIO()
                np.save(octets, row)
                member = tarfile.TarInfo(f"{i:06}.npy")
                member.size = octets.tell()
                octets.seek(0)
                file.addfile(member, octets)
    else:
        import lmdb

        with lmdb.open(str(path)) as environment, environment.begin(write=True) as transaction:
            for i, row in enumerate(rows):
                transaction.put(str(i).encode(), row.tobytes())
    return rows


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("kind", OPEN)
def test_files_that_each_worker_opens(cached, tmp_path, kind, start):
    path = tmp_path / "rows"
    rows = write(kind, path)
    dataset = cached(Opened(kind, str(path)))
    for _ in range(2):
        loader = DataLoader(dataset, 8, num_workers=2, multiprocessing_context=start)
        found, numbers = map(torch.cat, zip(*loader, strict=True))
        assert torch.equal(found, torch.from_numpy(rows)) and numbers.tolist() == list(range(48))
    assert dataset.dataset.file is None, "nobody opened it in this process"
    assert dataset.stats().loads == 48 and dataset.stats().hits == 48
    dataset.close()


class Augmented(Dataset):
    """Calls its transform by names, as users of albumentations do."""

    def __init__(self, seed):
        import albumentations

        self.loads = 0
        steps = [albumentations.HorizontalFlip(), albumentations.RandomBrightnessContrast()]
        self.transform = albumentations.Compose(steps, seed=seed)

    def __len__(self):
        return 6

    def __getitem__(self, i):
        self.loads += 1
        image = np.random.RandomState(i).randint(256, size=(8, 8, 3), dtype="u1")
        made = self.transform(image=image, mask=image[..., 0])
        return made["image"], made["mask"], i


def test_the_steps_of_albumentations_run_after_the_cache():
    plain, source = Augmented(3), Augmented(3)
    with stocache.CachedDataset.until_random(source, "16MiB", verbose=False) as dataset:
        for _ in range(3):
            for i in range(6):
                for one, other in zip(dataset[i], plain[i], strict=True):
                    assert type(one) is type(other) and np.array_equal(one, other)
        assert dataset.stats().loads == 6 and dataset.stats().unsupported == 0


def test_a_composition_of_albumentations_is_known_by_its_own_fingerprint(cached, tmp_path):
    import albumentations

    class Pictures(Fixed):
        def __init__(self):
            super().__init__([torch.zeros(4)] * 4)
            self.augment = albumentations.Compose([albumentations.HorizontalFlip()])

    name = f"albumentations-{tmp_path.name}"
    cached(Pictures(), name=name, keep=True).close()
    with pytest.raises(ValueError, match=r"augment\S* is a random generator") as caught:
        cached(Pictures(), name=name, keep=True)
    assert "pass fingerprint=" in str(caught.value)
    dataset = cached(Pictures(), name=name, keep=True, fingerprint="v1", on_change="clear")
    dataset[0]
    dataset.close()
    dataset = cached(Pictures(), name=name, keep=True, fingerprint="v1")
    assert dataset.stats().filled == 1
    dataset.delete()
