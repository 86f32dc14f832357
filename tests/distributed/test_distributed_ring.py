"""ring_attention on two and four processes against one: results, gradients, what is sent, and what is refused."""

import re

import numpy as np
import pytest
import torch

import accuracy
import distributed_cases as cases
from checks import same
from mha_c import functional as F
from mha_c.torch.distributed import join_sequence, split_sequence
from mha_c.torch.distributed._sequence import LAYOUTS, Schedule, VisibleKeys
from worlds import World

SEED = 2**63 + 12345


@pytest.fixture(scope="module", params=[2, 4], ids="{} processes".format)
def world(request):
    with World(request.param) as world:
        yield world


def operands(seed, dtype, n_queries=53, n_keys=53, batch=2, heads=4, key_heads=2, dim=8, value_dim=6):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, heads, n_queries, dim))
    k, v = (rng.standard_normal((batch, key_heads, n_keys, size)) for size in (dim, value_dim))
    return [x.astype(dtype) for x in (q, k, v, rng.standard_normal((batch, heads, n_queries, value_dim)))]


def joined(results, layout):
    """Each of the ranks' results as a whole."""
    return [join_sequence(list(map(torch.from_numpy, column)), layout=layout).numpy() for column in zip(*results)]


def close(found, expected, dtype):
    """1e-12 of the largest number in float64: sums of some fifty terms around 1 in another order."""
    scale = np.abs(expected).max(initial=1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=scale * (1e-12 if dtype == "float64" else 3e-6))


