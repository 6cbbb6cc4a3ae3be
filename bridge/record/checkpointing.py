"""torch.utils.checkpoint as a part of a record."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from bridge.convert import trees
from bridge.record.entries import PARTS
from bridge.record.recorder import Recorder
from bridge.record.replay import TRANSFORMS
from bridge.record.tensor import aval_of
from bridge.record.transforms import entered, transform


def _checkpoint(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write torch.utils.checkpoint down as a part of the record; its function's values are computed again in the backward pass."""
    options = ("context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")
    kwargs = {name: x for name, x in kwargs.items() if name not in options}

    leaves, spec = trees.flatten((args, kwargs))

    def record(recorder: Recorder) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        avals = [aval_of(x) for x in leaves if isinstance(x, torch.Tensor)]
        out, _ = entered(recorder, function, "checkpoint", (), leaves, spec, avals, (), lambda out: (out, None))
        outs, out_spec = trees.flatten(out)
        where = [i for i, x in enumerate(outs) if isinstance(x, torch.Tensor)]
        results = [aval_of(outs[i]) for i in where]
        ended = recorder.end((), [outs[i] for i in where], [a.like(a.shape, a.requires_grad) for a in results])
        for i, t in zip(where, ended, strict=True):
            outs[i] = t
        return ended, lambda _: trees.unflatten(out_spec, outs)

    return transform(function, leaves, record)


def _checkpoint_again(body: Callable[..., Any], operands: list[torch.Tensor], _: Any, __: Any) -> tuple[list[torch.Tensor], None]:
    return list(torch.utils.checkpoint.checkpoint(body, *operands, use_reentrant=False)), None


PARTS["checkpoint"] = _checkpoint
TRANSFORMS["checkpoint"] = _checkpoint_again
