"""``Window``: a trace of some steps of training, by JAX's profiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax


class Window:
    """The steps that are traced; in process 0 alone.

    Args:
        given: (first, last, folder): the numbers of the first and of the last step, counted from 1,
            and where the trace goes; None: no step.
    """

    def __init__(self, given: tuple[int, int, str | os.PathLike[str]] | None) -> None:
        if given is None:
            given = 1, 0, ""
        elif not (
            isinstance(given, tuple | list)
            and len(given) == 3
            and all(isinstance(step, int) for step in given[:2])
            and 1 <= given[0] <= given[1]
        ):
            raise ValueError(
                "profile: expected (first step, last step, folder), with steps counted from 1, got "
                f"{given!r}"
            )
        self.first, self.last, self.folder = given
        self.open = False

    def run(self, number: int, step: Callable[..., jax.Array], *args: Any) -> jax.Array:
        """What a step returns, which is traced if its number is in the window."""
        if not self.first <= number <= self.last or jax.process_index() > 0:
            return step(*args)
        if not self.open:
            jax.profiler.start_trace(os.fspath(self.folder))
            self.open = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            losses = step(*args)
        if number == self.last:
            jax.block_until_ready(losses)
            self.close()
        return losses

    def close(self) -> None:
        """End the trace, if training ends in the window."""
        if self.open:
            self.open = False
            jax.profiler.stop_trace()


__all__ = ["Window"]