MASKS = {
    "all keys": {},
    "causal": {"causal": True},
    "window": {"window": (9, 3)},
    "narrow window": {"window": (1, 1)},
    "one-sided window": {"window": (None, 4)},
    "causal window": {"causal": True, "window": (12, None)},
    "lengths": {"valid_lens": [37, 12]},
    "an empty item": {"valid_lens": [5, 0]},
    "lengths of queries": {"valid_lens": np.arange(106).reshape(2, 53) % 60 - 3},
    "float lengths": {"valid_lens": [20.5, 1.0]},
    "all of them": {"causal": True, "window": (30, None), "valid_lens": [50, 7], "dropout": 0.25, "rng": SEED},
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_forward_and_backward(world, seed, name, layout, dtype):
    q, k, v, grad = operands(seed, dtype)
    options = MASKS[name]
    results = joined(world.run(cases.ring, (q, k, v), grad, layout, options), layout)
    expected = F.dot_product_attention(q, k, v, **options)
    close(results[0], expected, dtype)
    for found, known in zip(results[1:], F.dot_product_attention_backward(grad, q, k, v, **options)):
        close(found, known, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_is_that_of_one_process(world, seed, layout):
    """Unit vectors as values: the output is the weights, and shows which were dropped."""
    q, k, *_ = operands(seed, "float64", n_queries=21, n_keys=21)
    v = np.broadcast_to(np.eye(21), (2, 2, 21, 21)).copy()
    options = {"dropout": 0.4, "rng": SEED, "causal": True}
    (found,) = joined(world.run(cases.ring, (q, k, v), None, layout, options), layout)
    expected = F.dot_product_attention(q, k, v, **options)
    np.testing.assert_array_equal(found == 0, expected == 0)
    assert 0.2 < (found[..., np.tri(21, dtype=bool)] == 0).mean() < 0.6
    close(found, expected, "float64")


@pytest.mark.parametrize(
    ("n_queries", "n_keys"), [(1, 1), (3, 3), (7, 40), (40, 7), (5, 0), (0, 5), (8, 8)], ids=lambda n: str(n)
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes(world, seed, layout, n_queries, n_keys):
    """Also fewer places than ranks, and other numbers of queries than of keys."""
    q, k, v, grad = operands(seed, "float64", n_queries, n_keys, key_heads=4)
    results = joined(world.run(cases.ring, (q, k, v), grad, layout, {"causal": "top_left"}), layout)
    close(results[0], F.dot_product_attention(q, k, v, causal="top_left"), "float64")
    for found, known in zip(results[1:], F.dot_product_attention_backward(grad, q, k, v, causal="top_left")):
        close(found, known, "float64")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_do_not_depend_on_timing(world, seed, layout):
    q, k, v, grad = operands(seed, "float32")
    options = {"window": (25, 25), "dropout": 0.1, "rng": 1}
    found = [world.run(cases.ring, (q, k, v), grad, layout, options, jitter=jitter) for jitter in (None, 1, 2)]
    for other in found[1:]:
        for mine, theirs in zip(found[0], other):
            same(mine, theirs)


@pytest.mark.by_day("layout", "family", "world", together=1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "family",
    ["normal", "scores of std 4", "scores of std 1e3", "rising scores", "large key first", "large key last",
     "values 1e6 + N(0,1)"],
)  # fmt: skip
def test_accuracy_gate(world, family, layout):
    """The limits of test_accuracy.py."""
    p = accuracy.problem(family, accuracy.Sizes(2, 32, 1000, 64, 16), "float32", seed=1000)
    arrays = [x[:, None] for x in (p.q, p.k, p.v)]
    (found,) = joined(world.run(cases.ring, arrays, None, layout), layout)
    kappa = accuracy.error(found[:, 0], accuracy.exact(p)).kappa.max()
    assert kappa <= (2 if family == "normal" else 16), kappa


# --- What travels ------------------------------------------------------------------------------------------


TRAFFIC = {name: MASKS[name] for name in ("all keys", "causal")}
TRAFFIC.update({"narrow window": {"window": (2, 0)}, "lengths": {"valid_lens": [9]}})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TRAFFIC)
def test_only_what_somebody_sees_is_sent(world, seed, name, layout):
    q, k, v, grad = operands(seed, "float32", 48, 48, batch=1)
    n, per_key = world.n, 2 * (8 + 6)
    results = world.run(cases.ring_traffic, (q, k, v), grad, layout, TRAFFIC[name])
    sent = sum(sent[0] for sent, _ in results) / per_key / 48
    # In numbers of whole sequences: everything goes round n - 1 steps; under a causal mask a contiguous piece goes to
    # the ranks behind it; 9 keys are in the first piece or in two.
    if layout == "contiguous":
        expected = {"all keys": n - 1, "causal": (n - 1) / 2, "narrow window": (n - 1) / n, "lengths": (n - 1) / n}
        assert sent == pytest.approx(expected[name])
    elif name == "all keys":
        assert sent == pytest.approx(n - 1)
    elif name == "causal":  # the last part, which nobody else sees, stays
        assert sent == pytest.approx(n - 1 - (n - 1) / 2 / n)
    else:
        assert sent <= n - 1
    for rank, ((forward, _), pairs) in enumerate(results):
        options = {name: np.array(value) for name, value in TRAFFIC[name].items() if name == "valid_lens"}
        left, right = TRAFFIC[name].get("window", (-1, 0 if name == "causal" else -1))
        plan = Schedule(n, 48, 48, layout, VisibleKeys(left, right, options.get("valid_lens")))
        assert forward == plan.sent(rank) * per_key
        assert pairs[0] == pairs[1] == sum(
            plan.mask.sees(queries, travel.part)
            for queries in plan.queries[rank] for piece in plan.keys for travel in piece
        )  # fmt: skip
    # Backward the same keys and values travel once more, and their gradients as far.
    assert sum(sent[1] for sent, _ in results) == 2 * sum(sent[0] for sent, _ in results)


def test_causal_work_is_balanced_in_a_zigzag(world, seed):
    q, k, v, grad = operands(seed, "float32", 48, 48, batch=1)
    results = world.run(cases.ring_traffic, (q, k, v), grad, "zigzag", {"causal": True})
    assert len({tuple(pairs) for _, pairs in results}) == 1
    contiguous = world.run(cases.ring_traffic, (q, k, v), grad, "contiguous", {"causal": True})
    assert [pairs[0] for _, pairs in contiguous] == list(range(1, world.n + 1))


def test_what_nobody_sees_may_be_anything(world, seed):
    q, k, v, grad = operands(seed, "float64", 48, 48)
    k[:, :, 30:], v[:, :, 30:] = np.nan, np.nan
    results = joined(world.run(cases.ring, (q, k, v), grad, "zigzag", {"valid_lens": [30, 10]}), "zigzag")
    assert all(np.isfinite(x).all() for x in results)


# --- Plans, without processes -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_every_part_reaches_everybody_who_sees_it(n, layout, seed):
    rng = np.random.default_rng(seed)
    for _ in range(60):
        n_queries, n_keys = rng.integers(0, 40, 2)
        lens = [None, rng.integers(-2, 45, 2), rng.integers(-2, 45, (2, n_queries))][rng.integers(3)]
        left, right = rng.integers(-1, 12, 2) if rng.integers(2) else (-1, rng.integers(-1, 1))
        mask = VisibleKeys(int(left), int(right), lens)
        plan = Schedule(n, int(n_queries), int(n_keys), layout, mask)
        seen = np.zeros((n_queries, n_keys), bool)
        i, j = np.arange(n_queries)[:, None], np.arange(n_keys)
        for item in range(2):
            length = n_keys if lens is None else lens[item] if lens.ndim == 1 else lens[item][:, None]
            seen |= (j < length) & ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))
        for owner, piece in enumerate(plan.keys):
            assert sum(t.part.size for t in piece) == split_sequence(
                torch.empty(n_keys), owner, n, layout=layout, dim=0).numel()  # fmt: skip
            for travel in piece:
                reached = {(owner + hop) % n for hop in range(travel.hops + 1)}
                assert len(reached) == 1 + travel.hops
                for rank in range(n):
                    for queries in plan.queries[rank]:
                        block = seen[queries.start : queries.stop, travel.part.start : travel.part.stop]
                        if block.any():
                            assert mask.sees(queries, travel.part) and rank in reached
                        elif lens is None or lens.ndim == 1:
                            assert not mask.sees(queries, travel.part)
        for owner in range(n):  # what goes on came, in the same order
            for hop in range(1, plan.rounds + 1):
                came, goes_on = (plan.travelling(owner, steps) for steps in (hop, hop + 1))
                assert [travel for travel in came if travel.hops > hop] == goes_on


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [0, 1, 5, 16, 23])
def test_split_and_join(length, layout):
    x = torch.randn(2, length, 3, requires_grad=True)
    for n in (1, 2, 3, 5):
        pieces = [split_sequence(x, rank, n, layout=layout) for rank in range(n)]
        assert torch.equal(join_sequence(pieces, layout=layout), x)
        (grad,) = torch.autograd.grad(join_sequence(pieces, layout=layout).square().sum(), x)
        assert torch.equal(grad, 2 * x)


