"""The attention decoder of the book's Bahdanau chapter: AttentionDecoder, Seq2SeqAttentionDecoder."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn

from .._arguments.calls import refuses_at_the_call
from .._layer.viewable import Viewable
from ._call.children import is_changed
from ._tensors import check_tensors
from .layers import AdditiveAttention


class AttentionDecoder(nn.Module, Viewable):
    """The book's abstract base class of decoders that show attention weights.

    Call: decoder(X (B, T), state) with token ids X returns the scores and the state for the next call.

    Not meant to be constructed directly.

    Notes
    -----
    Source: d2l 11.4 (10.4).

    Examples
    --------
    >>> import mha_c.torch
    >>> issubclass(mha_c.torch.Seq2SeqAttentionDecoder, mha_c.torch.AttentionDecoder)
    True
    """

    def init_state(self, enc_outputs: Any, *args: Any) -> Any:
        """The state that the first call takes; a subclass implements this.

        Parameters
        ----------
        enc_outputs : Any
            The result of the encoder.
        *args : Any
            Further arguments of a subclass.

        Returns
        -------
        Any
            The state.
        """
        raise NotImplementedError

    def forward(self, X: Tensor, state: Any) -> Any:
        """One call of the decoder, see the class; a subclass implements it."""
        raise NotImplementedError

    @property
    def attention_weights(self) -> Any:
        """Weights of the last call, a tensor for each step; a subclass implements this."""
        raise NotImplementedError


class Seq2SeqAttentionDecoder(AttentionDecoder):
    """A GRU over [context ; embedding]; additive attention of the top hidden state over the encoder is the context.

    >>> import torch, mha_c.torch
    >>> decoder = mha_c.torch.Seq2SeqAttentionDecoder(vocab_size=10, embed_size=8, num_hiddens=16, num_layers=2)
    >>> state = decoder.init_state((torch.zeros(7, 4, 16), torch.zeros(2, 4, 16)), None)
    >>> output, state = decoder(torch.zeros(4, 7, dtype=torch.long), state)
    >>> output.shape, state[0].shape, len(decoder.attention_weights)
    (torch.Size([4, 7, 10]), torch.Size([4, 7, 16]), 7)

    Call: decoder(X, state) with token ids X (B, T) returns scores (B, T, vocab_size), one row for each step, and the
    state for the next call.  `init_state` gives the state of the first call.

    Parameters
    ----------
    vocab_size : int
        Size of the vocabulary.
    embed_size : int
        Features of a token's embedding.
    num_hiddens : int
        Features of a hidden state, the same as in the encoder.
    num_layers : int
        Layers of the GRU.
    dropout : float
        Dropout of attention and GRU.
    device, dtype : optional
        Device and type of the parameters, as in torch's modules.

    Attributes
    ----------
    attention : AdditiveAttention
        The attention of the hidden state over the encoder.
    embedding : nn.Embedding
        The vectors of the tokens.
    rnn : nn.GRU
        The recurrent layers.
    dense : nn.Linear
        The layer that makes scores of the tokens.

    Notes
    -----
    After a call `attention_weights` is a list of tensors (B, 1, K), one for each step.  Children: attention, embedding,
    rnn, dense, as in the book's text.  Unlike the book's: W_k projects the keys once for all steps of a call, not at
    each step.  Source: d2l 11.4 (10.4); Bahdanau, Cho and Bengio 2014.
    """

    @refuses_at_the_call
    def __init__(
        self, vocab_size: int, embed_size: int, num_hiddens: int, num_layers: int, dropout: float = 0, *,
        device: Any = None, dtype: Optional[torch.dtype] = None,
    ) -> None:  # fmt: skip
        super().__init__()
        place: Any = {"device": device, "dtype": dtype}
        self.attention = AdditiveAttention(num_hiddens, num_hiddens, num_hiddens, dropout, **place)
        self.embedding = nn.Embedding(vocab_size, embed_size, **place)
        self.rnn = nn.GRU(embed_size + num_hiddens, num_hiddens, num_layers, dropout=dropout, **place)
        self.dense = nn.Linear(num_hiddens, vocab_size, **place)
        self._attention_weights: list[Tensor] = []

    @refuses_at_the_call
    def init_state(self, enc_outputs: Any, enc_valid_lens: Any = None, *args: Any) -> Any:
        """The state that the first call takes.

        Parameters
        ----------
        enc_outputs : tuple
            The encoder's outputs (T, B, num_hiddens) and hidden state (num_layers, B, num_hiddens).
        enc_valid_lens : Tensor (B,), optional
            How many steps of each sentence count.
        *args : Any
            Not used; the book's signature has them.

        Returns
        -------
        tuple
            The outputs (B, T, num_hiddens), the hidden state, the lengths.
        """
        outputs, hidden_state = enc_outputs
        check_tensors(enc_outputs=outputs)
        return outputs.permute(1, 0, 2), hidden_state, enc_valid_lens

    @refuses_at_the_call
    def forward(self, X: Tensor, state: Any) -> Any:
        """Compute the scores of all tokens at each step: see the class."""
        enc_outputs, hidden_state, enc_valid_lens = state
        embedded = self.embedding(X).permute(1, 0, 2)  # (T, B, embed_size)
        keys = values = enc_outputs
        own = type(self.attention) is AdditiveAttention and not is_changed(self.attention)
        if len(embedded) > 1 and own:  # a replaced attention is called as in the book
            keys, values = self.attention.project(keys, values), None
        outputs, self._attention_weights = [], []
        for x in embedded:
            query = hidden_state[-1].unsqueeze(1)
            context = self.attention(query, keys, values, enc_valid_lens)  # (B, 1, num_hiddens)
            step = torch.cat((context, x.unsqueeze(1)), dim=-1).permute(1, 0, 2)
            out, hidden_state = self.rnn(step, hidden_state)
            outputs.append(out)
            self._attention_weights.append(self.attention.attention_weights)
        scores = self.dense(torch.cat(outputs, dim=0)).permute(1, 0, 2)
        return scores, [enc_outputs, hidden_state, enc_valid_lens]

    @property
    def attention_weights(self) -> list[Tensor]:
        """Weights of the last call: one tensor (B, 1, K) for each step."""
        return self._attention_weights
