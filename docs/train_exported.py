"""Trains with an exported training step, where neither PyTorch nor this project is installed:
`python train_exported.py FOLDER DATA.npz`.

FOLDER has program.stablehlo and weights.npz, as ``export(TrainingStep(...), *batch).save(FOLDER)``
writes them. DATA.npz has an array for each argument of the step, x0, x1, ..., whose first dimension
counts the batches. The losses are printed, one a line; the weights and the optimizer's state after
the last step are written to weights.npz again, so that the next run goes on from there.
"""

import sys

import jax
import numpy as np

folder, data = sys.argv[1:]
jax.config.update("jax_enable_x64", True)  # for 64-bit numbers, such as a batch norm's counter
with open(f"{folder}/program.stablehlo", "rb") as file:
    step = jax.jit(jax.export.deserialize(bytearray(file.read())).call)
weights = dict(np.load(f"{folder}/weights.npz"))
batches = np.load(data)
for batch in zip(*(batches[f"x{i}"] for i in range(len(batches.files))), strict=True):
    loss, written = step(weights, *batch)
    weights |= written
    print(float(loss))
np.savez(f"{folder}/weights.npz", **{name: np.asarray(x) for name, x in weights.items()})
