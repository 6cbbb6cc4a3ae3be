"""jit: a function is traced once, compiled by XLA, and its program kept for calls that are alike.

- ``jitted``: what ``torchfunc_jax.jit`` returns: which programs it keeps, and which of them a call runs.
- ``program``: a function traced into one JAX program, whose captured tensors are inputs.
- ``compiled``: a program compiled, and called with torch tensors or jax.Arrays.
- ``graph_node``: such a call as one node of torch's graph.
- ``outer_products``: a rewriting of programs that saves XLA a copy.
- ``explaining``: why a program was compiled, in sentences.
"""
