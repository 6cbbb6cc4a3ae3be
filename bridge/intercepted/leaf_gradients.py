"""``backward()`` inside a trace, and what a jitted function does to the ``.grad`` of tensors from
outside.

PyTorch's engine runs as always, on traced tensors. What it leaves in the ``.grad`` of a parameter
or an argument would be dead when the trace has closed; ``LeafGradients`` takes it back, and
bridge/jit/effects.py makes results of the program of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.grad_mode import set_multithreading_enabled

from bridge import private, private_calls
from bridge.convert import trees
from bridge.errors import CalledItself, at_line
from bridge.intercepted.gradient_hooks import (
    in_users_code,
    module_hooks_depend,
    refuse_inside_blocks,
)
from bridge.private_calls import Ours
from bridge.trace.levels import innermost, state
from bridge.trace.storage import Node
from bridge.trace.tracing import Traced, lift, value_of
from bridge.transform_kinds import NUMBERED

_IN_TRANSFORM = (
    "backward() called inside a functorch transform. This is not supported, please use "
    "functorch.grad or functorch.vjp instead or call backward() outside of functorch transforms."
)


class OutsideGraph(RuntimeError):
    """backward() goes back through a graph that was made before the jitted function was called."""


class AskedForGradients(BaseException):
    """Ends a trace in which gradients are asked for by tensors that do not require grad; numbers:
    those of ``tracing.numbered``.

    The arguments of a jitted function, and the leaves that it makes, can be differentiated:
    libraries leave ``requires_grad_`` out where ``torch.compiler.is_compiling()`` is true, because
    torch.compile does not trace it.
    """

    def __init__(self, numbers: frozenset[int]) -> None:
        super().__init__()
        self.numbers = numbers


class LeafGradients:
    """The ``.grad`` of tensors from outside, while a jitted function is traced.

    Args:
        arguments: by the id of each argument's traced tensor, the argument's number among the
            leaves of the call.

    Attributes:
        before: by id, each tensor whose ``.grad`` the function has read or set, with its earlier
            ``.grad``.
        asked: those whose ``.grad`` the function read before it had set it.
        hooks: the hooks on traced tensors, and the autograd.Functions' backwards, that change
            Python objects.
        of_modules: the nodes of modules' backward hooks, see ``module_hooks_depend``.
        pulled: by id, the arguments that PyTorch's engine has given gradients.
    """

    def __init__(self, arguments: Mapping[int, int]) -> None:
        self.arguments = arguments
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.asked: set[int] = set()
        self.hooks: list[Any] = []
        self.of_modules: list[tuple[Callable[..., Any], Sequence[Any]]] = []
        self.pulled: dict[int, torch.Tensor] = {}

    def touch(self, t: torch.Tensor, read: bool) -> None:
        """Note that the function reads a tensor's ``.grad``, or sets it."""
        if (
            id(t) in self.before
            or not t.is_leaf
            or (type(t) is Traced and id(t) not in self.arguments)
        ):
            return
        with private.below_python():
            grad = t.grad
        self.before[id(t)] = t, grad
        if read:
            self.asked.add(id(t))
            if grad is not None:
                # its presence, shape and dtype are conditions of the program, as those of each
                # captured tensor
                lift(grad)

    def pull(self, tensors: Iterable[Any]) -> None:
        """Note tensors that PyTorch's engine gives gradients."""
        self.pulled.update({id(t): t for t in tensors if id(t) in self.arguments})

    def refuse_late_changes(self, out: Any) -> None:
        """Refuse hooks that change Python objects, if a gradient may pass through them in another
        way than by PyTorch's engine before the function returns; out: what it returns.
        """
        if not (self.hooks or self.of_modules):
            return
        later = any(isinstance(t, torch.Tensor) and t.requires_grad for t in trees.flatten(out)[0])
        if self.hooks and (later or not all(hook.called for hook in self.hooks)):
            raise CalledItself(
                "a hook on the gradient of a tensor, or the backward of an autograd.Function, "
                "changes Python objects"
            )
        if later and module_hooks_depend(self.of_modules):
            raise CalledItself(
                "a backward hook of a module changes Python objects, or uses other tensors"
            )

    def changed(self) -> list[tuple[torch.Tensor, Any]]:
        """The tensors that have been given another ``.grad``, or None, each with that; all have
        their earlier ``.grad`` again.
        """
        found = []
        with private.below_python():
            for key, (t, grad) in self.before.items():
                if t.grad is not grad or key not in self.asked:
                    found.append((t, t.grad))
                    t.grad = grad
        return found

    def read(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The tensors whose ``.grad`` the function read before it had set it, each with that
        ``.grad``.
        """
        return [self.before[key] for key in self.asked]


def run_backward(
    outputs: Sequence[Any], *args: Any, accumulate_grad: bool = False, **kwargs: Any
) -> Any:
    """The function with which torch.autograd calls its engine: ``backward`` is refused if it would
    leave dead tensors behind.
    """
    level, leaves = state.level, list[torch.Tensor]()
    inputs = args[3] if len(args) > 3 else kwargs.get("inputs", ())
    for t in inputs:
        refuse_inside_blocks(t)
    level.root.pulls = True
    if state.jitting:
        asked = {t.number for t in inputs if type(t) is Traced and not t.requires_grad}
        if asked and asked.isdisjoint(level.root.leaves | {-1}):
            raise AskedForGradients(frozenset(asked))
    if accumulate_grad:
        if level.kind in NUMBERED:
            raise RuntimeError(_IN_TRANSFORM + at_line())
        grads, leaves = (level.root.grads, _reached(outputs, inputs))
        if grads is not None and level.parent is level.root:
            for t in leaves:
                grads.touch(t, read=True)
        elif any(type(t) is not Traced or t.node.level is not level for t in leaves):
            if innermost(NUMBERED) is not None:
                raise RuntimeError(_IN_TRANSFORM + at_line())
            raise RuntimeError(
                "backward(): it would set the .grad of a tensor from outside, which only a jitted "
                "function that is called with torch tensors can do, and not from the body of a "
                f"cond, a checkpoint or an autograd.Function; use torch.autograd.grad{at_line()}"
            )
    if level.root.grads is not None:
        level.root.grads.pull(leaves or inputs)
    # PyTorch's engine has a thread for each CUDA device, in which no trace is open
    with set_multithreading_enabled(False), in_users_code():
        found = private_calls.original("run_backward")(
            outputs, *args, accumulate_grad=accumulate_grad, **kwargs
        )
    for t in leaves:
        with private.below_python():
            grad = t.grad if t.is_leaf else None
        # a view of what nothing else refers to
        if type(grad) is Traced and grad.node.parent is not None and not grad.requires_grad:
            grad.node = Node(value_of(grad), level)
    return found


def _reached(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The leaves whose ``.grad`` backward will set; raises OutsideGraph if it would go on outside
    of the trace.
    """
    nodes = _behind(map(_node, outputs))
    captured = [t for t, _ in state.level.root.captured.values() if t.requires_grad]
    outside = {id(_node(t)) for t in captured if not t.is_leaf}
    crossed = [node for node in nodes if id(node) in outside or node.name() == "_ComputedBackward"]
    further = _behind(crossed)
    if crossed and (not inputs or not {id(_node(t)) for t in inputs}.isdisjoint(map(id, further))):
        raise OutsideGraph(
            f"its backward() goes back through a graph that was made outside of it{at_line()}"
        )
    if inputs:
        return [t for t in inputs if isinstance(t, torch.Tensor)]
    return [node.variable for node in nodes if node.name() == "torch::autograd::AccumulateGrad"]


def _node(t: Any) -> Any:
    """The node of PyTorch's graph that gets the gradient of a tensor, or of a GradientEdge; None if
    the tensor requires no grad.
    """
    if not isinstance(t, torch.Tensor):
        return t.node
    if not t.requires_grad:
        return None
    with private.below_python(), torch.enable_grad():
        node = torch.Tensor.grad_fn.__get__(t)  # type: ignore[attr-defined]
        return t.view_as(t).grad_fn.next_functions[0][0] if node is None else node


def _behind(nodes: Iterable[Any]) -> list[Any]:
    """These nodes, and all to which they lead, each once."""
    found: dict[int, Any] = {}
    waiting = [node for node in nodes if node is not None]
    while waiting:
        node = waiting.pop()
        if id(node) not in found:
            found[id(node)] = node
            waiting += [n for n, _ in node.next_functions if n is not None]
    return list(found.values())


def _zero_grad(owner: Any, set_to_none: bool = True) -> None:
    """zero_grad of an optimizer or a module. It sets each ``.grad`` to None without the question
    whether there is one: its answer would be a condition of the program.
    """
    parameters = (
        owner.parameters()
        if isinstance(owner, torch.nn.Module)
        else (p for group in owner.param_groups for p in group["params"])
    )
    for p in parameters:
        p.grad = None


def _sets_to_none(_: Any, set_to_none: bool = True) -> bool:
    return state.level is not None and set_to_none


private_calls.IN_TRACES.update(
    {
        # by these allow_mutation_on_saved_tensors knows a saved tensor, and its memory, which it
        # clones before that memory is written; one of a trace has no address, but a node whose
        # root is its memory
        "saved_tensor": Ours(
            lambda t: (id(t), id(t.node.root), t._version), lambda t: type(t) is Traced
        ),
        "saved_memory": Ours(lambda t: (id(t.node.root), t._version), lambda t: type(t) is Traced),
        "run_backward": Ours(run_backward),
        "optimizer_zero_grad": Ours(_zero_grad, _sets_to_none),
        "module_zero_grad": Ours(_zero_grad, _sets_to_none),
        # how many steps an optimizer has made: it is computed with in double precision, as Python
        # computes with the number
        "optimizer_number": Ours(
            lambda x: x.double(), lambda x: state.jitting and isinstance(x, torch.Tensor)
        ),
    }
)
