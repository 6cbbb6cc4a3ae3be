"""What lowerings of every family are built of: PyTorch's type promotion, builders of element-wise operators."""
