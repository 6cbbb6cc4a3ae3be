"""Writes torch_func_names.md: every public name of torch.func and functorch, what it is here, and
the test that shows it.

    python docs/torch_func_names.py

A test (tests/docs/test_torch_func_names.py) checks that no name is missing, that the tests exist
and that the page is the one written by this script.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from pathlib import Path
from types import ModuleType

import functorch
import functorch.einops
import functorch.experimental
import torch
import torch._functorch.functional_call
import torch._functorch.make_functional

PAGE = Path(__file__).with_suffix(".md")

_AGAINST = "transforms/test_transforms.py::test_against_torch_func"
_EXAMPLES = "docs/test_docstrings.py::test_examples_give_the_same_numbers"
_FAMILY = "modules/test_make_functional.py::"

#: name -> the tests that compare it with torch's
TESTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "vmap",
            "grad",
            "grad_and_value",
            "vjp",
            "jvp",
            "jacrev",
            "jacfwd",
            "hessian",
            "linearize",
            "functional_call",
            "stack_module_state",
        ),
        (_AGAINST, _EXAMPLES),
    ),
    "functionalize": ("tools/test_parity.py::test_transforms_by_name",),
    "debug_unwrap": ("docs/test_torch_func_names.py::test_debug_unwrap",),
    "chunk_vmap": ("transforms/test_transforms.py::test_chunk_vmap",),
    "replace_all_batch_norm_modules_": (_FAMILY + "test_replace_all_batch_norm_modules_",),
    "rearrange": (_FAMILY + "test_rearrange",),
    "make_functional": (_FAMILY + "test_make_functional",),
    "make_functional_with_buffers": (_FAMILY + "test_make_functional_with_buffers",),
    "FunctionalModule": (_FAMILY + "test_make_functional",),
    "FunctionalModuleWithBuffers": (_FAMILY + "test_make_functional_with_buffers",),
    "make_functional_deprecated_v1": (_FAMILY + "test_make_functional_deprecated_v1",),
    "make_functional_with_buffers_deprecated_v1": (
        _FAMILY + "test_make_functional_with_buffers_deprecated_v1",
    ),
    "combine_state_for_ensemble": (_FAMILY + "test_combine_state_for_ensemble",),
    "functional_init": (_FAMILY + "test_functional_init",),
    "functional_init_with_buffers": (_FAMILY + "test_functional_init_with_buffers",),
    **dict.fromkeys(
        ("extract_weights", "extract_buffers", "load_weights", "load_buffers"),
        (_FAMILY + "test_extract_and_load", _FAMILY + "test_errors"),
    ),
    "load_state": (_FAMILY + "test_make_functional_with_buffers_deprecated_v1",),
    "create_names_map": (_FAMILY + "test_create_names_map",),
    "transpose_stack": (_FAMILY + "test_transpose_stack",),
    "construct_stacked_leaf": (_FAMILY + "test_construct_stacked_leaf",),
    "raise_parameter_tying_error": (_FAMILY + "test_errors",),
}

#: What is not ported, and why.
LEFT = {"make_fx": "stays torch's: it traces into FX graphs"}


def _public(module: ModuleType, own: bool = False) -> list[str]:
    """Public functions and classes of a module; own: only those that were made in it."""
    found = getattr(module, "__all__", None) or [
        name for name in dir(module) if not name.startswith("_")
    ]
    return [
        name
        for name in found
        if callable(thing := getattr(module, name))
        and not inspect.ismodule(thing)
        and (not own or thing.__module__ == module.__name__)
    ]


def namespaces() -> dict[str, list[str]]:
    """The names in question, by where torch has them."""
    make = torch._functorch.make_functional
    return {
        "torch.func": _public(torch.func),
        "torch": ["vmap"],
        "functorch": _public(functorch),
        "functorch.experimental": _public(functorch.experimental),
        # by name: importing the module of that name hides the function
        "functorch.einops": ["rearrange"],
        "torch._functorch.make_functional": _public(make, own=True),
        "torch._functorch.functional_call": _public(torch._functorch.functional_call, own=True),
    }


def home(name: str) -> str:
    """Where a name is here."""
    for module in (
        "torchfunc_jax",
        "torchfunc_jax.make_functional",
        "torchfunc_jax.functional_call",
    ):
        if hasattr(importlib.import_module(module), name):
            return f"{module}.{name}"
    raise AttributeError(f"torchfunc_jax has no {name!r}")


def page() -> str:
    """The page as Markdown."""
    places: dict[str, list[str]] = {}
    for namespace, names in namespaces().items():
        for name in names:
            places.setdefault(name, []).append(f"`{namespace}`")
    lines = [
        "# The names of torch.func and functorch",
        "",
        *textwrap.wrap(
            "The table has every public name, its modules in torch, its name here, and the test "
            "that compares the two. Signatures are torch's; "
            "[test_torch_func_names.py](../tests/docs/test_torch_func_names.py) checks them. "
            "[test_patched_names.py](../tests/transforms/test_patched_names.py) checks that "
            "`torchfunc_jax.patch()` replaces each name of `torch.func`, `torch`, `functorch` and "
            "`functorch.experimental`. [torch_func_names.py](torch_func_names.py) writes this "
            "page.",
            100,
            break_long_words=False,
            break_on_hyphens=False,
        ),
        "",
        "| name | in torch | here | test |",
        "| --- | --- | --- | --- |",
    ]
    for name in sorted(places, key=str.lower):
        tests = "<br>".join(
            f"[{test.partition('::')[2]}](../tests/{test.partition('::')[0]})"
            for test in TESTS.get(name, ())
        )
        here = LEFT.get(name) or f"`{home(name)}`"
        lines.append(f"| `{name}` | {', '.join(places[name])} | {here} | {tests} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
