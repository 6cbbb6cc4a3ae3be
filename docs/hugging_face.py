"""Writes hugging_face.md: architectures of the transformers library through jit, outputs and
gradients beside PyTorch's.

    pip install "transformers>=5,<6"
    python docs/hugging_face.py                 all of them, and the page
    python docs/hugging_face.py --generation    the page's section of that name
    python docs/hugging_face.py llama vit       these, printed
    python docs/hugging_face.py --json llama    as JSON

Each model is small and random, and in evaluation mode; nothing is downloaded. Its outputs, and the
gradients of the mean of their squares with respect to all its parameters, are computed by PyTorch,
by the model under torchfunc_jax.jit, and by PyTorch in float64, which says how large the rounding
errors of float32 are.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compared_models import (
    UNIT,
    Example,
    distance,
    paragraph,
    problem,
    timed_values,
    values_of,
    wrong_models,
)
from rich.progress import track

from torchfunc_jax import generate, jit
from torchfunc_jax._machine import machine

try:
    import transformers
    from transformers import AutoModel, AutoModelForCausalLM
except ModuleNotFoundError:
    sys.exit(
        "the library transformers is not installed; install it with: pip install "
        '"transformers>=5,<6"'
    )

GENERATION = "## Generation"
PAGE = Path(__file__).with_suffix(".md")
GENERATED = ("llama", "qwen3")
DECODERS = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "opt",
    "bloom",
    "falcon",
    "mpt",
    "stablelm",
    "starcoder2",
    "olmo",
    "olmo2",
    "cohere",
    "granite",
    "codegen",
)
ENCODERS = (
    "bert",
    "roberta",
    "albert",
    "distilbert",
    "electra",
    "deberta",
    "deberta-v2",
    "mpnet",
    "xlm-roberta",
    "camembert",
    "modernbert",
    "roformer",
    "convbert",
    "layoutlm",
    "t5",
    "bart",
    "pegasus",
    "marian",
)
VISION = (
    "vit",
    "deit",
    "beit",
    "dinov2",
    "convnext",
    "convnextv2",
    "resnet",
    "regnet",
    "swin",
    "swinv2",
    "mobilenet_v1",
    "mobilenet_v2",
    "mobilevit",
    "segformer",
    "poolformer",
    "pvt",
    "focalnet",
    "bit",
    "ijepa",
    "hiera",
    "data2vec-vision",
)
#: what makes a model small, under the names that its configuration may have for it
SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2
    ),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "d_ff",
            "hidden_dim",
            "ffn_dim",
            "n_inner",
        ),
        64,
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "rotary_dim": 4,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "cls_token_id": 1,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
}
_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "image_size": 64}
_WINDOWS = {
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
    "patch_size": 4,
    "num_attention_heads": None,
    "num_hidden_layers": None,
    "hidden_size": None,
}
_CONVNEXT = {
    **_STAGES,
    "hidden_size": None,
    "num_layers": None,
    "num_hidden_layers": None,
    "hidden_sizes": [8, 16, 24, 32],
    "patch_size": 4,
    "image_size": 32,
}
#: what SMALL does not fit; None: the configuration's default
OTHERWISE: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma3_text": {"sliding_window": 8},
    "codegen": {"n_ctx": 64},
    "mpt": {"expansion_ratio": 2},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "convnext": _CONVNEXT,
    "convnextv2": _CONVNEXT,
    "focalnet": {
        "embed_dim": 16,
        "depths": [1, 1],
        "focal_levels": [1, 1],
        "focal_windows": [3, 3],
        "hidden_sizes": [16, 32],
        "patch_size": 4,
    },
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "bit": {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 8},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    "mobilevit": {
        "image_size": 64,
        "patch_size": 2,
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 16, 24, 32],
    },
    "segformer": {**_STAGES, "num_attention_heads": [1, 1, 2, 2]},
    "pvt": {**_STAGES, "num_attention_heads": [1, 1, 2, 2]},
    "poolformer": {**_STAGES, "patch_size": 7},
    "hiera": {
        "embed_dim": 8,
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 1, 2, 2],
        "image_size": [64, 64],
        "patch_size": [7, 7],
    },
    "mobilenet_v1": {
        "image_size": 64,
        "depth_multiplier": 0.25,
        "min_depth": 8,
        # with the default of 0.02 the outputs are 1e-31 and some derivatives are subnormal numbers,
        # which are zero in XLA
        "initializer_range": 0.2,
    },
    "mobilenet_v2": {"image_size": 64, "depth_multiplier": 0.25},
}


class Row(NamedTuple):
    """What one architecture did.

    Attributes:
        kind: decoder, encoder or vision.
        parameters: how many numbers.
        outputs, gradients: the largest difference to float64, as a multiple of what float32 allows
            (``distance``).
        seconds: of the processor, for the first call and its backward pass.
        problem: why there are no numbers; "" if there are.
    """

    architecture: str
    kind: str
    parameters: int = 0
    outputs: float = 0.0
    gradients: float = 0.0
    seconds: float = 0.0
    problem: str = ""

    @property
    def right(self) -> bool:
        return not self.problem and max(self.outputs, self.gradients) <= 1


def kind_of(architecture: str) -> str:
    return (
        "decoder" if architecture in DECODERS else "vision" if architecture in VISION else "encoder"
    )


def model_of(architecture: str) -> torch.nn.Module:
    """A small random model."""
    cls = transformers.CONFIG_MAPPING[architecture]
    known = (
        set(inspect.signature(cls.__init__).parameters)
        | set(vars(cls()))
        | set(getattr(cls, "attribute_map", {}))
    )
    config = cls(
        **{
            k: v
            for k, v in {**SMALL, **OTHERWISE.get(architecture, {})}.items()
            if k in known and v is not None
        }
    )
    torch.manual_seed(0)
    return (
        (AutoModelForCausalLM if architecture in DECODERS else AutoModel).from_config(config).eval()
    )


def inputs_of(architecture: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A batch of two."""
    generator = torch.Generator().manual_seed(0)
    if architecture in VISION:
        size = getattr(model.config, "image_size", 64)
        return {
            "pixel_values": torch.randn(
                2, 3, *((size, size) if isinstance(size, int) else size), generator=generator
            )
        }
    tokens = torch.randint(3, 99, (2, 12), generator=generator)
    tokens = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return tokens | (
        {"decoder_input_ids": tokens["input_ids"]} if model.config.is_encoder_decoder else {}
    )


