"""The same numbers in other arrangements of memory: LAYOUTS[name](array) of any rank from 1 on."""

import numpy as np


def turned(x):
    """The first axis lies densest in memory."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 0, -1)), -1, 0)


def second_axis_first(x):
    """As Bahdanau's encoder gives them: (steps, batch, features) seen as (batch, steps, features)."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, -2, 0)), 0, -2) if x.ndim > 1 else x


def spread(x, axis):
    """Every second place of an axis, between numbers that are NaN."""
    axis = max(axis, -x.ndim)
    wide = np.full([2 * n if i - x.ndim == axis else n for i, n in enumerate(x.shape)], np.nan, x.dtype)
    seen = np.moveaxis(np.moveaxis(wide, axis, 0)[::2], 0, axis)
    seen[...] = x
    return seen


def rows_apart(x):
    wide = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan, x.dtype)
    wide[..., :-3] = x
    return wide[..., :-3]


def unaligned(x):
    view = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def next_item(x):
    """Aligned for its type, and for nothing wider."""
    flat = np.empty(x.size + 1, x.dtype)
    flat[1:] = x.ravel()
    return flat[1:].reshape(x.shape)


def field(x, row=False):
    """A field of packed records, each a number or a row: strides that are no multiple of the item."""
    of_record = (x.dtype, (x.shape[-1],)) if row else (x.dtype,)
    records = np.zeros(x.shape[:-1] if row else x.shape, np.dtype([("tag", "u1"), ("x", *of_record)]))
    records["x"] = x
    return records["x"]


def read_only(x):
    y = x.copy()
    y.flags.writeable = False
    return y


class Child(np.ndarray):
    pass


LAYOUTS = {
    "dense": np.ascontiguousarray,
    "column-major": np.asfortranarray,
    "axes turned": turned,
    "second axis first": second_axis_first,
    "features strided": lambda x: spread(x, -1),
    "rows strided": lambda x: spread(x, -2),
    "rows apart": rows_apart,
    "batch strided": lambda x: spread(x, -x.ndim),
    "all reversed": lambda x: np.flip(np.flip(x).copy()),
    "rows reversed": lambda x: np.flip(np.flip(x, max(-2, -x.ndim)).copy(), max(-2, -x.ndim)),
    "other byte order": lambda x: x.astype(x.dtype.newbyteorder()),
    "unaligned": unaligned,
    "next item": next_item,
    "a field of records": field,
    "rows of records": lambda x: field(x, row=True),
    "read-only": read_only,
    "over bytes": lambda x: np.ndarray(x.shape, x.dtype, x.tobytes()),
    "a subclass": lambda x: x.view(Child),
    "a subclass with a copy": lambda x: np.asfortranarray(x).view(Child),
}
