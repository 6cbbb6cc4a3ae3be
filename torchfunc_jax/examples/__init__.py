"""Programs that use torchfunc_jax as a user would: the ensemble on handwritten digits that
`torchfunc-jax ensemble` runs.
"""
