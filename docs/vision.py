"""Writes vision.md and vision.json: sixty models of torchvision and timm through jit, outputs and
gradients beside PyTorch's, first calls beside torch.compile's.

    pip install torchvision "timm>=1,<2"
    python docs/vision.py                               what vision.json lacks, and the page
    python docs/vision.py --only resnet18,convit_tiny   these models anew, and the page
    python docs/vision.py --again                       all models anew, and the page
    python docs/vision.py --again --ways jit,torch.compile   the times anew
    python docs/vision.py --measure resnet18 compared   in this process; the results as JSON

A model is compared, and timed under jit and under torch.compile, each in a process of its own that
finds no stored programs. What is timed is the first call with its backward pass: the processor's
time of all threads and child processes, so that other work on the machine matters little. The
results are written into vision.json at once, so that an interrupted run goes on where it was.

The models have random weights, and fewer or narrower layers where their constructors allow that;
nothing is downloaded. Their inputs are two images of about 64 by 64 pixels, or two videos. They are
compared in float32 in evaluation mode, and in float64 in training mode, with dropout and running
averages. In float32 the rounding error of a ReLU's input can decide its sign, which changes a
gradient as a whole.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compared_models import (
    UNIT,
    Example,
    distance,
    paragraph,
    problem,
    relative_difference,
    timed_values,
    values_of,
    wrong_models,
)
from rich.console import Console
from rich.progress import track

from torchfunc_jax import jit
from torchfunc_jax._machine import machine

INSTALL = 'install it with: pip install torchvision "timm>=1,<2"'
try:
    import torchvision
except ModuleNotFoundError:
    sys.exit(f"the library torchvision is not installed; {INSTALL}")
try:
    import timm
except ModuleNotFoundError:
    sys.exit(f"the library timm is not installed; {INSTALL}")
from timm.models import convmixer, mlp_mixer, nest  # noqa: E402
from torchvision import models  # noqa: E402
from torchvision.models import convnext, detection, resnet, swin_transformer, video  # noqa: E402

PAGE = Path(__file__).with_suffix(".md")
RESULTS = Path(__file__).with_suffix(".json")
COMPARED, JIT, COMPILE = "compared", "jit", "torch.compile"
ALLOWED = 1e-5  # of the differences in float64, which are fractions of a tensor's largest value
PATIENCE = 600  # seconds after which a process is ended

FOUR = (1, 1, 1, 1)
VIT = {"img_size": 64, "depth": 2, "embed_dim": 32, "num_heads": 4}
SWIN = {"img_size": 64, "window_size": 4, "depths": (1, 1), "num_heads": (2, 4), "embed_dim": 16}
CLASSES: dict[str, Any] = {"num_classes": 10}
#: models that torchvision.models.get_model makes, with its arguments
TORCHVISION: dict[str, dict[str, Any]] = {
    "deeplabv3_mobilenet_v3_large": {"weights_backbone": None},
    "efficientnet_b0": {},
    "googlenet": {"init_weights": False},
    "lraspp_mobilenet_v3_large": {"weights_backbone": None},
    "mc3_18": {},
    "mnasnet0_5": {},
    "mobilenet_v2": {"width_mult": 0.25},
    "mobilenet_v3_small": {},
    "regnet_y_400mf": {},
    "resnet18": {},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {},
}
#: models that timm.create_model makes, with its arguments
TIMM: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": VIT,
    "cait_xxs24_224": VIT,
    "convit_tiny": VIT,
    "convnextv2_atto": {"depths": FOUR},
    "deit_tiny_distilled_patch16_224": VIT,
    "edgenext_xx_small": {"depths": (1, 1, 2, 1)},
    "efficientformerv2_s0": {"img_size": 64, "depths": FOUR},
    "efficientvit_b0": {},
    "ese_vovnet19b_slim_dw": {},
    "eva02_tiny_patch14_224": {**VIT, "img_size": 56},
    "fastvit_t8": {"layers": FOUR},
    "ghostnet_050": {},
    "hiera_tiny_224": {"img_size": (64, 64), "stages": FOUR, "embed_dim": 16},
    "inception_next_atto": {"depths": FOUR},
    "lambda_resnet26t": {"img_size": 64},
    "levit_128s": {"img_size": 128},
    "mobilenetv4_conv_small_035": {},
    "mobilevit_xxs": {},
    "nf_regnet_b0": {},
    "pit_ti_224": {"img_size": 64},
    "poolformer_s12": {},
    "regnety_002": {},
    "repvgg_a0": {},
    "res2net50_26w_4s": {"layers": FOUR},
    "resnest14d": {"layers": FOUR},
    "resnext50_32x4d": {"layers": FOUR},
    "samvit_base_patch16": {**VIT, "window_size": 2},
    "skresnet18": {"layers": FOUR},
    "starnet_s1": {},
    "swinv2_cr_tiny_ns_224": SWIN,
    "tnt_s_patch16_224": {"img_size": 64, "depth": 2},
    "twins_svt_small": {"img_size": 64, "depths": FOUR},
    "visformer_tiny": {"img_size": 64, "depth": (1, 1, 1)},
    "vit_base_patch16_siglip_224": VIT,
    "vit_relpos_small_patch16_224": VIT,
    "xcit_nano_12_p16_224": VIT,
}
#: models that are made by their classes, because those functions make no smaller ones
BY_CLASS: dict[str, Callable[[], torch.nn.Module]] = {
    "convmixer": lambda: convmixer.ConvMixer(32, 2, kernel_size=3, patch_size=4, **CLASSES),
    "convnext_tiny": lambda: models.ConvNeXt(
        [convnext.CNBlockConfig(16, 32, 1), convnext.CNBlockConfig(32, None, 1)],
        stochastic_depth_prob=0.1,
        **CLASSES,
    ),
    "densenet121": lambda: models.DenseNet(8, (2, 2, 2, 2), 16, **CLASSES),
    "maxvit_t": lambda: models.MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.1, **CLASSES),
    "mixer": lambda: mlp_mixer.MlpMixer(img_size=64, num_blocks=2, embed_dim=32, **CLASSES),
    "mobilenet_v3_large_fpn": lambda: detection.backbone_utils.mobilenet_backbone(
        backbone_name="mobilenet_v3_large", weights=None, fpn=True
    ),
    "nest": lambda: nest.Nest(
        64, embed_dims=(16, 32, 64), depths=(1, 1, 1), num_heads=(1, 2, 4), **CLASSES
    ),
    "resnet50": lambda: models.ResNet(resnet.Bottleneck, list(FOUR), **CLASSES),
    "swin3d_t": lambda: video.SwinTransformer3d(
        [2, 4, 4], 16, [1, 1], [2, 4], [2, 4, 4], **CLASSES
    ),
    "swin_t": lambda: models.SwinTransformer([4, 4], 16, [1, 1], [2, 4], [4, 4], **CLASSES),
    "swin_v2_t": lambda: models.SwinTransformer(
        [4, 4],
        16,
        [1, 1],
        [2, 4],
        [4, 4],
        block=swin_transformer.SwinTransformerBlockV2,
        downsample_layer=swin_transformer.PatchMergingV2,
        **CLASSES,
    ),
    "vit_b_16": lambda: models.VisionTransformer(64, 16, 2, 4, 32, 64, **CLASSES),
}
MODELS = sorted((*TORCHVISION, *BY_CLASS, *TIMM))
#: of images, where they are not 64 by 64 pixels; of videos: frames, height, width
SIZES = {
    "eva02_tiny_patch14_224": (56, 56),
    "levit_128s": (128, 128),  # of 64 by 64, one pixel is left for its last BatchNorms
    "mc3_18": (4, 32, 32),
    "swin3d_t": (4, 32, 32),
}

#: what vision.json has of a model, by the way in which it was found
Results = dict[str, Any]


def example_of(name: str) -> Example:
    """A model in evaluation mode, and a batch of two."""
    torch.manual_seed(0)
    if name in BY_CLASS:
        model = BY_CLASS[name]()
    elif name in TORCHVISION:
        model = models.get_model(name, weights=None, **CLASSES, **TORCHVISION[name])
    else:
        model = timm.create_model(name, pretrained=False, **CLASSES, **TIMM[name])
    for label, parameter in model.named_parameters():
        # behind a scale or a head that starts at zero, all gradients would be zero, or nearly
        if not label.endswith("bias") and parameter.abs().max() < 1e-3:
            torch.nn.init.normal_(parameter, std=0.1)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, *SIZES.get(name, (64, 64)), generator=generator)
    return Example(model.eval(), (images,))


def compared(example: Example) -> Results:
    """The differences from PyTorch's outputs, gradients and buffers, in both modes."""
    theirs, exact = example.copied(), example.in_float64()
    ours = values_of(jit(example.model), example)
    expected, true = (values_of(e.model, e) for e in (theirs, exact))
    exact.model.train()
    again = exact.copied()
    torch.manual_seed(1)  # for dropout
    trained = values_of(jit(exact.model), exact)
    torch.manual_seed(1)
    same = values_of(again.model, again)
    return {
        "library": type(example.model).__module__.partition(".")[0],
        "parameters": sum(p.numel() for p in example.model.parameters()),
        "outputs": distance(ours.outputs, expected.outputs, true.outputs),
        "gradients": distance(ours.gradients, expected.gradients, true.gradients),
        "training": max(relative_difference(*two) for two in zip(trained, same, strict=True)),
    }