def row_of(architecture: str) -> Row:
    """Compare one architecture."""
    kind = kind_of(architecture)
    try:
        model = model_of(architecture)
        example = Example(model, kwargs=inputs_of(architecture, model))
        theirs, exact = example.copied(), example.in_float64()
        if any("experts" in name for name, _ in model.named_modules()):
            # PyTorch's grouped products have no float64
            exact.model.set_experts_implementation("eager")
        ours, seconds = timed_values(jit(model), example)
        expected, true = (values_of(e.model, e) for e in (theirs, exact))
        return Row(
            architecture,
            kind,
            sum(p.numel() for p in model.parameters()),
            distance(ours.outputs, expected.outputs, true.outputs),
            distance(ours.gradients, expected.gradients, true.gradients),
            seconds,
        )
    except Exception as error:
        return Row(architecture, kind, problem=problem(error))


class Generation(NamedTuple):
    """Tokens per second of greedy generation; equal: whether the tokens of every way are those of
    ``model.generate``.

    Attributes:
        pytorch: ``model.generate``.
        compiled, jitted: a step with a static cache that is written in place, compiled by
            torch.compile and by ``jit``; a loop in Python.
        ours: ``torchfunc_jax.generate``.
    """

    architecture: str
    equal: bool
    pytorch: float
    compiled: float
    jitted: float
    ours: float


def generation_of(architecture: str, count: int = 64, rounds: int = 8) -> Generation:
    """Generate tokens for a batch of two with a model of four layers."""
    cls = transformers.CONFIG_MAPPING[architecture]
    larger = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "head_dim": 32,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        cls(**{**SMALL, **larger, "max_position_embeddings": 128})
    ).eval()
    prompt = torch.randint(3, 99, (2, 8))
    options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    named = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in named else "past_key_values"

    def next_token(token: torch.Tensor, place: torch.Tensor, cache: Any) -> torch.Tensor:
        found = model(token, cache_position=place, **{cache_name: cache})
        return found.logits[:, -1].argmax(-1)

    def by_steps(step: Any) -> Any:
        cache = transformers.StaticCache(config=model.config, max_cache_len=8 + count)

        def tokens() -> torch.Tensor:
            cache.reset()
            found = [prompt, next_token(prompt, torch.arange(8), cache)[:, None]]
            for k in range(count - 1):
                found.append(step(found[-1], torch.tensor([8 + k]), cache)[:, None].clone())
            return torch.cat(found, 1)

        return tokens

    ways = [
        lambda: model.generate(prompt, **options),
        by_steps(torch.compile(next_token)),
        by_steps(jit(next_token, donate=2)),
        lambda: generate(model, prompt, **options),
    ]
    seconds: list[list[float]] = [[] for _ in ways]
    equal = True
    with torch.no_grad():
        expected = ways[0]()
        # in turn, and the fastest call counts, because other programs on the machine only add to it
        for _ in range(rounds):
            for way, times in zip(ways, seconds, strict=True):
                start = time.perf_counter()
                found = way()
                times.append(time.perf_counter() - start)
                equal = equal and torch.equal(found, expected)
    return Generation(architecture, equal, *[len(prompt) * count / min(t) for t in seconds])


