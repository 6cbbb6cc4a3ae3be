"""jit: traces a function once, compiles the program with XLA, and keeps it for calls with the same
shapes, dtypes and static values.

- ``jitted``: the object that ``torchfunc_jax.jit`` returns; it keeps programs and chooses which of
  them a call runs.
- ``program``: a function traced into one JAX program, whose captured tensors are inputs.
- ``compiled``: a compiled program, called with torch tensors or jax.Arrays.
- ``effects``: what the function changes beside its result: Python objects, modules, ``.grad``.
- ``autograd``: such a call as one node of torch's graph.
- ``simplify``: removes what a program need not compute.
- ``explaining``: says in sentences why a program was compiled.
"""
