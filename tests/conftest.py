"""What every test starts from: the same seeds, few threads, JAX's compilations kept between runs, and the user's JAX settings untouched."""
from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest
import torch

from bridge.lowering.registry import LOWERINGS, OVERRIDDEN
from bridge.operators.register import register_lowering
from bridge.process import process
from bridge.record import disk

_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "jax"

jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(_CACHE)))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
os.environ.setdefault("TORCHFUNC_JAX_TRACEBACK", "full")  # who develops this library wants its own frames too
disk.place = lambda: None  # the user's cache folder stays as it is; tests that start a process give it a folder of its own
torch.set_num_threads(1)  # the tests run in several processes

hypothesis.settings.register_profile("default", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    torch.manual_seed(0)
    np.random.seed(0)
    process.unrecordable.clear()  # or what one test cannot record, the tests after it would not record either: they share functions
    before = jax.config.jax_enable_x64, torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    after = jax.config.jax_enable_x64, torch.get_default_dtype(), torch.is_grad_enabled()
    torch.set_default_dtype(before[1])
    assert after == before, "the test left JAX's 64-bit setting, torch's default dtype or torch's grad mode changed"


@pytest.fixture
def lowerings_as_before() -> Iterator[None]:
    """After the test, operators have the lowerings that they had before it."""
    before, overridden = dict(LOWERINGS), set(OVERRIDDEN)
    yield
    for op in OVERRIDDEN - overridden:
        if op in before:
            register_lowering(op)(before[op])
            OVERRIDDEN.discard(op)


_MEMORY = 2 * 2**30  # bytes that a process may take before it forgets what it has compiled: without, 4.5 GB after half of the tests


@pytest.fixture(scope="module", autouse=True)
def _little_memory() -> Iterator[None]:
    """After a file of tests, forget compiled programs if they fill the memory, so that two processes run on a small machine."""
    yield
    with contextlib.suppress(OSError, AttributeError):  # Linux alone says how much it is, and how to give it back
        if int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() > _MEMORY:
            jax.clear_caches()
            process.executables.clear()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)


#: The files that ask every operator of PyTorch's test database, or every dtype of each: what `make test-versions` leaves out.
SWEEPS = frozenset(
    {
        "test_ambient_state.py", "test_operators.py", "test_ways_to_call.py", "test_special_floats.py", "test_python_numbers.py",
        "test_refused_dtypes.py",
        "test_every_module.py", "test_each_lowering.py",
    }
)  # fmt: skip


