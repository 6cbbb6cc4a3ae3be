"""Which axes of a mesh the weights of known families of models are split over: a table of layers by
name for each family, and a table of what a layer has by its kind.
"""

from __future__ import annotations

from typing import Any, overload

from jax.sharding import PartitionSpec

#: An axis of a mesh, or several that split one dimension together.
Axis = str | tuple[str, ...]

# stand in the tables for the axes that the caller names
_TENSOR, _FSDP = "tensor", "fsdp"

#: kind of a layer -> {name in the layer: the axis of each dimension}. A Linear's weight is
#: (outputs, inputs), a weight of transformers' Conv1D (inputs, outputs). lora_A and lora_B are
#: peft's, whose layers have the layer that they adapt as base_layer; weight_scale is that of
#: int8_weights.
KINDS: dict[str, dict[str, tuple[str | tuple[str, ...] | None, ...]]] = {
    # each device has some of the outputs
    "outputs": {
        "weight": (_TENSOR, _FSDP),
        "weight_scale": (_TENSOR,),
        "bias": (_TENSOR,),
        "lora_A.*.weight": (None, _FSDP),
        "lora_B.*.weight": (_TENSOR,),
    },
    # each device has some of the inputs; the devices' results are added
    "inputs": {
        "weight": (_FSDP, _TENSOR),
        "lora_A.*.weight": (None, _TENSOR),
        "lora_B.*.weight": (_FSDP,),
    },
    "outputs of a Conv1D": {
        "weight": (_FSDP, _TENSOR),
        "bias": (_TENSOR,),
        "lora_A.*.weight": (None, _FSDP),
        "lora_B.*.weight": (_TENSOR,),
    },
    "inputs of a Conv1D": {
        "weight": (_TENSOR, _FSDP),
        "lora_A.*.weight": (None, _TENSOR),
        "lora_B.*.weight": (_FSDP,),
    },
    # an embedding by tokens, or by its width alone where the number of tokens has few divisors
    "tokens": {"weight": (_TENSOR, _FSDP)},
    "width": {"weight": (None, (_TENSOR, _FSDP))},
}

_LLAMA = {
    "*embed_tokens": "tokens",
    "*.[qkv]_proj": "outputs",
    "*.o_proj": "inputs",
    "*.gate_proj": "outputs",
    "*.up_proj": "outputs",
    "*.down_proj": "inputs",
    "*lm_head": "outputs",
}
_BLOOM = {
    "*word_embeddings": "tokens",
    "*.query_key_value": "outputs",
    "*.dense": "inputs",
    "*.dense_h_to_4h": "outputs",
    "*.dense_4h_to_h": "inputs",
    "*lm_head": "outputs",
}
_GPT_J = {
    "*wte": "tokens",
    "*.[qkv]_proj": "outputs",
    "*.out_proj": "inputs",
    "*.fc_in": "outputs",
    "*.fc_out": "inputs",
    "*lm_head": "outputs",
}

#: model_type of transformers -> {pattern of a layer's name: its kind}
FAMILIES: dict[str, dict[str, str]] = {
    **dict.fromkeys(
        (
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "gemma3_text",
            "stablelm",
            "olmo",
            "olmo2",
            "cohere",
        ),
        _LLAMA,
    ),
    "granite": {**_LLAMA, "*embed_tokens": "width", "*lm_head": "width"},
    "phi": {
        "*embed_tokens": "tokens",
        "*.[qkv]_proj": "outputs",
        "*.dense": "inputs",
        "*.fc1": "outputs",
        "*.fc2": "inputs",
        "*lm_head": "outputs",
    },
    "phi3": {
        "*embed_tokens": "tokens",
        "*.qkv_proj": "outputs",
        "*.o_proj": "inputs",
        "*.gate_up_proj": "outputs",
        "*.down_proj": "inputs",
        "*lm_head": "outputs",
    },
    "gpt2": {
        "*wte": "width",
        "*.c_attn": "outputs of a Conv1D",
        "*.attn.c_proj": "inputs of a Conv1D",
        "*.c_fc": "outputs of a Conv1D",
        "*.mlp.c_proj": "inputs of a Conv1D",
    },
    "gpt_bigcode": {
        "*wte": "width",
        "*.c_attn": "outputs",
        "*.c_proj": "inputs",
        "*.c_fc": "outputs",
    },
    "gpt_neo": {
        "*wte": "width",
        "*.[qkv]_proj": "outputs",
        "*.out_proj": "inputs",
        "*.c_fc": "outputs",
        "*.c_proj": "inputs",
    },
    "gpt_neox": {
        "*embed_in": "tokens",
        "*.query_key_value": "outputs",
        "*.dense": "inputs",
        "*.dense_h_to_4h": "outputs",
        "*.dense_4h_to_h": "inputs",
        "*embed_out": "outputs",
        "*lm_head": "outputs",
    },
    "gptj": _GPT_J,
    "codegen": {"*.qkv_proj": "outputs", **_GPT_J},
    "opt": {
        "*embed_tokens": "tokens",
        "*.[qkv]_proj": "outputs",
        "*.out_proj": "inputs",
        "*.fc1": "outputs",
        "*.fc2": "inputs",
        "*lm_head": "outputs",
    },
    "bloom": _BLOOM,
    "falcon": _BLOOM,
    "mpt": {
        "*wte": "tokens",
        "*.Wqkv": "outputs",
        "*.out_proj": "inputs",
        "*.up_proj": "outputs",
        "*.down_proj": "inputs",
    },
    "starcoder2": {
        "*embed_tokens": "tokens",
        "*.[qkv]_proj": "outputs",
        "*.o_proj": "inputs",
        "*.c_fc": "outputs",
        "*.c_proj": "inputs",
        "*lm_head": "outputs",
    },
}


