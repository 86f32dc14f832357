"""What `mha_c.torch.watch` is made of: seen.py, what the user gets; names.py, who called; operands.py, what determines
the weights of a call; functions.py and modules.py, calls of torch's functions and of layers; places.py, where these are
put while somebody watches."""
