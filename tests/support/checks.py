"""Comparisons that several test files make."""

import numpy as np

# For results of a few dozen terms around 1: ten to twenty units in the last place.  Errors on a larger scale, and how
# they compare with torch's, are measured in test_accuracy.py.
TOLERANCE = {"float32": 2e-6, "float64": 4e-15}


def most_rows_without_numbers():
    """As many as this NumPy makes in no time.  Older ones ask the system for the memory of rows of one number."""
    try:
        return len(np.zeros((2**40, 0)))
    except MemoryError:
        return 2**20


MANY = most_rows_without_numbers()


def close(found, expected, dtype, scale=1.0):
    """Nearly the same numbers, and the type asked for."""
    assert found.dtype == dtype, found.dtype
    np.testing.assert_allclose(found, expected, rtol=0, atol=scale * TOLERANCE[np.dtype(dtype).name])


def same(found, expected):
    """The same numbers of one type; of several arrays, each."""
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            same(one, other)
        return
    assert found.dtype == expected.dtype and found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)


def bits(arrays):
    return [None if array is None else array.tobytes() for array in arrays]


def softmax(scores):
    """The textbook's, over the last axis, of rows that have a largest score."""
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attended(queries, keys, values, seen=True, hidden=-1e9, divisor=None):
    """The textbook's scaled dot products; a score that is not seen becomes `hidden`."""
    scores = queries @ keys.swapaxes(-1, -2) / (divisor or queries.shape[-1] ** 0.5)
    return softmax(np.where(seen, scores, hidden)) @ values
