"""Programs that fork after they have used JAX, as a DataLoader with workers does on Linux: the
child has torch.func's results, and ends.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

CASES = """
import bridge, numpy, os, sys, torch, torchfunc_jax
from torch.utils.data import DataLoader, Dataset

layer = torch.nn.Linear(4, 2)

def cases(tf):
    f = lambda v: v.sin() ** 3 + v.cos()  # the parent has not compiled any of these
    return {
        "grad": lambda x: tf.grad(lambda v: f(v).sum())(x),
        "vmap of grad": lambda x: tf.vmap(tf.grad(f))(x),
        "jacrev": lambda x: tf.jacrev(f)(x),
        "hessian": lambda x: tf.hessian(lambda v: f(v).prod())(x),
        "jvp": lambda x: tf.jvp(f, (x,), (x,))[1],
        "vjp": lambda x: tf.vjp(f, x)[1](x)[0],
        "functional_call": lambda x: tf.vmap(
            lambda b: tf.functional_call(layer, {"bias": b}, (x,))
        )(torch.stack([x[:2], x[2:]])),
    }

theirs, ours = cases(torch.func), cases(torchfunc_jax)
ours["jit"] = torchfunc_jax.jit(theirs["grad"])
theirs["params"] = lambda x: layer.weight.detach() + x
ours["params"] = lambda x: torch.from_numpy(numpy.array(bridge.params(layer)["weight"])) + x
ours["made before"] = torchfunc_jax.vmap(torchfunc_jax.grad(lambda v: torch.exp(v) * v))
theirs["jit"] = theirs["grad"]
theirs["made before"] = torch.func.vmap(torch.func.grad(lambda v: torch.exp(v) * v))
x = torch.arange(4.0)

def check():
    for name, function in ours.items():
        torch.testing.assert_close(function(x), theirs[name](x), msg=name)

class Rows(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, k):
        check()
        return ours["grad"](x + k)
"""
USED = "torchfunc_jax.grad(torch.sum)(x); torchfunc_jax.jit(torch.neg)(x)\n"
# JAX works through the functions of a program in parallel: its threads wait for more work from then
# on
THREADS = (
    USED
    + """
import jax
def many(x, functions=[jax.jit(lambda x, k=k: jax.numpy.sin(x) * k) for k in range(100)]):
    for function in functions:
        x = function(x)
    return x
jax.jit(many)(1.0)
"""
)
LOADER = """
for batch in DataLoader(Rows(), batch_size=2, num_workers=2, timeout=60):
    assert batch.shape == (2, 4)
"""
FORK = """
child = os.fork()
if not child:
    torch.set_num_threads(1)
    check()
    sys.exit(7)  # runs what is registered for the end of the process
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
GRANDCHILD = """
child = os.fork()
if not child:
    torch.set_num_threads(1)
    if not os.fork():
        check()
        os._exit(7)
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
UNUSED = FORK.replace(
    "    check()\n",
    """    check()
    from bridge.process import process
    assert not process.forked and process.programs.records  # the child has started JAX itself
""",
)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(USED + LOADER, id="DataLoader"),
        pytest.param(USED + FORK, id="fork"),
        pytest.param(USED + GRANDCHILD, id="grandchild"),
        pytest.param(THREADS + FORK, id="fork beside waiting threads"),
        pytest.param(UNUSED, id="JAX not used before"),
    ],
)
def test_a_forked_process(program: str) -> None:
    """The parent goes on with JAX afterwards."""
    program = CASES + program + 'check()\nprint("the parent has ended")\n'
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout) == (0, "the parent has ended\n"), done.stderr
