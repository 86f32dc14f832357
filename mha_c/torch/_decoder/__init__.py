"""What a decoder keeps from step to step, as tensors."""
