"""Checkpoints of a training run, written by Orbax while training goes on, by each process what its
devices keep; SIGTERM saves and ends.

A checkpoint is the trainer's state by the leaves' names, with the position in the data: the number
of batches, and where the loader of each process is. It is read into the shardings that the trainer
has now, whatever the mesh and the number of processes that wrote it. Of what all members share it
has a digest alone: the trainer that goes on has it already, and another base is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from bridge import private_jax
from bridge.checkpoints import CheckpointError, escaped
from bridge.errors import public_methods
from torchfunc_jax.ensemble import loaders

__all__ = ["Checkpoints", "Preempted"]


class Preempted(SystemExit):
    """SIGTERM came during training; the checkpoint is written, and the program ends with code 143
    unless it catches this.

    Attributes:
        position: of the checkpoint.
    """

    def __init__(self, position: int) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.position = position


class _Trainer(Protocol):
    """What of a ``Trainer`` is kept: its ``TrainState``, how many batches it has taken, and where
    it is in those of a loader.
    """

    state: Any
    position: int
    data_state: dict[str, Any] | None


@public_methods
class Checkpoints:
    """The checkpoints of one run in a folder; ``Trainer.fit(..., checkpoint=...)`` restores the
    newest, and saves.

    With several processes the folder is one that all of them see, and each of them makes the same
    calls. A checkpoint whose writing was cut short is never taken for one.

    Args:
        folder: made where it is missing.
        every: batches between two checkpoints; 0: only at the end and at SIGTERM.
        keep: how many of the newest remain.

    Raises:
        ImportError: Orbax is not installed.
        ValueError: every is negative, or keep is not positive.

    Source: https://orbax.readthedocs.io

    Example:
        >>> import tempfile, torch
        >>> from torchfunc_jax.ensemble import Checkpoints, Ensemble, Trainer
        >>> trainer = Trainer(
        ...     Ensemble(lambda: torch.nn.Linear(3, 1), 4), torch.nn.functional.mse_loss
        ... )
        >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        ...     checkpoints.save(trainer, wait=True)
        ...     checkpoints.steps, checkpoints.restore(trainer)
        ([0], 0)
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int = 100, keep: int = 3) -> None:
        if every < 0:
            raise ValueError(f"every: expected a number of batches, or 0, got {every}")
        if keep < 1:
            raise ValueError(f"keep: expected a positive number of checkpoints, got {keep}")
        try:
            import orbax.checkpoint
        except ImportError:
            raise ImportError(
                "Checkpoints: Orbax is not installed; pip install 'torchfunc-jax[checkpoints]'"
            ) from None
        self.folder, self.every = Path(folder).absolute(), every
        self._orbax = orbax.checkpoint
        options = self._orbax.CheckpointManagerOptions(
            max_to_keep=keep,
            create=True,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
        )
        self._manager = self._orbax.CheckpointManager(self.folder, options=options)
        # what all members share, with its digest
        self._known: dict[str, tuple[jax.Array, str]] = {}

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        # after an error another process may be gone, for which this would wait
        if kind is None or issubclass(kind, Preempted):
            self.close()

    @property
    def steps(self) -> list[int]:
        """The positions of the checkpoints, in order,
        when those that are being written are whole.
        """
        self.wait()
        return sorted(self._manager.all_steps())

    def save(self, trainer: _Trainer, wait: bool = False) -> None:
        """Save the trainer's state at its position; an older checkpoint of that position stays.

        It returns when the values are copied, and training may go on while they are written; an
        error in writing is raised by the next call.

        Args:
            trainer: whose state and position are kept.
            wait: return when the checkpoint is written.
        """
        if trainer.position not in self._manager.all_steps():
            named = _named(trainer.state)
            described = {name: [x.dtype.name, list(x.shape)] for name, x in named.items()}
            about = {
                "position": trainer.position,
                "leaves": described,
                "shared": self._digests(trainer.state.shared),
                "data": loaders.of_all_processes(trainer.data_state),
            }
            args = self._orbax.args
            self._manager.save(
                trainer.position,
                force=True,
                args=args.Composite(
                    state=args.StandardSave(
                        {escaped(name): x for name, x in named.items() if x.size}
                    ),
                    about=args.JsonSave(about),
                ),
            )
        if wait:
            self.wait()

    def restore(self, trainer: _Trainer, step: int | None = None) -> int | None:
        """Put a checkpoint into the trainer, with the shardings that its state has now.

        Args:
            trainer: whose state and position are set.
            step: the position of the checkpoint; None: of the newest.

        Returns:
            The position; None if there is no checkpoint, and the trainer is as it was.

        Raises:
            CheckpointError: (a RuntimeError) there is no such checkpoint, it is damaged, or of an
                ensemble with other names or shapes.
        """
        steps = self.steps
        if step is None and not steps:
            return None
        found = steps[-1] if step is None else step
        if found not in steps:
            raise CheckpointError(
                f"{self.folder}: there is no checkpoint of step {step}, but of {steps or 'none'}"
            )
        args = self._orbax.args
        try:
            about = self._manager.restore(found, args=args.Composite(about=args.JsonRestore()))[
                "about"
            ]
            state = _grown(trainer.state, about["leaves"])
            here = _named(state)
            _check(about["leaves"], here)
            _check_shared(about.get("shared", {}), self._digests(state.shared))
            data = loaders.of_this_process(about.get("data"))
            like = {
                escaped(name): jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
                for name, x in here.items()
                if x.size
            }
            arrays = self._manager.restore(
                found, args=args.Composite(state=args.StandardRestore(like))
            )["state"]
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}, step {found}: {error}") from None
        except Exception as error:
            # Orbax and tensorstore raise classes of many kinds for a damaged file
            raise CheckpointError(
                f"{self.folder}, step {found}: damaged: {type(error).__name__}: {error}"
            ) from error
        leaves = [arrays[escaped(name)] if x.size else x for name, x in here.items()]
        trainer.state = dataclasses.replace(
            jax.tree.unflatten(_structure(state), leaves), shared=state.shared
        )
        trainer.position, trainer.data_state = about["position"], data
        return found

    def _digests(self, shared: dict[str, jax.Array]) -> dict[str, str]:
        """A digest of each array that all members share, computed once: no step changes them."""
        for name, x in shared.items():
            if self._known.get(name, (None,))[0] is not x:
                self._known[name] = x, _digest(x)
        return {name: self._known[name][1] for name in shared}

    def wait(self) -> None:
        """Return when all checkpoints are written; an error in writing them is raised here."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """``wait``, and end Orbax's threads."""
        self._manager.close()

    @contextlib.contextmanager
    def training(self, trainer: _Trainer) -> Iterator[Callable[[], None]]:
        """What ``Trainer.fit`` enters: the newest checkpoint is restored if it is ahead, and
        SIGTERM saves and ends.

        While entered, SIGTERM waits for the next call of the function; what handled it before is
        called after the checkpoint is written. With ``jax.distributed`` the processes agree on the
        batch after which they all end, whichever of them gets the signal; JAX handles it. At the
        end the state is saved once more.

        Returns:
            A context manager of a function without arguments, to be called after each batch. It
                raises ``Preempted``.

        Example:
            >>> import tempfile, torch
            >>> from torchfunc_jax.ensemble import Checkpoints, Ensemble, Trainer
            >>> trainer = Trainer(
            ...     Ensemble(lambda: torch.nn.Linear(3, 1), 4), torch.nn.functional.mse_loss
            ... )
            >>> with (
            ...     tempfile.TemporaryDirectory() as folder,
            ...     Checkpoints(folder, every=10) as checkpoints,
            ... ):
            ...     with checkpoints.training(trainer) as stepped:
            ...         while trainer.position < 25:
            ...             _ = trainer.step(torch.ones(8, 3), torch.ones(8, 1))
            ...             trainer.position += 1
            ...             stepped()
            ...     checkpoints.steps
            [10, 20, 25]
        """
        if self.steps and self.steps[-1] > trainer.position:
            self.restore(trainer)
        signals = _Signals()

        def stepped() -> None:
            if signals.preempted(trainer.position):
                self.save(trainer, wait=True)
                signals.passed_on()
                raise Preempted(trainer.position)
            if self.every and trainer.position % self.every == 0:
                self.save(trainer)

        with signals:
            yield stepped
            self.save(trainer, wait=True)
            if signals.came:  # after the last batch
                signals.passed_on()
                raise Preempted(trainer.position)


