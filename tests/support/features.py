"""The list of features that torch_features.py and notebook_features.py fill, one row of the table each."""

FEATURES, DIFFERENCES = {}, {}


def feature(name, differs=None):
    """differs: what is another result, on purpose."""

    def add(function):
        FEATURES[name] = function
        if differs is not None:
            DIFFERENCES[name] = differs
        return function

    return add


def weights_of(layer):
    return getattr(layer, "attention", layer).attention_weights
