"""Linear layers whose weights are whole numbers of eight bits, with a scale for each row."""

from __future__ import annotations

import fnmatch
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_LARGEST = 127
#: Inputs are divided by it, because products with numbers to 127 would exceed float16; a power of
#: two changes no bits.
_SHRUNK = 128


class Int8Linear(nn.Linear):
    """A Linear layer with an int8 ``weight`` (outputs, inputs), which is a buffer, and another one,
    ``weight_scale`` (outputs,): the weight is their product. ``quantize_int8`` makes it.

    ``load_state_dict`` takes a floating-point weight, too, and quantizes it.
    """

    weight_scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x / _SHRUNK, self.weight.to(x.dtype))
        y = (y * (self.weight_scale * _SHRUNK)).to(y.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight=int8"


def quantize_int8(
    module: nn.Module, *names: str, skip: str | tuple[str, ...] = "*lora_*"
) -> nn.Module:
    """Keep the weights of a module's Linear layers as int8, a quarter of float32's memory.

    Each row of a weight is rounded to whole numbers from -127 to 127 times a scale, the largest
    number of the row divided by 127. So a weight is at most 1/254 of its row's largest number
    wrong. Products are computed in the dtype of the inputs, from weights that become it where they
    are used.

    The layers keep their names, hooks and biases, and stay instances of nn.Linear. Their weight and
    its scale are buffers, so that ``bridge.params`` and ``parameters()`` have what can be trained
    alone. The gradients of inputs, and so of adapters (LoRA), pass through.

    Args:
        module: changed in place. Its class nn.Linear itself is quantized; subclasses, parametrized
            and pruned layers, and weights that another module has too stay as they are.
        names: patterns of the layers' names, as in ``bridge.shard``; none: all.
        skip: a pattern, or several, of names that stay.

    Returns:
        nn.Module: the module.

    Raises:
        ValueError: there is no such layer, or a pattern fits none; a weight has values that are not
            finite. The module is then unchanged.
        TypeError: module is no nn.Module.

    Source: https://arxiv.org/abs/2208.07339 (section 2.1, vector-wise quantization, of weights)

    Example:
        >>> import bridge, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU())
        >>> x = torch.ones(1, 64)
        >>> exact = model(x)
        >>> bridge.quantize_int8(model)[0].weight.dtype
        torch.int8
        >>> bool((model(x) - exact).abs().max() < 0.02)
        True
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected an nn.Module, got {type(module)}")
    skipped = (skip,) if isinstance(skip, str) else skip
    owners = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    layers = {
        name: m
        for name, m in module.named_modules()
        if type(m) is nn.Linear
        and owners[id(m.weight)] == 1
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in skipped)
    }
    for pattern in names or ("*",):
        if not any(fnmatch.fnmatchcase(name, pattern) for name in layers):
            raise ValueError(
                f"names: {pattern!r} fits no Linear layer that can be quantized; there are "
                f"{', '.join(map(repr, layers)) or 'none'}"
            )
    chosen = {
        name: m
        for name, m in layers.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in names or ("*",))
    }
    for name, m in chosen.items():
        if not m.weight.is_meta and not m.weight.isfinite().all():
            raise ValueError(f"module: the weight of {name!r} has values that are not finite")
    for m in chosen.values():
        weight, scale = _rows(m.weight.detach())
        m.__class__ = Int8Linear
        del m.weight
        m.register_buffer("weight", weight)
        m.register_buffer("weight_scale", scale)
        m.register_load_state_dict_pre_hook(_quantized_on_the_way)
    return module


def _rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(whole numbers, scale of each row)"""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    scale = wide.abs().amax(1) / _LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (wide / scale[:, None]).round().clamp(-_LARGEST, _LARGEST).to(torch.int8), scale


def _quantized_on_the_way(layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A floating-point weight among what is loaded becomes whole numbers and their scales."""
    weight = state.get(f"{prefix}weight")
    if isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.ndim == 2:
        state[f"{prefix}weight"], state[f"{prefix}weight_scale"] = _rows(weight)


__all__ = ["Int8Linear", "quantize_int8"]