def test_pieces_that_are_none():
    with pytest.raises(ValueError, match=r"pieces\[0\] has 2 places along dim 1, but .* gives rank 0 3 of 5"):
        join_sequence([torch.zeros(1, 2, 1), torch.zeros(1, 3, 1)])
    with pytest.raises(ValueError, match="rank must be below world_size"):
        split_sequence(torch.zeros(1, 2, 1), 2, 2)
    with pytest.raises(ValueError, match="layout must be 'contiguous' or 'zigzag'"):
        split_sequence(torch.zeros(1, 2, 1), 0, 2, layout="striped")


# --- What is refused ----------------------------------------------------------------------------------------

MISMATCHES = {
    "shape": ({"q": (1, 2, 4, 6), "k": (1, 2, 4, 6)}, "ShapeError", "differ in head_dim: 8 on .*, 6 on rank 1"),
    "batch": ({"q": (3, 2, 4, 8), "k": (3, 2, 4, 8), "v": (3, 2, 4, 8)}, "ShapeError", "differ in batch"),
    "piece": ({"q": (1, 2, 6, 8), "k": (1, 2, 6, 8), "v": (1, 2, 6, 8)}, "ShapeError", "rank [01] has [46] rows in q"),
    "dtype": ({"dtype": "dtype float64"}, "TypeError", "differ in dtype: torch.float32 on .*, torch.float64 on rank 1"),
    "seed": ({"rng": 4}, "ValueError", "differ in the seed of dropout .*: 3 on .*, 4 on rank 1"),
    "large seed": (
        {"rng": 2**64 - 1},
        "ValueError",
        f"differ in the seed of dropout .*: 3 on .*, {2**64 - 1} on rank 1",
    ),
    "dropout": ({"dropout": 0.25}, "ValueError", "differ in dropout: 0.5 on .*, 0.25 on rank 1"),
    "causal": ({"causal": True}, "ValueError", "differ in causal: False on .*, True on rank 1"),
    "window": ({"window": (None, 3)}, "ValueError", r"differ in window \(right\): none on .*, 3 on rank 1"),
    "layout": ({"layout": "zigzag"}, "ValueError", "differ in layout: contiguous on .*, zigzag on rank 1"),
    "lengths": ({"valid_lens": [3]}, "ValueError", "differ in valid_lens"),
    "scale": ({"scale": 2.0}, "ValueError", "differ in scale: the default on .*, 2.0 on rank 1"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_differ_are_named_on_all(world, name):
    change, kind, words = MISMATCHES[name]
    for found in world.run(cases.ring_mismatch, change, 1):
        assert found is not None and found[0] == kind
        assert re.search(words, found[1]), found[1]


def test_a_rank_that_refuses_its_arguments_is_named_on_all(world):
    results = world.run(cases.ring_mismatch, {"causal": "bottom_right"}, 1)
    assert results[1][0] == "ValueError" and results[1][1].startswith("causal='bottom_right' is not supported here")
    for kind, text in [results[0], *results[2:]]:
        assert kind == "ValueError" and "rank 1 refused its arguments: causal='bottom_right'" in text
    for scale in ("0.5", True):
        assert world.run(cases.ring_mismatch, {"scale": scale}, 1)[1][0] == "TypeError"
    q, k, v, _ = operands(0, "float64")
    (found,) = joined(world.run(cases.ring, (q, k, v)), "contiguous")  # the group is as good as before
    close(found, F.dot_product_attention(q, k, v), "float64")


def test_a_long_refusal_in_any_alphabet(world):
    for kind, text in world.run(cases.ring_mismatch, {"causal": "\U0001f600" * 400}, 1):
        assert kind == "ValueError" and "causal must be 'top_left', got '\U0001f600\U0001f600" in text


def test_seeds_from_torch(world):
    alike = world.run(cases.unseeded_dropout, [7] * world.n)
    assert all(isinstance(x, np.ndarray) for x in alike)
    for text in world.run(cases.unseeded_dropout, list(range(world.n))):
        assert "seed torch alike on all ranks" in text and "rank 1" in text


def test_a_group_of_some_ranks(world, seed):
    q, k, v, _ = operands(seed, "float64")
    *others, first, last = world.run(cases.subgroup, (q, k, v))
    close(np.concatenate([first, last], axis=2), F.dot_product_attention(q, k, v), "float64")
    assert all("not a member of the group" in text for text in others)


def test_bfloat16(world, seed):
    q, k, v, _ = operands(seed, "float32")
    found = np.concatenate(world.run(cases.bfloat16, (q, k, v)), axis=2)
    assert np.abs(found - F.dot_product_attention(q, k, v)).max() < 0.05  # 8 bits, of numbers around 1


def test_second_derivatives_are_refused(world):
    assert all("first derivatives only" in text for text in world.run(cases.double_backward))


def test_no_process_group():
    from mha_c.torch.distributed import ring_attention

    with pytest.raises(RuntimeError, match=r"init_process_group\('gloo'\)"):
        ring_attention(*[torch.zeros(1, 1, 2, 2)] * 3)
