"""Where ``fit`` logs the members' metrics: ``JsonLines``, ``TensorBoard``, ``Wandb``, or any object
with ``log`` and ``close``, which is what a ``Sink`` is.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from bridge.errors import public_methods
from torchfunc_jax.ensemble.meshes import gathered

__all__ = ["JsonLines", "Sink", "TensorBoard", "Wandb"]


@runtime_checkable
class Sink(Protocol):
    """What ``Trainer.fit`` needs of ``sinks``. With several processes each of them passes sinks,
    and those of process 0 are called alone.

    An object may also have a method ``begin(step)``, which is called before the first step of a
    ``fit`` with the position where it begins: what was logged of later steps comes again.

    Example:
        >>> import torch
        >>> from torchfunc_jax.ensemble import Ensemble, Sink, Trainer
        >>> class Printed:
        ...     def log(self, step, metrics):
        ...         print(step, {name: getattr(x, "shape", ()) for name, x in metrics.items()})
        ...
        ...     def close(self):
        ...         print("closed")
        >>> isinstance(Printed(), Sink)
        True
        >>> trainer = Trainer(
        ...     Ensemble(lambda: torch.nn.Linear(3, 1), 4), torch.nn.functional.mse_loss
        ... )
        >>> data = torch.randn(40, 3), torch.randn(40, 1)
        >>> losses = trainer.fit(data, batch_size=10, sinks=Printed(), log_every=2)
        2 {'loss': (4,), 'steps_per_second': ()}
        4 {'loss': (4,), 'steps_per_second': ()}
        closed
    """

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take metrics.

        Args:
            step: the trainer's position: how many batches it has taken.
            metrics: name -> a float, or an array [n] with a number of each member. ``fit`` logs
                "loss" (before this step) and "steps_per_second" at each ``log_every``-th position,
                and "validation_loss" at the end of an epoch.
        """

    def close(self) -> None:
        """Write what is not written; called at the end of ``fit``, also after an error. A later
        ``log`` goes on.
        """


class Log:
    """What ``fit`` says to sinks, in all processes; a sink that fails is named.

    Args:
        sinks: one or several.
        every: steps between two logs of the loss.
    """

    def __init__(self, sinks: Sink | Iterable[Sink], every: int) -> None:
        given = [sinks] if isinstance(sinks, Sink) else list(sinks)
        for sink in given:
            if not isinstance(sink, Sink):
                raise TypeError(
                    "sinks: expected objects with the methods log(step, metrics) and close(), got "
                    f"a {type(sink).__name__}"
                )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"log_every: expected a positive number of steps, got {every!r}")
        self.wanted, self.every = bool(given), every
        self.sinks = given if jax.process_index() == 0 else []
        self.at, self.since = 0, 0.0

    @contextlib.contextmanager
    def open(self, position: int) -> Iterator[None]:
        """While entered, sinks are logged to; afterwards they are closed."""
        self.at, self.since = position, time.perf_counter()
        with contextlib.ExitStack() as stack:
            for sink in self.sinks:
                stack.callback(self._call, sink, "close", f"after step {position}")
            for sink in self.sinks:
                if hasattr(sink, "begin"):
                    self._call(sink, "begin", f"at step {position}", position)
            yield

    def step(self, position: int, losses: jax.Array) -> None:
        """Log the losses of a step, if it is time to."""
        if self.wanted and position % self.every == 0:
            found, now = gathered(losses), time.perf_counter()
            speed = (position - self.at) / (now - self.since)
            self.at, self.since = position, now
            self.metrics(position, {"loss": found, "steps_per_second": speed})

    def metrics(self, position: int, metrics: Mapping[str, Any]) -> None:
        """Log metrics, which are on the host."""
        for sink in self.sinks:
            self._call(sink, "log", f"at step {position}", position, metrics)

    @staticmethod
    def _call(sink: Sink, method: str, when: str, *args: Any) -> None:
        try:
            getattr(sink, method)(*args)
        except Exception as error:
            raise RuntimeError(
                f"sinks: {type(sink).__name__}.{method} failed {when}: "
                f"{type(error).__name__}: {error}"
            ) from error


