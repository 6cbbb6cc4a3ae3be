"""Un-jitted code as a record: Python runs at each call, once and in order; what it computes is written down, and run as one program.

What cannot be recorded (jax.Arrays, autocast, a mode of the user's, tensors that are not on the CPU, and others: ``Unrecordable`` says why)
runs operator by operator instead, and the function starts again; its next calls do so at once.

- ``transforms``: a call of a transform: whether it is recorded, how its function runs meanwhile, its result.
- ``recorder``: torch's functions, with their static arguments and the operands' shapes, become entries; a transform is a begin and an end.
- ``tensor``: what the user's function gets in the place of tensors.
- ``functions``, ``checkpointing``: torch.autograd.Function and torch.utils.checkpoint as parts of a record.
- ``programs``: records compiled, which are kept for calls whose record is the same.
- ``replay``: the entries as a function that JAX traces, through the public transforms.
- ``loops``: steps that repeat are traced and compiled once.
- ``tiers``: a program is compiled fast at first, and well in a thread when it has been used for a while.
- ``disk``: compiled programs in the user's cache folder, for the next process.
"""
