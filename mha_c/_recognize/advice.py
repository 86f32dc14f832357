"""What remains to write where a layer cannot be replaced as a whole."""

THREE_LINES = """In a forward of your own these lines work, with q, k, v of (batch, heads, rows, features):
    from mha_c.torch.functional import dot_product_attention
    # in the place of scores, softmax and weights @ v; also valid_lens=, causal=True, dropout=, return_weights=True
    out = dot_product_attention(q, k, v, keep_mask=mask)"""
