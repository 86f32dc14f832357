"""What a decoder keeps from step to step, and the calls of layers that use it."""
