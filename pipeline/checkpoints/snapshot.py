"""What one rank will write in a save: DeepSpeed's shards, collected instead of written, and further files."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.checkpoint.ds_to_universal import dp_index_to_str
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from pipeline.checkpoints.files import WrittenFile, copy_file, sync_existing, write_bytes
from pipeline.checkpoints.manifest import TrainState
from pipeline.checkpoints.torch_file import PickledObject
from pipeline.engine.deepspeed_patches import saving_into
from pipeline.engine.engine import TrainEngine

STATE_KEY = "train_state"


def random_state_file(rank: int) -> str:
    """The file of a rank's random generators."""
    return f"random_rank_{rank:05d}.pt"


@dataclass
class PlannedFiles:
    """The files of one rank, by name, before they are written.

    Attributes:
        torch_files: Written from memory.
        copies: Written from other files, which change as training goes on.
        texts: Written as they are.
        present: In the folder already, to be brought to the disk.
    """

    torch_files: dict[str, PickledObject] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    present: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """What they will take on the disk, from above."""
        return (
            sum(file.bytes for file in self.torch_files.values())
            + sum(source.stat().st_size for source in self.copies.values())
            + sum(len(text) for text in self.texts.values())
        )

    def write(self, folder: Path) -> list[WrittenFile]:
        """Write all of them; on the disk when this returns.

        Raises:
            OSError: one cannot be written; it is named.
        """
        written = [file.write(folder, name) for name, file in self.torch_files.items()]
        written += [copy_file(source, folder, name) for name, source in self.copies.items()]
        written += [write_bytes(folder, name, text) for name, text in self.texts.items()]
        return written + [sync_existing(folder, name) for name in self.present]


class SnapshotMemory:
    """Memory on the host for the values of one moment, used again by the next save.

    It takes as many bytes as this rank's files have and keeps them: fresh memory costs several times what the
    copying costs. Copies from a GPU go to page-locked memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], torch.UntypedStorage] = {}

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes() for buffer in self._buffers.values())

    def copy(self, files: Mapping[str, PickledObject]) -> None:
        """Replace the storages of `files`, by name, with copies, so that training may change the tensors;
        complete when this returns.

        Raises:
            MemoryError, RuntimeError: there is no memory for them.
        """
        streams = set()
        for name, file in files.items():
            copies = {}
            for key, storage in file.storages.items():
                copies[key] = self._buffer((name, key), storage)
                copies[key].copy_(storage, non_blocking=True)
                if storage.device.type == "cuda":
                    streams.add(torch.cuda.current_stream(storage.device))
            file.storages = copies
        for stream in streams:
            stream.synchronize()

    def _buffer(self, key: tuple[str, str], storage: torch.UntypedStorage) -> torch.UntypedStorage:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.nbytes() != storage.nbytes():
            pinned = storage.device.type == "cuda"
            fresh = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=pinned)
            buffer = self._buffers[key] = fresh.untyped_storage()
        return buffer


class _Collector(CheckpointEngine):
    """Takes what DeepSpeed would write, in place of its checkpoint engine."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.name = "Collector"
        self.folder = folder
        self.files: dict[str, PickledObject] = {}

    def save(self, state_dict: Any, path: str) -> None:
        self.files[Path(path).relative_to(self.folder).as_posix()] = PickledObject(state_dict)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """The folder is made when a file is written."""

    def create(self, info: Any) -> None:
        raise NotImplementedError("only files are taken from DeepSpeed")

    def load(self, path: str, map_location: Any = None) -> Any:
        raise NotImplementedError("nothing is read during a save")

    def commit(self, info: Any) -> bool:
        raise NotImplementedError("only files are taken from DeepSpeed")


def plan_shards(
    engine: TrainEngine, state: TrainState, partial: Path, writes_weights: bool | None = None
) -> PlannedFiles:
    """DeepSpeed's files of this rank, and the state of its random generators. Nothing is written.

    Its weights are among them on the first replica, as DeepSpeed has it, or as `writes_weights` says.

    It does what `DeepSpeedEngine.save_checkpoint` does, without its barriers: a rank that fails between them
    would leave the others waiting. The one collective that is needed, ZeRO 3's gathering of small parameters
    after a save, comes whatever fails before.
    """
    deepspeed, collector = engine.deepspeed, _Collector(partial)
    planned = PlannedFiles(torch_files=collector.files)
    with saving_into(deepspeed, collector, writes_weights), _zero_3_whole_shards(deepspeed):
        deepspeed._save_checkpoint(str(partial.parent), partial.name, client_state={STATE_KEY: asdict(state)})
        if deepspeed.save_zero_checkpoint:
            deepspeed._save_zero_checkpoint(str(partial.parent), partial.name)
        if deepspeed.zero_nvme_offload_optimizer():
            planned.copies = _swapped_state(engine)
    planned.torch_files[random_state_file(engine.parallel.rank)] = PickledObject(random_state())
    return planned


@contextlib.contextmanager
def _zero_3_whole_shards(deepspeed: Any) -> Iterator[None]:
    """Inside, ZeRO 3's parameters are partitioned, all of them."""
    optimizer = deepspeed.optimizer
    if not deepspeed._optimizer_has_ckpt_event_prologue():
        yield
        return
    optimizer.checkpoint_event_prologue()
    try:
        yield
    finally:
        optimizer.checkpoint_event_epilogue()


def _swapped_state(engine: TrainEngine) -> dict[str, Path]:
    """Optimizer state on NVMe drives, under the names by which DeepSpeed finds it again."""
    source = Path(engine.deepspeed.optimizer.optimizer_swapper.swap_folder)
    folder = f"offloaded_tensors/rank{dp_index_to_str(engine.parallel.rank)}"
    files = (file for file in source.rglob("*") if file.is_file() and "gradient" not in file.name)
    return {f"{folder}/{file.relative_to(source).as_posix()}": file for file in files}


def random_state() -> dict[str, Any]:
    """The state of every random generator of this process, as plain values and tensors."""
    kind, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(folder: Path | None, seed: int, rank: int) -> None:
    """Set the generators of this process as the checkpoint in `folder` has them, else from the seed.

    A new start has no checkpoint, and one that fewer ranks saved has nothing for this rank. The weights, the
    order of samples and dropout do not come from these generators, but from functions of the seed.
    """
    path = None if folder is None else folder / random_state_file(rank)
    if path is None or not path.exists():
        own = seed * 2**20 + rank  # ranks draw different numbers
        random.seed(own)
        np.random.seed(own % 2**32)
        torch.manual_seed(own % 2**63)
        return
    state = torch.load(path, weights_only=True)
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
