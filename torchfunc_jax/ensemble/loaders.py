"""``Batches``: what a data loader gives, epoch after epoch, and the position in it, which a
checkpoint keeps; ``Agreement``: that the loaders of several processes go together.

A loader can be iterated over anew for each epoch: torch's DataLoader, torchdata's
StatefulDataLoader, Grain's datasets and loaders, an object of the user's. An iterator of Grain's
may take its place.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy as np
import torch

from bridge import processes
from bridge.checkpoints import CheckpointError

State = dict[str, Any]
# what has a length or can be iterated over, and does not give batches
_NO_LOADERS = (torch.utils.data.Dataset, torch.Tensor, np.ndarray, jax.Array, dict, str, bytes)


class Batches:
    """The batches of a loader, from a position that can be set.

    The position is kept by the loader's ``state_dict`` and ``load_state_dict``; or by its
    iterator's ``get_state`` and ``set_state``; or, where it has neither, by the random states at
    the start of the epoch and the number of batches taken since then, which are loaded again and
    dropped.

    Args:
        loader: what ``fit`` was given.
        whole: the loaders of all processes give the same batches.

    Attributes:
        epoch: which pass over the loader this is, from 0.
        taken: how many batches of this epoch were taken.
        passes: how many passes there can be; infinity but for an iterator.
        waiting: (the trainer's position, the batch that was taken there), which is taken again if
            an error came before its step was done.

    Raises:
        TypeError: it is no loader, or an iterator whose position cannot be kept.
    """

    def __init__(self, loader: Any, whole: bool = True) -> None:
        if isinstance(loader, _NO_LOADERS) or not hasattr(loader, "__iter__"):
            raise TypeError(
                "data: expected a tuple of tensors, or a loader of batches such as a DataLoader, "
                f"got {type(loader).__name__}; a TensorDataset has .tensors"
            )
        self._by_loader = _has(loader, "state_dict", "load_state_dict")
        once = hasattr(loader, "__next__")
        if once and not self._by_loader and not _has(loader, "get_state", "set_state"):
            raise TypeError(
                f"data: the position in a {type(loader).__name__} cannot be kept, because it can "
                "be iterated over only once; pass the loader that it comes from"
            )
        self.loader, self.whole, self.epoch, self.taken = loader, whole, 0, 0
        self.passes = 1 if once else float("inf")
        self.waiting: tuple[int, Any] | None = None
        self._iterator: Any = None  # of this epoch; None: it has not begun
        self._began: State = {}  # the random states at the start of the epoch

    def next(self) -> Any:
        """The next batch; None at the end of an epoch.

        Raises:
            ValueError: the epoch has no batch at all.
        """
        if self._iterator is None:
            self._iterator = self._opened()
        try:
            batch = next(self._iterator)
        except StopIteration:
            if self.taken == 0:
                raise ValueError(
                    f"data: the {type(self.loader).__name__} gave no batch in epoch {self.epoch}"
                ) from None
            self._iterator, self.epoch, self.taken = None, self.epoch + 1, 0
            return None
        self.taken += 1
        return batch

    def _opened(self) -> Iterator[Any]:
        for part in _parts(self.loader):
            if _has(part, "set_epoch"):
                part.set_epoch(self.epoch)
        self._began = _random_states(self.loader)
        return iter(self.loader)

    def state(self) -> State:
        """The position, for ``restore``: a dict of numbers, texts, bytes and tensors, if the
        loader's own state is one.
        """
        own = None
        if self._by_loader:
            if self._iterator is not None or self.epoch:
                own = self.loader.state_dict()
        elif _has(self._iterator, "get_state", "set_state"):
            own = self._iterator.get_state()
        return {
            "loader": type(self.loader).__qualname__,
            "whole": self.whole,
            "epoch": self.epoch,
            "taken": self.taken,
            "open": self._iterator is not None,
            "own": own,
            "began": self._began if self._iterator is not None and own is None else None,
            "random": _random_states(self.loader),
        }

    def restore(self, state: State) -> None:
        """Go on from a position; the random states of this process become what they were there.

        Raises:
            ValueError: the position is one in another kind of loader, or behind this one's end.
        """
        name = type(self.loader).__qualname__
        if state["loader"] != name:
            raise ValueError(
                f"data: the position is one in a {state['loader']}, got a {name}; pass such a "
                "loader, or set data_state = None to begin with the first batch of this one"
            )
        self.epoch, self.taken, own = state["epoch"], state["taken"], state["own"]
        if self._by_loader and own is not None:
            self.loader.load_state_dict(own)
        if state["began"] is not None:
            _set_random_states(self.loader, state["began"])
        if state["open"]:
            self._iterator = self._opened()
            if own is None:
                self._skip(self._iterator)
            elif not self._by_loader:
                self._iterator.set_state(own)
        _set_random_states(self.loader, state["random"])

    def _skip(self, iterator: Iterator[Any]) -> None:
        for i in range(self.taken):
            try:
                next(iterator)
            except StopIteration:
                raise ValueError(
                    f"data: {self.taken} batches of epoch {self.epoch} were taken before, and this "
                    f"{type(self.loader).__name__} has only {i}; pass a loader of the same data"
                ) from None

    def length(self) -> int | None:
        """How many batches an epoch has, if the loader says so."""
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return None


def _has(x: Any, *names: str) -> bool:
    return all(callable(getattr(x, name, None)) for name in names)


# -- random states ---------------------------------------------------------------------------------
def _parts(loader: Any) -> list[Any]:
    """The loader and the parts of a DataLoader that draw numbers or are told the epoch, each
    once.
    """
    batches = getattr(loader, "batch_sampler", None)
    rest = [getattr(loader, name, None) for name in ("sampler", "dataset")]
    every = [loader, batches, getattr(batches, "sampler", None), *rest]
    return list({id(part): part for part in every if part is not None}.values())


def _generators(loader: Any) -> list[torch.Generator]:
    found = (getattr(part, "generator", None) for part in _parts(loader))
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _random_states(loader: Any) -> State:
    """Those of torch, NumPy and Python in this process, and of the loader's generators."""
    kind, keys, *rest = cast("Any", np.random.get_state())
    return {
        "torch": torch.get_rng_state(),
        "numpy": (kind, keys.tolist(), *rest),
        "python": random.getstate(),
        "generators": [g.get_state() for g in _generators(loader)],
    }


def _set_random_states(loader: Any, states: State) -> None:
    generators = _generators(loader)
    if len(generators) != len(states["generators"]):
        raise ValueError(
            f"data: the position is one in a loader with {len(states['generators'])} generators of "
            f"random numbers, got {len(generators)}; pass it a generator as before"
        )
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    for generator, state in zip(generators, states["generators"], strict=True):
        generator.set_state(state)


# -- positions in a checkpoint ---------------------------------------------------------------------
def of_all_processes(state: State | None) -> dict[str, Any] | None:
    """The positions of all processes in their loaders, as JSON has them, of that of this process;
    None without a loader.

    Raises:
        TypeError: the loader's own state has other objects than numbers, texts, bytes and tensors.
    """
    if state is None:
        return None
    written = io.BytesIO()
    torch.save(state, written)
    try:
        torch.load(io.BytesIO(written.getvalue()), weights_only=True)
    except Exception as error:
        raise TypeError(
            f"data: the state of the {state['loader']} cannot be kept in a checkpoint; it may "
            f"have numbers, texts, bytes and tensors alone: {error}"
        ) from error
    own = base64.b85encode(written.getvalue()).decode()
    every = processes.exchange(own, processes.members(None), processes.TIMEOUT, "Checkpoints.save")
    return {"whole": state["whole"], "processes": [every[p] for p in sorted(every)]}


def of_this_process(saved: dict[str, Any] | None) -> State | None:
    """The position of this process, of what ``of_all_processes`` has returned.

    Raises:
        CheckpointError: another number of processes has taken parts of the batches.
    """
    if saved is None:
        return None
    every, count, me = saved["processes"], jax.process_count(), jax.process_index()
    if not saved["whole"] and len(every) != count:
        raise CheckpointError(
            f"the position in the data is one of {len(every)} processes, each of which loads a "
            f"part of the batches, and there are {count}; go on with {len(every)}"
        )
    text = every[me if len(every) == count else 0]
    return torch.load(io.BytesIO(base64.b85decode(text)), weights_only=True)


# -- several processes -----------------------------------------------------------------------------
class Agreement:
    """The loaders of several processes go together: those of one part give the same batches, and
    all have the same number of them.

    Args:
        part: which part of each batch this process loads; 0 if it loads whole ones.
    """

    def __init__(self, part: int) -> None:
        self.part, self.epoch, self.sized = part, -1, False

    def check(self, batches: Batches, batch: Any) -> None:
        """Compare a batch, or the end of an epoch, with those of the other processes: at the first
        batch of an epoch, and at all others if a loader has no length.

        Raises:
            ValueError: they do not go together.
        """
        new = batch is not None and self.epoch != batches.epoch
        if jax.process_count() == 1 or (self.sized and not new):
            return
        self.epoch = batches.epoch if new else self.epoch
        mine = [batch is None, batches.length(), self.part, _digest(batch) if new else None]
        told = processes.exchange(
            json.dumps(mine), processes.members(None), processes.TIMEOUT, "Trainer.fit"
        )
        every = [json.loads(told[p]) for p in sorted(told)]
        ended, lengths, parts, digests = map(list, zip(*every, strict=True))
        self.sized = None not in lengths
        if len(set(lengths)) > 1:
            raise ValueError(
                "data: expected loaders with the same number of batches in all processes, got the "
                f"lengths {lengths} in processes 0, 1, ..."
            )
        if len(set(ended)) > 1:
            first_to_end = processes.named(p for p, end in enumerate(ended) if end)
            raise ValueError(
                "data: expected loaders with the same number of batches in all processes, and "
                f"that of {first_to_end} has fewer"
            )
        for p, (part, digest) in enumerate(zip(parts, digests, strict=True)):
            first = parts.index(part)
            if digests[first] != digest:
                raise ValueError(
                    f"data: processes {first} and {p} must load the same rows of each batch, and "
                    f"they differ in epoch {batches.epoch}; give their loaders one seed, and with "
                    "whole_batches=False the part that Trainer.batch_part says"
                )


def copied(x: Any) -> Any:
    """A tensor or array of a batch with memory of its own; jax.Arrays do not change."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    return x.copy() if isinstance(x, np.ndarray) else x


def _digest(batch: Any) -> str:
    """Of the tensors and NumPy arrays; a jax.Array may be kept by all processes together."""
    found = hashlib.blake2b(digest_size=16)
    for x in jax.tree.leaves(batch):
        if isinstance(x, jax.Array):
            continue
        if isinstance(x, torch.Tensor):
            x = x.detach().cpu()
            x = x.reshape(-1).contiguous().view(torch.uint8).numpy()
        found.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
