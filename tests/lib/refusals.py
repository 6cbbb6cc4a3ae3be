"""PyTorch's database of inputs that its operators refuse: op_db's error_inputs,
on dense tensors.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree


@dataclasses.dataclass
class Refusing:
    """An operator of the database that has inputs to refuse."""

    op: Any

    @property
    def full_name(self) -> str:
        return self.op.name + ("." + self.op.variant_test_name if self.op.variant_test_name else "")

    def refused(self) -> Iterator[tuple[Callable[..., Any], list[torch.Tensor], Exception]]:
        """A function of tensors, tensors that it refuses, and PyTorch's error."""
        for error in self.op.error_inputs("cpu"):
            sample = error.sample_input
            leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
            tensors = [leaves[i].detach() for i in places]
            # tensors that share memory are several inputs to a transform, each with memory of its
            # own
            memory = {t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided}
            if any(t.layout is not torch.strided or t.is_meta for t in tensors) or len(
                memory
            ) != len(tensors):
                continue

            def function(
                *given: torch.Tensor, leaves: Any = leaves, places: Any = places, spec: Any = spec
            ) -> Any:
                full = list(leaves)
                for i, t in zip(places, given, strict=True):
                    full[i] = t
                first, args, kwargs = pytree.tree_unflatten(full, spec)
                return self.op.op(first, *args, **kwargs)

            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    function(*tensors)
            except Exception as theirs:
                yield function, tensors, theirs


def refusing() -> list[Refusing]:
    """Every operator of the database with such inputs."""
    return [
        Refusing(op) for op in op_db if op.error_inputs_func is not None and "sparse" not in op.name
    ]
