"""What a decoder keeps from step to step, for tensors."""
