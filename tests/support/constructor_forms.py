"""The two ways to construct MultiHeadAttention, of the book's second edition and of its first, as messages and pages
show them."""

FORMS = (
    "num_hiddens, num_heads, dropout, bias=False",
    "key_size, query_size, value_size, num_hiddens, num_heads, dropout, bias=False",
)