class Pattern(str):
    """A pattern of names that need not fit any: not each model of a family has biases, a head of
    its own, or adapters.

    Attributes:
        family: whose table it is of.
    """

    family: str

    def __new__(cls, pattern: str, family: str) -> Pattern:
        made = super().__new__(cls, pattern)
        made.family = family
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Pattern, (str(self), self.family)


@overload
def rules(family: None = None) -> list[str]: ...
@overload
def rules(
    family: str, *, tensor: Axis | None = "model", fsdp: Axis | None = None
) -> dict[str, PartitionSpec]: ...
def rules(family: str | None = None, *, tensor: Any = "model", fsdp: Any = None) -> Any:
    """The sharding of the weights of a family of models of the transformers library, by patterns of
    names: what ``shard``, ``shardings`` and ``load_sharded`` take as rules.

    Args:
        family: its ``model_type``, as ``model.config.model_type`` says; None: the list of those
            that there are.
        tensor: the axis of the mesh, or a tuple of axes, over which each layer is computed in
            parts: the outputs of the first layer of attention and of the perceptron, the inputs of
            the last one. Heads and inner units stay on their device, and the devices add up what
            they have twice in a block. None: no layer is split so.
        fsdp: the axis, or a tuple of axes, over which the other dimension of each weight is split,
            to be gathered where the weight is used: fully sharded data parallelism, if the batch is
            split over the same axis. None: it is not split.

    Returns:
        dict: pattern -> jax.sharding.PartitionSpec; with other patterns before it,
            ``{"*lm_head*": P()} | bridge.rules("llama")``, those decide first. A pattern of a
            family need not fit a name, but one of them must. Without a family: list of str.

    Raises:
        ValueError: there is no such family, or one axis is named twice.
        TypeError: an axis is no str, tuple of str or None.

    Source: the layouts are those of Megatron-LM (https://arxiv.org/abs/1909.08053) and of FSDP
    (https://arxiv.org/abs/2304.11277).

    Example:
        >>> import bridge
        >>> tuple(bridge.rules("llama")["*.[qkv]_proj.weight"])
        ('model',)
        >>> tuple(bridge.rules("llama", fsdp="data")["*.down_proj.weight"])
        ('data', 'model')
        >>> "qwen3" in bridge.rules()
        True
    """
    if family is None:
        return sorted(FAMILIES)
    if family not in FAMILIES:
        raise ValueError(
            f"family: expected one of {', '.join(sorted(FAMILIES))}, got {family!r}; for another "
            "model, write a dict of patterns and PartitionSpecs"
        )
    axes = {_TENSOR: _parts("tensor", tensor), _FSDP: _parts("fsdp", fsdp)}
    named = [*axes[_TENSOR], *axes[_FSDP]]
    if len(set(named)) < len(named):
        raise ValueError(
            f"tensor, fsdp: expected different axes of the mesh, got {tensor!r} and {fsdp!r}"
        )

    def spec(dimensions: tuple[str | tuple[str, ...] | None, ...]) -> PartitionSpec:
        split = [
            tuple(a for name in (d if isinstance(d, tuple) else (d,)) for a in axes.get(name, ()))
            for d in dimensions
        ]
        while split and not split[-1]:
            split.pop()
        return PartitionSpec(*[a[0] if len(a) == 1 else a or None for a in split])

    return {
        Pattern(f"{layer}.{own}", family): spec(dimensions)
        for layer, kind in FAMILIES[family].items()
        for name, dimensions in KINDS[kind].items()
        for own in ((name,) if name.startswith("lora_") else (name, f"base_layer.{name}"))
    }


def _parts(name: str, axis: Any) -> tuple[str, ...]:
    parts = axis if isinstance(axis, tuple) else () if axis is None else (axis,)
    if not all(isinstance(a, str) for a in parts):
        raise TypeError(
            f"{name}: expected the name of an axis of the mesh, a tuple of names or None, got "
            f"{axis!r}"
        )
    return parts


__all__ = ["rules"]
