"""Players: attention step by step, tile by tile and line by line, and a trained layer whose pictures mean something."""
