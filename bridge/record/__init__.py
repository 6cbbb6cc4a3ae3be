"""Un-jitted code as a record: Python runs at each call, once and in order; its operators are
written down and run as one program.

Some functions cannot be recorded: they use jax.Arrays, hooks on gradients, a mode of the user's,
and others. ``Unrecordable`` says why. Such a call goes on in PyTorch itself; the function's next
calls run there from the beginning.

- ``transforms``: decides whether a transform is recorded, runs its function meanwhile, and gives
  its results.
- ``recorder``: writes torch functions down as entries; a transform is a begin and an end.
- ``entries``: what one entry holds, and walks over an operator's arguments.
- ``inference``: makes an operator's entry: the shapes and dtypes of its results.
- ``rules``: torch functions that are not recorded as operators.
- ``tensor``: the tensors without values that the user's function gets.
- ``functions``: torch.autograd.Function and torch.utils.checkpoint as parts of a record.
- ``programs``: compiles records, and keeps the programs for calls whose record is the same.
- ``replay``: runs the entries again, through the public transforms, as a function that JAX traces.
- ``in_torch``: goes on in PyTorch where a record ends.
- ``loops``: finds steps that repeat, which are traced and compiled once.
- ``words``: a record in words that mean the same in the next process, which finds its program so.
"""
