"""``python -m torchfunc_jax``: the command, for where its script is not on the path."""
from torchfunc_jax.cli import main

if __name__ == "__main__":
    main()
