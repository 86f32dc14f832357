"""What a decoder keeps from step to step, and the layers' calls that go on from it."""