def first_call(call: Callable[..., Any], example: Example) -> Results:
    """The processor's seconds of the first call with its backward pass."""
    return {"first": timed_values(call, example)[1]}


#: what a process finds out of a model
WAYS: dict[str, Callable[[Example], Results]] = {
    COMPARED: compared,
    JIT: lambda example: first_call(jit(example.model), example),
    COMPILE: lambda example: first_call(torch.compile(example.model), example),
}


def measured(name: str, way: str) -> Results:
    """What is found out of a model in this process."""
    try:
        return WAYS[way](example_of(name))
    except Exception as error:
        return {"problem": problem(error)}


def in_process(name: str, way: str) -> Results:
    """`measured`, in a process of its own that finds no stored programs."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {
        "TORCHFUNC_JAX_CACHE": "0",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in children that end before the call returns
    }
    try:
        run = subprocess.run(
            [sys.executable, __file__, "--measure", name, way],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"the process took more than {PATIENCE} s"}
    if run.returncode:
        reason = run.stderr.strip().rpartition("\n")[2][:200]
        return {"problem": f"the process ended with code {run.returncode}: {reason}"}
    return json.loads(run.stdout.strip().rpartition("\n")[2])


def why_wrong(results: Results) -> str:
    """The reason why a model's results are not PyTorch's; "" if they are."""
    if "problem" in results:
        return results["problem"]
    worst = max(results["outputs"], results["gradients"])
    if worst > 1:
        return f"{worst:.1f} times the error that float32 allows"
    if results["training"] > ALLOWED:
        return f"a relative difference of {results['training']:.1e} in training mode in float64"
    return ""


def about() -> str:
    """The machine and the versions."""
    here = machine()
    return (
        f"{here['cpu']}, {here['cores']} cores; torchvision {torchvision.__version__}, timm "
        f"{timm.__version__}, torch {here['torch']}, jax {here['jax']}, Python {here['python']}."
    )


def page(results: dict[str, dict[str, Results]], where: str) -> str:
    """The page as Markdown; where: the machine and the versions of the results."""
    names = [name for name in MODELS if COMPARED in results.get(name, {})]
    wrong = [(name, why) for name in names if (why := why_wrong(results[name][COMPARED]))]
    lines = [
        "# Models of torchvision and timm",
        "",
        *paragraph(
            f"Under `torchfunc_jax.jit`, {len(names) - len(wrong)} of {len(names)} models of "
            "torchvision and timm, each small and with random weights, have the same outputs, and "
            "the same gradients of all parameters, as in PyTorch. The columns of outputs and "
            "gradients are about evaluation mode in float32. Their numbers are "
            f"{UNIT}. [vision.py](vision.py) writes this page."
        ),
        "",
        *paragraph(
            "The column on training is the largest difference in an output, a gradient or a "
            "running average in training mode, with the same seed for dropout, as a fraction of "
            f"the tensor's largest value; {ALLOWED:.0e} is allowed. There both sides compute in "
            "float64. In float32, an input of a ReLU can be so close to zero that its rounding "
            "error decides its sign, and then the gradients of two correct programs differ."
        ),
        "",
        *paragraph("Differences above 1e-9 have one of three reasons:"),
        "",
        "- A gradient is zero but for rounding errors, as that of a bias in front of a BatchNorm.",
        "  Its difference is divided by 1e-7 of the largest number in all gradients.",
        "- PyTorch's derivative of hardsigmoid has float32's 1/6 also for float64 inputs, which is",
        "  3e-8 off (the MobileNets of the third version, GhostNet, VoVNet).",
        "- timm computes the attention of efficientvit_b0, and the encoded positions of",
        "  edgenext_xx_small and xcit_nano_12_p16_224, in float32.",
        "",
        "| model | library | parameters | outputs | gradients | training |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name in names:
        found = results[name][COMPARED]
        if "problem" not in found:
            lines.append(
                f"| {name} | {found['library']} | {found['parameters']:,} | {found['outputs']:.2f} "
                f"| {found['gradients']:.2f} | {found['training']:.0e} |"
            )
    lines += [
        "",
        *wrong_models(wrong),
        *times_section({n: r for n, r in results.items() if JIT in r and COMPILE in r}),
        *paragraph(where),
        "",
    ]
    return "\n".join(lines)


def times_section(results: dict[str, dict[str, Results]]) -> list[str]:
    """The lines of the section on times; none before anything is timed."""
    if not results:
        return []
    lines = [
        "## First calls",
        "",
        *paragraph(
            "The first call of a model and its backward pass, in evaluation mode in float32, for "
            "two images of about 64 by 64 pixels, or two videos of four frames of 32 by 32. Each "
            "model is called in a process of its own, which finds no programs that an earlier "
            "process has stored. The times are processor times of all threads and of the compilers "
            "that are called, in seconds. If a program is called often, jit compiles it once more "
            "in the background, with all of XLA's optimizations; that is not part of a first call."
        ),
        "",
        "| model | jit | torch.compile |",
        "| --- | ---: | ---: |",
    ]
    for name in sorted(results):
        cells = (_cell(results[name].get(way, {})) for way in (JIT, COMPILE))
        lines.append(f"| {' | '.join((name, *cells))} |")
    both = [[results[n][w].get("first") for w in (JIT, COMPILE)] for n in results]
    ratios = [ours / theirs for ours, theirs in both if ours and theirs]
    return [
        *lines,
        "",
        *paragraph(
            f"The geometric mean of the ratios is {statistics.geometric_mean(ratios):.2f}; in "
            f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)} models jit needs less time."
        ),
        "",
    ]


def _cell(found: Results) -> str:
    """The seconds of a first call; a dash where there are none."""
    return f"{found['first']:.1f}" if "first" in found else "–"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAMES", help="measure these models anew, with commas")
    parser.add_argument("--again", action="store_true", help="measure all models anew")
    parser.add_argument(
        "--ways",
        default=",".join(WAYS),
        help=f"what is measured, with commas; all of {', '.join(WAYS)} by default",
    )
    parser.add_argument(
        "--measure",
        nargs=2,
        metavar=("NAME", "WAY"),
        help="measure one model in one way in this process, and print the results as JSON",
    )
    asked = parser.parse_args()
    names = asked.only.split(",") if asked.only else list(MODELS)
    ways = asked.ways.split(",")
    name, way = asked.measure or (names[0], ways[0])
    for given, known in (({name, *names}, MODELS), ({way, *ways}, WAYS)):
        if unknown := sorted(given - set(known)):
            parser.error(f"not known: {', '.join(unknown)}; expected some of {', '.join(known)}")
    if asked.measure:
        print(json.dumps(measured(name, way)))
        return 0

    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}, "about": ""}
    results = stored["models"]
    if asked.again or asked.only:
        for name in names:
            results[name] = {w: r for w, r in results.get(name, {}).items() if w not in ways}
    waiting = [(n, w) for w in ways for n in names if w not in results.get(n, {})]
    console = Console(stderr=True)
    for name, way in track(waiting, "models", console=console):
        found = results.setdefault(name, {})[way] = in_process(name, way)
        stored["about"] = about()
        RESULTS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
        if way == COMPARED:
            said = why_wrong(found) or "as in PyTorch"
        else:
            said = found.get("problem") or f"first call {_cell(found)} s"
        console.print(f"{name}, {way}: {said}")
    PAGE.write_text(page(results, stored["about"]))
    known = [results[n][COMPARED] for n in names if COMPARED in results.get(n, {})]
    return 1 if any(map(why_wrong, known)) else 0


if __name__ == "__main__":
    sys.exit(main())
