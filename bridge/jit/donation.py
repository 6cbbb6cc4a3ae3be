"""Donated torch tensors: a program writes its results into the memory of arguments that are results
of programs themselves.

XLA writes into the memory of its own arrays only; that of torch's it copies before. So the first
call of ``state = step(state)`` copies the state, and further calls write in place. A tensor that
the function itself writes to has the result's memory then; the others are empty.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from bridge.jit.program import PACK_SIZE, Program
from bridge.process import process
from bridge.programs import closure_scan


class Donation:
    """One call that is given the arrays of donated arguments.

    Attributes:
        values: what the program takes, with these arrays.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        values: Sequence[Any],
        donated: Sequence[int],
        in_place: bool,
    ) -> None:
        """inputs: the program's tensors; values: their arrays; donated: which of them are;
        in_place: whether arrays may be given.
        """
        self.values, self.given = list(values), dict[int, tuple[torch.Tensor, jax.Array]]()
        self.donated = [inputs[k] for k in donated]
        memory = Counter(t.untyped_storage().data_ptr() for t in inputs)
        for k, t in zip(donated, self.donated, strict=True):
            if memory[t.untyped_storage().data_ptr()] > 1:
                self.values[k] = np.array(values[k])  # the other input may be the same array
            elif in_place and (array := _owner(t, values[k])) is not None:
                self.given[array.unsafe_buffer_pointer()] = t, array
                self.values[k] = array

    def ran(self, arrays: Sequence[jax.Array]) -> None:
        """Keep the memory of what was given as long as there are tensors in it: it belongs to some
        of these arrays, the results.
        """
        for array in arrays if self.given else ():
            if array.size and (before := self.given.get(array.unsafe_buffer_pointer())):
                key = id(before[1])
                process.heirs[key] = (
                    weakref.ref(before[1], functools.partial(process.heirs.pop, key)),
                    array,
                )

    def finish(self) -> None:
        """Empty the arguments in whose memory other results are, when the results and what is
        written have been taken.
        """
        for t in self.donated:
            process.arrays.pop(id(t), None)  # JAX does not take an array twice
        for t, array in self.given.values():
            found = process.owners.get(id(t))
            if array.is_deleted() and (found is None or found[1] is array):
                t.data = t.new_empty(0)


def own(t: torch.Tensor, array: jax.Array) -> None:
    """Remember that a tensor's memory is an array's,
    so that the array can be donated in its place.
    """
    if array.size and array.platform() == "cpu" and t.data_ptr() == array.unsafe_buffer_pointer():
        process.owners[id(t)] = weakref.ref(t, functools.partial(process.owners.pop, id(t))), array


def take_over(t: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a donated tensor has a value's memory from now on, instead of being written to."""
    if t._is_view() or not t.is_contiguous() or value.requires_grad:
        return False
    if t.data_ptr() != value.data_ptr():
        t.data = value
    if id(value) in process.owners:
        own(t, process.owners[id(value)][1])
    return True


def within(objects: Sequence[Any], program: Program) -> tuple[int, ...]:
    """The inputs of a program that are captured tensors in some objects, that it writes to, and
    that are too large to be packed.
    """
    inside = closure_scan.scan(*objects, deeper=True).tensors if objects else {}
    invars = program.jaxpr.jaxpr.invars
    first = len(invars) - 1 - len(program.numbers) - len(program.places)
    large = [
        i for i in program.written if i >= first and math.prod(invars[i].aval.shape) > PACK_SIZE
    ]
    return tuple(i for i in large if id(program.places[i - first].get()) in inside)


def _owner(t: torch.Tensor, crossed: Any) -> jax.Array | None:
    """The array whose memory a tensor is, if it can be given to a program in the place of
    ``crossed``, which stands for the tensor.
    """
    found = process.owners.get(id(t))
    if (
        found is None
        or found[0]() is not t
        or t._is_view()
        or not isinstance(crossed, jax.Array)
        or found[1].is_deleted()
    ):
        return None
    array = found[1]
    same = (
        array.unsafe_buffer_pointer() == crossed.unsafe_buffer_pointer()
        and array.sharding == crossed.sharding
    )
    return array if same and array.shape == crossed.shape and array.dtype == crossed.dtype else None
