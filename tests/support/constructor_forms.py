"""The two ways to construct MultiHeadAttention, of the book's second edition and of its first, as messages and pages
show them; arguments of the second way, and inputs that fit them."""

FORMS = (
    "num_hiddens, num_heads, dropout, bias=False",
    "key_size, query_size, value_size, num_hiddens, num_heads, dropout, bias=False",
)

SIZED = (5, 6, 7, 12, 3, 0.1)  # key_size, query_size, value_size, num_hiddens, num_heads, dropout


def fitting_inputs(rng, dtype):
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in ((2, 4, 6), (2, 9, 5), (2, 9, 7)))