@public_methods
class JsonLines:
    """A file with a line of JSON for each call: {"step": 10, "loss": [...], ...}; a number that is
    not finite is null.

    The file is written line by line. A run that goes on from a checkpoint takes out the lines of
    later steps, which it logs again, so that the file is that of one run.

    Args:
        path: of the file; its folder is made where it is missing.

    Raises:
        ValueError: the file is there already and is no such log.

    Source: https://jsonlines.org

    Example:
        >>> import json, pathlib, tempfile
        >>> from torchfunc_jax.ensemble import JsonLines
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sink = JsonLines(f"{folder}/log.jsonl")
        ...     sink.log(10, {"loss": [0.5, 0.25]})
        ...     sink.close()
        ...     json.loads(pathlib.Path(folder, "log.jsonl").read_text())
        {'step': 10, 'loss': [0.5, 0.25]}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: Any = None
        self._there: set[tuple[Any, ...]] = set()  # step and names of the lines of an earlier run

    def begin(self, step: int) -> None:
        """Take out the lines of later steps, and a last one that was cut short."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        kept, self._there = [], set()
        for i, line in enumerate(lines):
            try:
                found = json.loads(line)
                earlier = found["step"] <= step
            except (ValueError, TypeError, KeyError):
                if i == len(lines) - 1 > 0:
                    continue
                raise ValueError(
                    f"{self.path}: line {i + 1} is not one of a log; give another file"
                ) from None
            if earlier:
                kept.append(line)
                self._there.add((found["step"], *sorted(found.keys() - {"step"})))
        if kept != lines:
            partly = self.path.with_name(f"{self.path.name}.tmp")
            partly.write_text("".join(f"{line}\n" for line in kept))
            os.replace(partly, self.path)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write a line, unless an earlier run has written it; as ``Sink.log``."""
        if (step, *sorted(metrics)) in self._there:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a")
        values = {name: _json(np.asarray(x)) for name, x in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; a later ``log`` goes on with it."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _json(x: np.ndarray) -> Any:
    return np.where(np.isfinite(x), x.astype(object), None).tolist()


@public_methods
class TensorBoard:
    """TensorBoard's event files: a curve of each of the first members, "loss/0", "loss/1", ..., and
    a histogram of all that are finite.

    Args:
        folder: where the files go; a run that goes on from a checkpoint hides what another one has
            logged of later steps there.
        members: how many have a curve.

    Raises:
        ImportError: TensorBoard is not installed.

    Source: ``torch.utils.tensorboard.SummaryWriter``

    Example:
        >>> from torchfunc_jax.ensemble import TensorBoard
        >>> sink = TensorBoard("runs/first", members=8)  # doctest: +SKIP
        >>> trainer.fit(data, epochs=10, sinks=sink)  # doctest: +SKIP
    """

    def __init__(self, folder: str | os.PathLike[str], members: int = 32) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError("TensorBoard: it is not installed; pip install tensorboard") from None
        self.folder, self.members = Path(folder), members
        self._make = SummaryWriter
        self._writer: Any = None
        self._begin: int | None = None

    def begin(self, step: int) -> None:
        """Hide what was logged of later steps."""
        self._begin = step + 1

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics; as ``Sink.log``."""
        if self._writer is None:
            self._writer = self._make(os.fspath(self.folder), purge_step=self._begin)
        for name, value in _curves(metrics, self.members).items():
            self._writer.add_scalar(name, value, step)
        for name, values in _finite(metrics).items():
            self._writer.add_histogram(name, values, step)

    def close(self) -> None:
        """Write the files; a later ``log`` begins another one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@public_methods
class Wandb:
    """A run of Weights & Biases: a curve of each of the first members, "loss/0", "loss/1", ..., and
    a histogram of all that are finite.

    Args:
        run: one that ``wandb.init`` has returned, which is not finished here; None: one is begun at
            the first log.
        members: how many have a curve.
        options: of ``wandb.init``. A run that goes on from a checkpoint needs ``id`` and
            ``resume``.

    Raises:
        ImportError: wandb is not installed.

    Source: https://docs.wandb.ai/ref/python

    Example:
        >>> from torchfunc_jax.ensemble import Wandb
        >>> sink = Wandb(project="ensembles")  # doctest: +SKIP
        >>> trainer.fit(data, epochs=10, sinks=sink)  # doctest: +SKIP
    """

    def __init__(self, run: Any = None, members: int = 32, **options: Any) -> None:
        try:
            import wandb
        except ImportError:
            raise ImportError("Wandb: it is not installed; pip install wandb") from None
        self.run, self.members = run, members
        self._wandb, self._options, self._own = wandb, options, run is None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics; as ``Sink.log``."""
        if self.run is None:
            self.run = self._wandb.init(**self._options)
        histograms = {name: self._wandb.Histogram(x) for name, x in _finite(metrics).items()}
        self.run.log(_curves(metrics, self.members) | histograms, step=step)

    def close(self) -> None:
        """Finish the run, if it was begun here."""
        if self._own and self.run is not None:
            self.run.finish()
            self.run = None


def _curves(metrics: Mapping[str, Any], members: int) -> dict[str, float]:
    """Each number by itself: of an array those of the first members, by their indices."""
    found: dict[str, float] = {}
    for name, x in metrics.items():
        values = np.asarray(x)
        if values.ndim == 0:
            found[name] = float(values)
        else:
            found |= {f"{name}/{i}": float(value) for i, value in enumerate(values[:members])}
    return found


def _finite(metrics: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The finite numbers of each array, where there are some."""
    arrays = {name: np.asarray(x) for name, x in metrics.items() if np.ndim(x) > 0}
    found = {name: x[np.isfinite(x)] for name, x in arrays.items()}
    return {name: x for name, x in found.items() if x.size}
