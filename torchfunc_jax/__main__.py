"""``python -m torchfunc_jax`` runs the command ``torchfunc-jax`` if its
script is not on the path.
"""

from torchfunc_jax.cli import main

if __name__ == "__main__":
    main()
