"""check on what torch.jit.script and torch.compile made: judged, and quoted, as it was written."""

import functools

import pytest

import needs
from mha_c import teach

torch = needs.module("torch")
if not hasattr(torch, "compiler") or not hasattr(torch.compiler, "set_stance"):
    pytest.skip("this torch does not keep what it compiles", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
compiled = functools.partial(torch.compile, backend="eager")


def attention(query, key, value):
    scores = torch.matmul(query, key.transpose(-2, -1)) / query.size(-1)
    return torch.matmul(torch.softmax(scores, dim=-1), value)


LINE = "scores = torch.matmul(query, key.transpose(-2, -1)) / query.size(-1)"


class Causal(torch.nn.Module):
    """Its method is compiled when it is made."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (torch.nn.Linear(dim, dim) for _ in range(4))
        self.forward = torch.compile(self.forward, backend="eager")

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for w in (self.W_q, self.W_k, self.W_v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) == 1, float("-inf"))
        return self.W_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("made", [torch.jit.script, compiled])
def test_a_function_is_followed_line_by_line(made):
    answer = teach.check(made(attention), "dot_product", mask="none")
    assert answer.mistakes == ["scale_d"] and [line.text for line in answer.lines] == [LINE]
    assert teach.check(made(attention)).mistakes == ["scale_d"]  # its kind is told by its name, too
    assert "attention" in str(teach.laws(made(attention)))


def test_a_layer_whose_method_is_compiled_is_asked_itself():
    """A copy keeps the compiled method of the layer that it was copied from, whose weights nobody changes."""
    assert teach.check(Causal, "causal_multi_head").ok
    assert teach.check(Causal(8, 2), "causal_multi_head").ok
    assert teach.check(compiled(Causal(8, 2)), "causal_multi_head").ok


def test_nothing_is_compiled_while_it_is_asked():
    """A compiled helper would be compiled for each size of the probes: seconds, and pages of torch's messages."""
    graphs = []
    helper = torch.compile(lambda s: s.softmax(-1), backend=lambda graph, inputs: graphs.append(1) or graph.forward)

    def dot_product(queries, keys, values):
        return helper(queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5) @ values

    assert teach.check(dot_product, mask="none").ok and not graphs


def test_a_file_with_a_scripted_function_is_judged(judged):
    report = judged(
        """import torch
from torch import Tensor

@torch.jit.script
def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.matmul(query, key.transpose(-2, -1)) / query.size(-1)
    return torch.matmul(torch.softmax(scores, dim=-1), value)
"""
    )
    (each,) = report.judged
    assert (each.name, each.answer.mistakes, each.answer.lines[0].number) == ("attention", ["scale_d"], 6)