class _Signals:
    """SIGTERM while training."""

    def __init__(self) -> None:
        self.came: tuple[int, Any] | None = None
        self.before: Any = None
        # then JAX handles the signal and tells all processes
        self.agreed = private_jax.coordinator() is not None

    def __enter__(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        # a handler that is not Python's could not be put back, and a process that ignores the
        # signal goes on ignoring it
        if (
            not self.agreed
            and threading.current_thread() is threading.main_thread()
            and before not in (None, signal.SIG_IGN)
        ):
            self.before = before
            signal.signal(signal.SIGTERM, self.note)

    def note(self, number: int, frame: Any) -> None:
        self.came = (number, frame)

    def preempted(self, position: int) -> bool:
        if self.agreed:
            return multihost_utils.reached_preemption_sync_point(position)
        return self.came is not None

    def passed_on(self) -> None:
        if callable(self.before):
            self.before(*self.came)

    def __exit__(self, *_: Any) -> None:
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)


# -- names -----------------------------------------------------------------------------------------
def _named(state: Any) -> dict[str, jax.Array]:
    """The leaves by name, in their order, without what all members share."""
    own = jax.tree_util.tree_flatten_with_path(dataclasses.replace(state, shared={}))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in own}


def _structure(state: Any) -> Any:
    """The tree whose leaves ``_named`` has."""
    return jax.tree.structure(dataclasses.replace(state, shared={}))


