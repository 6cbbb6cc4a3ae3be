"""What a process of tests/distributed/test_family_rules.py runs on eight simulated devices:
``python family_jobs.py llama gpt2 ...`` prints a line of JSON, what ``compared`` returns for each;
"files" is what ``from_files`` returns, "adapters" what ``trained`` does.
"own" is the decoder of decoder.py, "int8" the same with quantized weights; the others are models of
docs/hugging_face.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import decoder
import jax
import numpy as np
import safetensors
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import bridge
from bridge import checkpoints

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {},
    "fsdp": {"tensor": None, "fsdp": ("data", "model")},
    "both": {"fsdp": "data"},
}
OWN = ("own", "int8")
#: sizes that eight devices divide, under the names of the configurations
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff"), 128),
    "num_key_value_heads": 4,
    "vocab_size": 128,
}


def layouts(family: str) -> dict[str, dict[str, Any]]:
    """Those that are compared: of quantized weights, one."""
    return {"tensor": LAYOUTS["tensor"]} if family == "int8" else LAYOUTS


def of_library(family: str) -> nn.Module:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
    import hugging_face
    from transformers import DynamicCache

    class Model(nn.Module):
        """The calls of decoder.Decoder."""

        def __init__(self) -> None:
            super().__init__()
            hugging_face.SMALL.update(SIZES)
            self.own = hugging_face.model_of(family)

        def forward(self, tokens: torch.Tensor, pairs: Any = None) -> Any:
            cache = DynamicCache(pairs or [])
            length = cache.get_seq_length() + tokens.shape[1]
            mask = torch.ones(len(tokens), length, dtype=torch.int64)
            logits = self.own(tokens, past_key_values=cache, attention_mask=mask).logits
            return logits, [(layer.keys, layer.values) for layer in cache.layers]

    return Model()


def difference(found: Any, wanted: Any) -> float:
    """The largest difference in an array, relative to the largest number in it."""
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max())
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    )


def compared(family: str) -> dict[str, Any]:
    """The largest differences between one device and a mesh of 2x4, for each layout of the weights:
    of logits and caches, and of those of a decoding step.

    Returns:
        dict: layout -> {"all", "step": the differences; "split": of the weight matrices, but for
            positions, how many are split; "matrices": how many there are; "gathered": how many
            numbers the largest result has that the step gathers; "smallest": how many the smallest
            matrix has that is split}.
    """
    torch.manual_seed(0)
    model = decoder.Decoder(1) if family in OWN else of_library(family)
    if family == "int8":
        bridge.quantize_int8(model)
    params, buffers = bridge.params(model), bridge.buffers(model)
    tokens = np.random.RandomState(0).randint(3, 99, (8, 7))
    call = jax.jit(lambda params, buffers, *args: bridge.call(model, params, buffers, args)[0])
    wanted = call(params, buffers, tokens)
    _, cache = call(params, buffers, tokens[:, :-1])
    after = call(params, buffers, tokens[:, -1:], cache)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    rows = NamedSharding(mesh, P("data"))
    results = {}
    for layout, axes in layouts(family).items():
        rules = bridge.rules("llama" if family in OWN else family, **axes)
        given = (
            bridge.shard(params, mesh, rules),
            bridge.shard(buffers, mesh, rules if family == "int8" else None),
        )
        split_cache = jax.device_put(
            cache,
            jax.tree.map(
                lambda x: NamedSharding(mesh, P("data", "model" if x.shape[1] % 4 == 0 else None)),
                cache,
            ),
        )
        step = call.lower(*given, jax.device_put(tokens[:, -1:], rows), split_cache).compile()
        weights = given[0] | (given[1] if family == "int8" else {})
        matrices = [
            p
            for name, p in weights.items()
            if p.ndim > 1 and "wpe" not in name and "pos" not in name
        ]
        split = [p.size for p in matrices if any(p.sharding.spec)]
        results[layout] = {
            "all": difference(call(*given, jax.device_put(tokens, rows)), wanted),
            "step": difference(
                step(*given, jax.device_put(tokens[:, -1:], rows), split_cache), after
            ),
            "split": len(split),
            "matrices": len(matrices),
            "gathered": max(decoder.gathered(step.as_text()), default=0),
            "smallest": min(split, default=0),
        }
    return results


def trained() -> dict[str, Any]:
    """The gradients of adapters on int8 weights, on a mesh of 2x4 beside those of one device.

    Returns:
        dict: "difference"; "gathered": how many numbers the largest result has that the program
            gathers; "smallest": how many the smallest weight has that is split; "split": how many
            adapters are split; "like": whether each gradient is split as its adapter.
    """
    torch.manual_seed(0)
    model = decoder.with_adapters(bridge.quantize_int8(decoder.Decoder(1)))
    params, buffers = bridge.params(model), bridge.buffers(model)
    adapters = {name: params.pop(name) for name in [*params] if "lora_" in name}
    tokens = np.random.RandomState(0).randint(0, 99, (8, 7))

    @jax.jit
    def gradients(adapters: Any, params: Any, buffers: Any, tokens: Any) -> Any:
        def loss(adapters: Any) -> Any:
            logits, _ = bridge.call(model, {**params, **adapters}, buffers, (tokens,))[0]
            return (logits**2).mean()

        return jax.grad(loss)(adapters)

    wanted = gradients(adapters, params, buffers, tokens)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    rules = bridge.rules("llama")
    given = [bridge.shard(tree, mesh, rules) for tree in (adapters, params, buffers)]
    rows = jax.device_put(tokens, NamedSharding(mesh, P("data")))
    program = gradients.lower(*given, rows).compile()
    found = program(*given, rows)
    weights = [x for x in given[2].values() if x.ndim > 1]
    return {
        "difference": difference(found, wanted),
        "gathered": max(decoder.gathered(program.as_text()), default=0),
        "smallest": min(x.size for x in weights if any(x.sharding.spec)),
        "split": sum(any(x.sharding.spec) for x in given[0].values()),
        "like": all(
            g.sharding.is_equivalent_to(given[0][name].sharding, g.ndim)
            for name, g in found.items()
        ),
    }


def from_files() -> dict[str, Any]:
    """A decoder whose weights are read from a file onto a mesh of 2x4 in bfloat16, without a copy
    of it on the host.

    Returns:
        dict: "read", "there": how many numbers were read from the file, and how many are in it;
            "dtypes" of the weights; "part": the largest part of a device, relative to the weight;
            "difference" of its logits from PyTorch's in bfloat16.
    """
    torch.manual_seed(0)
    model, read = decoder.Decoder(1).bfloat16(), []
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    with torch.device("meta"):
        empty = decoder.Decoder(1).bfloat16()

    def noted(t: torch.Tensor) -> torch.Tensor:
        read.append(t.numel())
        return t

    class Noting:
        """An opened file that notes how many numbers are read from it."""

        def __init__(self, *args: Any) -> None:
            self.file = safe_open(*args)

        def __enter__(self) -> Any:
            self.file.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.file.__exit__(*args)

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> torch.Tensor:
            return noted(self.file.get_tensor(name))

        def get_slice(self, name: str) -> Any:
            part = self.file.get_slice(name)

            class Slice:
                get_shape = part.get_shape

                def __getitem__(self, index: Any) -> torch.Tensor:
                    return noted(part[index])

            return Slice()

    safe_open = safetensors.safe_open
    with tempfile.TemporaryDirectory() as folder:
        checkpoints.save(f"{folder}/model.safetensors", model.float().state_dict())
        with mock.patch.object(safetensors, "safe_open", Noting):
            params = bridge.load_sharded(
                folder, mesh, bridge.rules("llama", fsdp="data"), like=empty
            )
    tokens = np.arange(56).reshape(8, 7)
    rows = jax.device_put(tokens, NamedSharding(mesh, P("data")))
    found = jax.jit(lambda params, x: bridge.call(empty, params, {}, (x,))[0][0])(params, rows)
    wanted = model.bfloat16()(torch.from_numpy(tokens))[0].detach().float().numpy()
    return {
        "read": sum(read),
        "there": sum(p.numel() for p in model.parameters()),
        "dtypes": sorted({str(p.dtype) for p in params.values()}),
        "part": max(
            p.addressable_shards[0].data.size / p.size for p in params.values() if p.ndim > 1
        ),
        "difference": difference(found.astype(np.float32), wanted),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    jax.config.update("jax_num_cpu_devices", 8)
    jobs = {"files": from_files, "adapters": trained}
    print(json.dumps({f: jobs[f]() if f in jobs else compared(f) for f in sys.argv[1:]}))