#: The longest tables: of about so many cases one is in `make test`, the others are slow tests.
THINNED = {
    "test_operators.py::test_what_was_right_is_right": 20, "test_every_module.py::test_first_inputs": 10,
    "test_random_nestings.py::test_agrees_with_torch_func": 6, "test_random_autograd_programs.py::test_first_and_second_derivatives": 2,
    "test_captured_tensors_that_change.py::test_python_runs_once_with_the_tensors_that_it_takes": 3,
    "test_randomness_modes.py::test_three_kinds": 4, "test_refused_values.py::test_refused_as_by_pytorch": 4,
    "test_segment_reduce.py::test_values_and_gradients_are_pytorchs": 12,
    "test_packed_sequences.py::test_packing": 2, "test_packed_sequences.py::test_recurrent_layers": 2,
    "test_packed_sequences.py::test_an_initial_state_in_the_order_of_the_batch": 2,
    "test_convolutions.py::test_value_and_derivatives": 8, "test_special_floats.py::test_the_values_and_signs_of_zero_are_pytorchs": 2,
    "test_flex_attention.py::test_values_and_gradients": 4, "test_grouped_matmul.py::test_products": 4,
    "test_python_numbers.py::test_as_in_pytorch": 8, "test_derivatives_at_kinks.py::test_in_every_mode": 8,
    "test_guards.py::test_a_python_value_that_changes": 6, "test_guards.py::test_tensors_of_a_trace_that_share_memory": 6,
    "test_guards.py::test_inputs_of_a_transform_that_share_memory": 4, "test_custom_function_styles.py::test_backward_from_outside": 6,
    "test_backward_and_optimizers.py::test_each_output_requires_grad_where_torchs_does": 4,
    "test_backward_and_optimizers.py::test_nothing_goes_back_through_integers": 4,
    "test_backward_and_optimizers.py::test_what_a_transform_returns_requires_grad_where_torch_funcs_does": 4,
    "test_views_of_arguments.py::test_memory_is_torch_funcs_under_vmap": 4,
    "test_views_of_arguments.py::test_memory_is_torch_funcs_under_the_other_transforms": 2,
    "test_torch_compile.py::test_a_transform_of_a_compiled_function": 4,
    "test_resumed_by_torch.py::test_python_runs_once_and_in_order": 5, "test_vjp_called_later.py::test_beside_torch_func": 5,
    "test_ambient_state.py::test_the_table": 4, "test_records.py::test_steps_that_repeat": 2,
    "test_records.py::test_values_of_a_captured_tensor": 4, "test_records.py::test_masks_and_indices_from_outside_are_recorded": 2,
    "test_records.py::test_values_asked_for_again_and_again": 8, "test_guards.py::test_inputs_that_share_memory": 4,
    "test_guards.py::test_values_of_captured_tensors_that_the_function_asks_for": 4,
    "test_in_place_and_views.py::test_an_integer_tensor_as_index": 8, "test_edge_values.py::test_writes_to_memory_that_is_read": 2,
    "test_in_place_and_views.py::test_writes_to_memory_that_several_tensors_share": 4,
    "test_in_place_and_views.py::test_writes_to_part_of_a_view_in_which_elements_are_several": 2,
    "test_torch_script.py::test_it_computes_what_python_does": 8, "test_gradient_hooks.py::test_as_torch_func": 2,
    "test_backward_inside_jit.py::test_the_gradient_goes_back_through": 4, "test_backward_of_vmap.py::test_backward_of_a_vmap": 2,
    "test_custom_function_rules.py::test_needs_input_grad": 2, "test_modules.py::test_load_changes_no_value_but_by_rounding": 2,
    "test_sparse_matrices.py::test_products_in_every_transform": 8, "test_sparse_matrices.py::test_products_in_jitted_transforms": 4,
    "test_backward_inside_jit.py::test_recurrent_layers_are_trained_inside": 3,
    "test_nested_derivatives.py::test_no_grad_inside_nested_derivatives": 8,
    "test_nested_derivatives.py::test_no_grad_in_a_checkpoint_in_nested_derivatives": 4,
    "test_nested_derivatives.py::test_the_value_of_a_derivative_has_derivatives": 2,
    "test_nested_derivatives.py::test_what_the_function_inside_keeps_is_used_outside_of_it": 3,
    "test_tensors_kept_elsewhere.py::test_what_is_kept_is_read_after_the_call": 6,
    "test_tensors_kept_elsewhere.py::test_it_requires_grad_if_it_does_outside": 3,
    "test_backward_inside_jit.py::test_training_inside_leaves_what_the_function_leaves": 4,
    "test_rewritten_products.py::test_layers_of_torch_with_few_rows": 4, "test_rewritten_products.py::test_sums_of_products_in_loops": 4,
    "test_scan_blocks.py::test_gradients": 4, "test_export.py::test_any_batch": 4,
    "test_torchs_own_derivatives.py::test_a_gradient_that_is_no_transpose_is_itself_differentiated": 4,
    "test_backward_and_optimizers.py::test_cotangents_that_autograd_maps_over": 4, "test_flax_modules_in_torch.py::test_linen_layers": 4,
    "test_torch_modules_in_flax.py::test_without_a_key_nothing_is_drawn": 4,
    "test_views_of_arguments.py::test_strides_of_lanes_are_those_of_torch_func": 4,
    "test_guards.py::test_a_module_that_changes": 4,
    "test_trainer.py::test_a_frozen_member_keeps_its_parameters_and_the_state_of_its_optimizer": 2,
    "test_forked_processes.py::test_a_forked_process": 2, "test_records.py::test_masks_without_dimensions": 2,
    "test_random_numbers_of_torch.py::test_a_derivative_uses_the_numbers_of_the_value": 4,
    "test_random_numbers_of_torch.py::test_a_value_that_is_asked_for_has_the_numbers_of_the_result_and_python_runs_once": 2,
    "test_edge_values.py::test_cross_entropy_of_targets_that_are_ignored": 2,
    "test_torchs_own_derivatives.py::test_reverse_mode_is_autograds": 2,
    "test_memory_order.py::test_as_strided_of_a_computed_tensor": 2, "test_rewritten_products.py::test_lanes_that_lie_before_the_rows": 2,
    "test_torchs_own_derivatives.py::test_complex_logsumexp": 2,
    "test_random_autograd_programs.py::test_gradients_of_torchs_go_through_transforms_inside_another_one": 2,
    "test_refused_values.py::test_pytorchs_own_bad_inputs": 2, "test_wraparound.py::test_numbers_wrap_or_are_refused_as_in_pytorch": 2,
    "test_records.py::test_autocast_is_recorded": 2, "test_in_place_and_views.py::test_a_program_computes_what_it_computes_in_torch": 2,
    "test_transforms.py::test_compiled_against_torch_func": 2,
    "test_torch_script.py::test_what_a_script_calls_may_have_been_optimized_before": 2, "test_tensor_subclasses.py::test_subclasses": 2,
    "test_effects_on_objects.py::test_the_table": 12,
    "test_transforms.py::test_strict_jvp_refuses_what_torch_funcs_refuses": 2, "test_calculus.py::test_as_nested_torch_func": 2,
    "test_custom_operators.py::test_runs_in_the_users_own_jax": 4, "test_custom_operators.py::test_transforms_of_transforms": 2,
    "test_custom_operators.py::test_what_cannot_be_done_says_why": 3,
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="needs a CUDA device that torch and JAX both see")
    for item in items:
        table = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        if zlib.crc32(item.name.encode()) % THINNED.get(table, 1):  # by name, so that no way to call is left out of all of them
            item.add_marker("slow")
        if item.path.name in SWEEPS:
            item.add_marker("sweep")
        if "gpu" in item.keywords and not (torch.cuda.is_available() and jax.default_backend() == "gpu"):
            item.add_marker(missing)


@pytest.fixture
def unrecorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Fails if something was not recorded; gives, and forgets, what was not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(process, "unrecordable", set())
    caplog.set_level(logging.INFO, "torchfunc_jax")

    def take() -> list[str]:
        found = list(caplog.messages)
        caplog.clear()
        return found

    yield take
    assert not take()