def _digest(x: jax.Array) -> str:
    values = np.ascontiguousarray(x.addressable_data(0)).reshape(-1)
    return hashlib.blake2b(values.view(np.uint8).data, digest_size=16).hexdigest()


def _grown(state: Any, saved: dict[str, Any]) -> Any:
    """The state with the copies of its parameters that the saved one had, and that a new trainer
    begins without.
    """

    def like(field: str) -> dict[str, jax.Array]:
        return {name: x for name, x in state.params.items() if f"{field}.{name}" in saved}

    copies = {
        field: like(field) for field in ("average", "best_params") if not getattr(state, field)
    }
    return dataclasses.replace(state, **copies)


def _check(saved: dict[str, Any], here: dict[str, jax.Array]) -> None:
    if saved.keys() != here.keys():
        missing, more = sorted(here.keys() - saved.keys()), sorted(saved.keys() - here.keys())
        raise CheckpointError(
            f"it lacks {missing or 'nothing'} that the trainer has, and has {more or 'nothing'} "
            "that the trainer lacks"
        )
    for name, x in here.items():
        dtype, shape = saved[name]
        if dtype != x.dtype.name or shape != list(x.shape):
            raise CheckpointError(
                f"{name!r} is {dtype}{shape} in it and {x.dtype.name}{list(x.shape)} in the "
                "trainer; give the trainer the members, modules and optimizer that it was saved "
                "with"
            )


def _check_shared(saved: dict[str, str], here: dict[str, str]) -> None:
    if saved.keys() != here.keys():
        raise CheckpointError(
            f"its members share {sorted(saved) or 'nothing'}, the trainer's share "
            f"{sorted(here) or 'nothing'}; make both with one shared="
        )
    if unlike := next((name for name in here if here[name] != saved[name]), None):
        raise CheckpointError(
            f"{unlike!r}, which all members share, has other values in the trainer; make its "
            "members from the same base"
        )
