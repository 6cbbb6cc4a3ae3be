"""What the scripts about models of other libraries share: a model under jit beside PyTorch's own.

A model is small and random; nothing is downloaded. Its outputs, and the gradients of the mean of
their squares with respect to all its parameters, are computed by the model under torchfunc_jax.jit,
by PyTorch, and by PyTorch in float64, which says how large the rounding errors of float32 are.
"""

from __future__ import annotations

import contextlib
import copy
import os
import resource
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
with contextlib.suppress(ModuleNotFoundError):  # transformers and timm import it if it is there
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        # torchvision for CUDA beside torch for the CPU has none of its operators, but its import
        # needs two of them. No model of the pages calls one.
        _OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
        for _name in ("nms", "qnms"):
            _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

#: what the numbers of `distance` are, for the pages
UNIT = (
    "differences in units of the error that float32 allows, which is 1e-5 of the largest value, or "
    "ten times PyTorch's own distance from float64"
)


class Example(NamedTuple):
    """A model and the arguments of a call."""

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    def copied(self) -> Example:
        """The same model and arguments, in other memory."""
        return Example(*copy.deepcopy((self.model, self.args, dict(self.kwargs))))

    def in_float64(self) -> Example:
        """The same in float64, in other memory."""
        example = self.copied()
        args, kwargs = tree_map_only(
            torch.Tensor,
            lambda t: t.double() if t.is_floating_point() else t,
            (example.args, example.kwargs),
        )
        return Example(example.model.double(), args, kwargs)


class Values(NamedTuple):
    """What a call and its backward pass compute; buffers: those of the model after the call."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor]
    buffers: list[torch.Tensor]


def floats(outputs: Any) -> list[torch.Tensor]:
    """The floating tensors in a model's outputs, in their order."""
    if isinstance(outputs, torch.Tensor):
        return [outputs] if outputs.is_floating_point() else []
    if isinstance(outputs, Mapping):
        outputs = tuple(outputs.values())
    if not isinstance(outputs, tuple | list):
        return []
    return [t for output in outputs for t in floats(output)]


def values_of(call: Callable[..., Any], example: Example) -> Values:
    """Call the model, which `call` is or has compiled; a parameter without a gradient has zeros."""
    example.model.zero_grad()
    outputs = floats(call(*example.args, **example.kwargs))
    sum((t.square().mean() for t in outputs), torch.zeros(())).backward()
    return Values(
        [t.detach() for t in outputs],
        [torch.zeros_like(p) if p.grad is None else p.grad for p in example.model.parameters()],
        [b.clone() for b in example.model.buffers()],
    )


def timed_values(call: Callable[..., Any], example: Example) -> tuple[Values, float]:
    """values_of, and the processor's seconds that it took, of all threads and of the compilers that
    were called: other work on the machine matters little.
    """
    start = _processor_seconds()
    values = values_of(call, example)
    return values, _processor_seconds() - start


def _processor_seconds() -> float:
    """The processor's seconds of this process and of its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _least(exact: list[torch.Tensor]) -> float:
    """The smallest number that differences are relative to: where a sum is zero in exact
    arithmetic, its rounding errors are as large as those of its terms.
    """
    largest = max((t.abs().max().item() for t in exact if t.numel()), default=0.0)
    return 1e-7 * largest + torch.finfo().tiny


def distance(
    found: list[torch.Tensor], expected: list[torch.Tensor], exact: list[torch.Tensor]
) -> float:
    """The largest difference from float64, as a multiple of 1e-5 of the largest value, or of ten
    times PyTorch's own rounding error if that is more.
    """
    if not [t.shape for t in found] == [t.shape for t in expected] == [t.shape for t in exact]:
        return float("inf")
    if not any(t.any() for t in exact):
        raise ValueError("all numbers are zero, so that a comparison would say nothing")
    least, worst = _least(exact), 0.0
    for ours, theirs, true in zip(found, expected, exact, strict=True):
        if true.numel():
            allowed = max(
                1e-5 * true.abs().max().item(), 10 * (theirs - true).abs().max().item(), least
            )
            worst = _larger(worst, (ours - true).abs().max().item() / allowed)
    return worst


def relative_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference in a tensor, as a fraction of the tensor's largest value."""
    if [(t.shape, t.dtype) for t in found] != [(t.shape, t.dtype) for t in expected]:
        return float("inf")
    least, worst = _least(expected), 0.0
    for ours, theirs in zip(found, expected, strict=True):
        if theirs.numel():
            allowed = max(theirs.abs().max().item(), least)
            worst = _larger(worst, (ours.double() - theirs).abs().max().item() / allowed)
    return worst


def _larger(worst: float, difference: float) -> float:
    """The larger number; infinity where the difference is NaN."""
    return max(worst, float("inf") if difference != difference else difference)


def problem(error: Exception) -> str:
    """An error on one line; TRACEBACK=1 prints where it was raised."""
    if os.environ.get("TRACEBACK"):
        traceback.print_exc()
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


def paragraph(text: str) -> list[str]:
    """The lines of a paragraph of a page."""
    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def wrong_models(wrong: Sequence[tuple[str, str]]) -> list[str]:
    """The lines of a page's section about models that are not right, each with the reason; none if
    there are no such models.
    """
    if not wrong:
        return []
    return ["## What is not right", "", *(f"- {model}: {why}" for model, why in wrong), ""]
