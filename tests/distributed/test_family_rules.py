"""Weights of known families of models on a mesh by bridge.rules: outputs and decoding steps are
those of one device, and a step gathers no weights. One process has the eight simulated devices
(family_jobs.py).
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import family_jobs
import jax
import jax.numpy as jnp
import pytest
from decoder import Decoder, gathered
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import bridge

JOBS = (*family_jobs.OWN, "files", "adapters")
ROOT = Path(__file__).resolve().parents[2]
FEW = ("llama", "qwen3", "gemma3_text", "gpt2", "gpt_neox", "phi", "opt", "falcon")
# their attention merges the batch and the heads, their projections are three in one, or their
# embeddings are split by the width: such a step gathers activations or caches, but no weights
GATHERS = {"gemma2", "gpt2", "gpt_bigcode", "gpt_neo", "bloom", "falcon", "mpt", "granite"}


@functools.cache
def ran(*families: str) -> dict[str, Any]:
    """What family_jobs.py prints."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, family_jobs.__file__, *families]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(family: str, results: dict[str, Any]) -> None:
    assert results.keys() == family_jobs.layouts(family).keys()
    for layout, found in results.items():
        assert found["all"] < 1e-5 and found["step"] < 1e-5, (family, layout, found)
        assert found["split"] == found["matrices"] > 0, (family, layout, found)
    step = results["tensor"]
    assert step["gathered"] < step["smallest"], (family, step)
    assert family in GATHERS or step["gathered"] == 0, (family, step)


@pytest.mark.parametrize("weights", family_jobs.OWN)
def test_a_decoder_on_a_mesh(weights: str) -> None:
    check(weights, ran(*JOBS)[weights])


def test_gradients_of_adapters_on_int8_weights() -> None:
    found = ran(*JOBS)["adapters"]
    assert found["difference"] < 1e-5 and found["like"], found
    assert found["split"] == 2 and found["gathered"] < found["smallest"], found


def test_files_onto_a_mesh_in_bfloat16() -> None:
    found = ran(*JOBS)["files"]
    assert found["read"] == found["there"]  # each number once, although two devices have some
    assert found["dtypes"] == ["bfloat16"] and found["part"] == 1 / 8
    assert found["difference"] < 0.02


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("family", bridge.rules())
def test_each_family_on_a_mesh(family: str) -> None:
    families = FEW if family in FEW else [f for f in bridge.rules() if f not in FEW]
    check(family, ran(*families)[family])


def test_what_a_program_gathers_is_read_from_its_hlo() -> None:
    text = """
  %all-gather.1 = f32[8,16]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8]
  %all-gather-start = (f32[4,1,32]{2,1,0}, f32[8,1,32]{2,1,0}) all-gather-start(%y)
  %all-to-all = f32[3]{0} all-to-all(%z)
  %all-reduce = f32[64,64]{1,0} all-reduce(%all-gather.1)
"""
    assert gathered(text) == [128, 256, 3]


# -- the tables ------------------------------------------------------------------------------------
MESH = AbstractMesh((2, 4), ("data", "model"))


def specs(rules: Any, prefix: str = "") -> dict[str, tuple[Any, ...]]:
    """Of the parameters of a decoder that are split."""
    params = {f"{prefix}{name}": p for name, p in Decoder(1).named_parameters()}
    found = bridge.shardings(params, MESH, rules)
    return {name.removeprefix(prefix): tuple(s.spec) for name, s in found.items() if any(s.spec)}


@pytest.mark.parametrize(
    ("axes", "outputs", "inputs"),
    [
        ({}, ("model",), (None, "model")),
        ({"tensor": None, "fsdp": "data"}, (None, "data"), ("data",)),
        ({"fsdp": "data"}, ("model", "data"), ("data", "model")),
        ({"tensor": ("data", "model")}, (("data", "model"),), (None, ("data", "model"))),
        ({"tensor": None}, (), ()),
    ],
)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_layouts(axes: Any, outputs: Any, inputs: Any, prefix: str) -> None:
    first = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    wanted = {
        **{f"layers.0.{name}.weight": outputs for name in first},
        **{f"layers.0.{name}.weight": inputs for name in ("self_attn.o_proj", "mlp.down_proj")},
        "embed_tokens.weight": outputs,
        "lm_head.weight": outputs,
    }
    found = specs(bridge.rules("llama", **axes), prefix)
    assert found == {name: spec for name, spec in wanted.items() if spec}


def test_other_patterns_before_those_of_a_family() -> None:
    found = specs({"lm_head*": P(None, "data"), "*.q_proj.weight": P()} | bridge.rules("llama"))
    assert found["lm_head.weight"] == (None, "data")
    assert "layers.0.self_attn.q_proj.weight" not in found
    assert found["layers.0.self_attn.k_proj.weight"] == ("model",)


@pytest.mark.parametrize(
    ("axes", "split"),
    [
        ({}, (None, "model")),
        ({"tensor": None, "fsdp": "data"}, (None, "data")),
        ({"fsdp": "data"}, (None, ("model", "data"))),
    ],
)
@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [("gpt2", "transformer.wte.weight", (50257, 768)), ("granite", "lm_head.weight", (49155, 64))],
)
def test_a_number_of_tokens_that_no_axis_divides(
    axes: Any, split: Any, family: str, name: str, shape: Any
) -> None:
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32)}
    assert tuple(bridge.shardings(params, MESH, bridge.rules(family, **axes))[name].spec) == split


def test_adapters_are_split_with_their_layers() -> None:
    shapes = {
        "q_proj.base_layer.weight": (64, 32),
        "q_proj.lora_A.default.weight": (4, 32),
        "q_proj.lora_B.default.weight": (64, 4),
        "o_proj.base_layer.weight": (32, 64),
        "o_proj.lora_A.default.weight": (4, 64),
        "o_proj.lora_B.default.weight": (32, 4),
    }
    params = {
        f"layers.0.{name}": jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()
    }
    found = bridge.shardings(params, MESH, bridge.rules("llama"))
    assert [tuple(s.spec) for s in found.values()] == [
        ("model",), (), ("model",), (None, "model"), (None, "model"), ()
    ]  # fmt: skip


def test_copies_are_of_a_family_too() -> None:
    rules = bridge.rules("llama")
    for other in (copy.deepcopy(rules), pickle.loads(pickle.dumps(rules)), {**rules}):
        assert other == rules and specs(other) == specs(rules)


def test_families_are_listed() -> None:
    families = bridge.rules()
    assert families == sorted(families) and {*FEW} <= {*families}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: bridge.rules("lama"), ValueError, "family: expected one of bloom, .*, got 'lama'"),
        (
            lambda: bridge.rules("llama", fsdp="model"),
            ValueError,
            "tensor, fsdp: expected different axes of the mesh, got 'model' and 'model'",
        ),
        (
            lambda: bridge.rules("llama", tensor=4),
            TypeError,
            "tensor: expected the name of an axis of the mesh, a tuple of names or None, got 4",
        ),
        (
            lambda: specs(bridge.rules("llama", tensor="tensor")),
            ValueError,
            "expected different axes of the mesh, got 'tensor'",
        ),
        (
            lambda: specs({"nothing": P()} | bridge.rules("llama")),
            ValueError,
            "rules: 'nothing' fits no parameter",
        ),
    ],
)
def test_wrong_arguments(call: Any, error: Any, message: Any) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_family_that_is_another_one() -> None:
    with pytest.raises(
        ValueError, match="rules: none of the patterns of 'mpt' fits a parameter; there are 'head"
    ):
        bridge.shardings({"head.weight": jnp.ones((4, 4))}, MESH, bridge.rules("mpt"))