def page(rows: list[Row], generations: list[Generation]) -> str:
    """The page as Markdown."""
    lines = [
        "# Models of transformers",
        "",
        *paragraph(
            f"Under `torchfunc_jax.jit`, {sum(row.right for row in rows)} of {len(rows)} "
            "architectures of Hugging Face's library, each as a small random model, have the same "
            "outputs, and the same gradients of all parameters, as in PyTorch. The numbers are "
            f"{UNIT}. Outputs and caches are instances of the library's own classes. The last "
            "column is the processor time of all threads for the first call and its backward pass. "
            "[hugging_face.py](hugging_face.py) writes this page."
        ),
        "",
        "| architecture | kind | parameters | outputs | gradients | first call and backward |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if not row.problem:
            numbers = (
                f"{row.parameters:,} | {row.outputs:.2f} | {row.gradients:.2f} "
                f"| {row.seconds:.1f} s"
            )
            lines.append(f"| {row.architecture} | {row.kind} | {numbers} |")
    lines += [
        "",
        (
            f"transformers {transformers.__version__}, torch {torch.__version__}, Python "
            f"{sys.version.split()[0]}."
        ),
        "",
    ]
    wrong = [
        (
            row.architecture,
            row.problem or f"{max(row.outputs, row.gradients):.1f} times what float32 allows",
        )
        for row in rows
        if not row.right
    ]
    return "\n".join([*lines, *wrong_models(wrong), ""]) + section(generations)


def section(generations: list[Generation]) -> str:
    """The end of the page."""
    here = machine()
    lines = [
        GENERATION,
        "",
        *paragraph(
            "[`torchfunc_jax.generate`](decoding.md) decodes in one program. The table compares it "
            "with `model.generate`, and with a function of one step that Python calls in a loop, "
            "with transformers' static cache. That function is compiled by torch.compile, or by "
            "`jit(next_token, donate=2)`, which from the first call on writes in place into memory "
            "of XLA's. Each finds the 64 most probable tokens, one after the other, for a batch of "
            "two, with models of four layers of width 256. Their tokens are compared with those of "
            "`model.generate`."
        ),
        "",
        (
            "| architecture | model.generate | torch.compile | torchfunc_jax.jit | "
            "torchfunc_jax.generate | equal tokens |"
        ),
        "| --- | ---: | ---: | ---: | ---: | --- |",
        *(
            (
                f"| {g.architecture} | {g.pytorch:,.0f}/s | {g.compiled:,.0f}/s "
                f"| {g.jitted:,.0f}/s | {g.ours:,.0f}/s | {g.equal} |"
            )
            for g in generations
        ),
        "",
        (
            f"Tokens per second of the fastest call, with its time for the prompt; {here['cpu']}, "
            f"{here['cores']} cores."
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "architectures",
        nargs="*",
        help="names of transformers' configurations; all of the page's if there are none",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--generation",
        action="store_true",
        help="write the page's section of generation, and leave the rest as it is",
    )
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if asked.generation:
        PAGE.write_text(
            PAGE.read_text().partition(GENERATION)[0]
            + section([generation_of(name) for name in GENERATED])
        )
        return 0
    names = asked.architectures or [*DECODERS, *ENCODERS, *VISION]
    rows = [row_of(name) for name in track(names, "architectures", disable=not sys.stderr.isatty())]
    if asked.json:
        print(json.dumps([row._asdict() | {"right": row.right} for row in rows]))
    elif asked.architectures:
        for row in rows:
            print(row)
    else:
        PAGE.write_text(page(rows, [generation_of(name) for name in GENERATED]))
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
