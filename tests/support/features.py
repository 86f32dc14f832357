"""Tables of the docs, a row for each feature: torch_features.py and notebook_features.py fill one, device_features.py
another."""

import io
import warnings

import torch


class Features(dict):
    """{feature: function}; `differences` has what is another result on purpose."""

    def __init__(self, head):
        super().__init__()
        self.head, self.differences = head, {}

    def feature(self, name, differs=None):
        def add(function):
            self[name] = function
            if differs is not None:
                self.differences[name] = differs
            return function

        return add

    def table(self, outcome):
        """Its lines; `outcome(name)` is what a row says."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "\n".join([self.head, "|---|---|", *(f"| {name} | {outcome(name)} |" for name in self)])


OF_TORCH = Features("| of torch | `mha_c.torch` beside d2l's own |")
ON_DEVICES = Features("| on another device | `mha_c.torch` beside d2l's own, both generations |")


def saved(thing, **options):
    """What torch.load gives of it, once torch.save has written it."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


def weights_of(layer):
    return getattr(layer, "attention", layer).attention_weights
