import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import (
    CODES,
    NO_LATENT,
    FixedLogits,
    LatentOracle,
    LawOracle,
    chi_square_p,
    codes,
    conditionals,
    gaps,
    latent,
    learned_prior,
    random_law,
    random_tokens,
    sequence_counts,
    strong_model,
    tiny_model,
)
from vmd.config import InvalidInput, LatentConfig
from vmd.data import law
from vmd.sampling import (
    ORDERS,
    RULES,
    Samples,
    confidence,
    draw_tokens,
    hashed_uniforms,
    keep_nucleus,
    reveal_counts,
    sample,
)

orders = pytest.mark.parametrize("order", ORDERS)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The law of what is sampled


@orders
@pytest.mark.parametrize(("length", "r"), [(3, 3), (3, 1), (4, 2)])
def test_token_by_token_recovers_the_law(order, length, r):
    known = random_law(length, 3)
    tokens = sample(LawOracle(known, r), gaps(20_000, length), steps=r, order=order, generator=seeded()).tokens
    assert chi_square_p(sequence_counts(tokens, known), known.probabilities) > 1e-4


@orders
@pytest.mark.parametrize("name", ["deterministic", "non-uniform", "dependence-0.7", "d1", "d2"])
def test_token_by_token_recovers_the_laws_of_the_paper(order, name):
    known = law(name)
    oracle = LawOracle(known, known.length)
    tokens = sample(oracle, gaps(5_000, known.length), steps=known.length, order=order, generator=seeded(1)).tokens
    assert chi_square_p(sequence_counts(tokens, known), known.probabilities) > 1e-4


@orders
def test_given_tokens_are_conditioned_on(order):
    """A token in the middle is given: the rest follows the law given it."""
    known = random_law(3, 3)
    prompt = gaps(20_000, 3)
    prompt[:, 1] = 2
    tokens = sample(LawOracle(known, 3), prompt, steps=2, order=order, generator=seeded()).tokens
    given_it = known.probabilities * (known.sequences[:, 1] == 2)
    assert chi_square_p(sequence_counts(tokens, known), given_it / given_it.sum()) > 1e-4


def test_without_a_latent_one_step_gives_the_product_of_marginals():
    known = random_law(3, 3)
    tokens = sample(LawOracle(known, 3), gaps(20_000, 3), steps=1, generator=seeded()).tokens
    independent = known.marginals()[torch.arange(3), known.sequences].prod(-1)
    counts = sequence_counts(tokens, known)
    assert chi_square_p(counts, independent) > 1e-4
    assert chi_square_p(counts, known.probabilities) < 1e-4  # the test has power


@pytest.mark.parametrize(("name", "r"), [("deterministic", 2), ("d1", 4), ("d2", 4)])
@pytest.mark.parametrize("rule", RULES)
def test_a_latent_that_selects_the_sequence_recovers_the_law_in_one_step(name, r, rule):
    known = law(name)
    samples = sample(LatentOracle(known, r), gaps(4_000, known.length), steps=1, rule=rule, generator=seeded())
    assert samples.nfe == 1
    assert chi_square_p(sequence_counts(samples.tokens, known), known.probabilities) > 1e-4


def test_each_block_has_a_latent_of_its_own():
    """d2 in two blocks: the pairs are independent, because their latents are."""
    known = law("d2")
    tokens = sample(LatentOracle(known, 2), gaps(6_000, 4), steps=1, generator=seeded()).tokens
    assert chi_square_p(sequence_counts(tokens, known), known.probabilities) > 1e-4


# Evaluations, and what may move


@pytest.mark.parametrize(("r", "steps"), [(6, 1), (6, 4), (6, 6), (2, 1), (2, 2), (3, 2), (1, 1)])
def test_exactly_n_evaluations_for_every_block(r, steps):
    oracle = FixedLogits(torch.zeros(6, 4), r)
    samples = sample(oracle, gaps(3, 6), steps=steps, generator=seeded())
    assert oracle.calls == [block for block in range(6 // r) for _ in range(steps)]
    assert samples.nfe == steps * 6 // r


def test_a_block_without_gaps_is_not_evaluated():
    oracle = FixedLogits(torch.zeros(6, 4), 2)
    prompt = torch.tensor([[-1, 0, 1, 1, 2, 2], [0, 0, 1, 1, -1, 2]])
    samples = sample(oracle, prompt, steps=2)
    assert oracle.calls == [0, 0, 2, 2]
    assert samples.nfe == 4


def test_nothing_to_fill_takes_no_evaluation():
    prompt = random_tokens(3, 6, 4)
    samples = sample(FixedLogits(torch.zeros(6, 4), 2), prompt, steps=2)
    assert samples.nfe == 0
    assert torch.equal(samples.tokens, prompt)


@st.composite
def prompts(draw):
    rows = draw(st.integers(1, 4))
    cells = draw(st.lists(st.integers(-1, 4), min_size=rows * 6, max_size=rows * 6))
    return torch.tensor(cells).view(rows, 6)


MODELS = {(r, name): tiny_model(6, r, z=z) for r in (1, 2, 3, 6) for name, z in (("none", NO_LATENT), ("z", latent()))}


@settings(max_examples=150)
@given(
    prompts(),
    st.sampled_from(sorted(MODELS)),
    st.floats(0, 1),
    st.sampled_from(ORDERS),
    st.sampled_from(RULES),
    st.sampled_from(["once", "fresh"]),
    st.booleans(),
)
def test_fixed_tokens_never_move_and_nothing_masked_remains(prompt, key, share, order, rule, z, cache):
    model = MODELS[key]
    steps = 1 + round(share * (model.config.block_size - 1))
    before = prompt.clone()
    options = {"steps": steps, "order": order, "rule": rule, "z": z, "cache": cache, "trace": True}
    samples = model.sample(prompt=prompt, generator=seeded(), **options)
    assert torch.equal(prompt, before)  # the caller's tensor is not written to
    assert ((samples.tokens >= 0) & (samples.tokens < 5)).all()
    assert torch.equal(samples.tokens[prompt >= 0], prompt[prompt >= 0])
    gaps_per_block = (prompt < 0).view(len(prompt), -1, model.config.block_size).any(-1).any(0)
    assert samples.nfe == steps * int(gaps_per_block.sum())
    for step in samples.trace:
        assert torch.equal(step.canvas[prompt >= 0], prompt[prompt >= 0])


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 12))
def test_reveal_counts_follow_the_ceilings_and_sum_to_the_gaps(masked, steps):
    counts = reveal_counts(torch.tensor(masked), steps)
    assert counts.shape == (steps, len(masked))
    assert counts.sum(0).tolist() == masked
    for j, row in enumerate(counts.tolist(), start=1):
        assert row == [math.ceil(j * m / steps) - math.ceil((j - 1) * m / steps) for m in masked]


def test_every_row_reveals_by_its_own_count():
    prompt = torch.tensor([[-1, -1, -1, -1], [-1, 0, -1, -1], [0, -1, 0, -1], [0, 0, 0, -1], [0, 0, 0, 0]])
    trace = sample(FixedLogits(torch.zeros(4, 3)), prompt, steps=2, trace=True).trace
    assert [step.revealed.sum(-1).tolist() for step in trace] == [[2, 2, 1, 1, 0], [2, 1, 1, 0, 0]]


# The trace


def test_whoever_is_told_of_steps_hears_the_trace():
    heard: list = []
    prompt = torch.full((5, 4), -1)
    seeds = list(range(5))
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    told = sample(FixedLogits(logits), prompt, steps=2, seeds=seeds, on_step=heard.append)
    kept = sample(FixedLogits(logits), prompt, steps=2, seeds=seeds, trace=True)
    assert told.trace == []
    assert torch.equal(told.tokens, kept.tokens)
    assert len(heard) == len(kept.trace)
    for one, other in zip(heard, kept.trace, strict=True):
        assert (one.block, one.step) == (other.block, other.step)
        assert torch.equal(one.canvas, other.canvas)


@pytest.mark.parametrize("r", [2, 6])
@orders
def test_the_trace_reveals_every_gap_once_and_ends_at_the_tokens(r, order):
    model = tiny_model(6, r, z=latent())
    prompt = gaps(5, 6)
    prompt[0, 1] = prompt[1, 4] = 3
    samples = model.sample(prompt=prompt, steps=2, order=order, trace=True, generator=seeded())
    times_revealed = sum(step.revealed.long() for step in samples.trace)
    assert torch.equal(times_revealed, (prompt < 0).long())
    assert torch.equal(samples.trace[-1].canvas, samples.tokens)
    assert [(s.block, s.step) for s in samples.trace] == [(b, n) for b in range(6 // r) for n in range(2)]
    canvas = torch.where(prompt < 0, 5, prompt)
    for step in samples.trace:  # a step changes what it reveals, to the final token, and nothing else
        assert torch.equal(step.canvas, torch.where(step.revealed, samples.tokens, canvas))
        here = torch.arange(6) // r == step.block
        assert torch.equal(step.confidence.isnan(), ~((canvas == 5) & here))
        canvas = step.canvas


def test_no_trace_unless_asked_for():
    assert tiny_model(4, 2).sample(2).trace == []


@pytest.mark.parametrize(
    "prompt",
    [[[-1, -1, 0, 0], [0, 0, -1, -1]], [[1, 1, 0, 0], [0, 0, -1, -1]]],
    ids=["gaps-in-different-blocks", "a-row-without-gaps"],
)
def test_the_trace_of_chunks_is_the_trace_of_the_batch(prompt):
    prompt = torch.tensor(prompt)
    model = tiny_model(4, 2)
    whole, parts = (model.sample(prompt=prompt, seeds=[1, 2], trace=True, batch_size=size) for size in (2, 1))
    assert [(s.block, s.step) for s in parts.trace] == [(s.block, s.step) for s in whole.trace]
    for a, b in zip(whole.trace, parts.trace, strict=True):
        assert torch.equal(a.canvas, b.canvas)
        assert torch.equal(a.revealed, b.revealed)


def test_concatenated_samples_keep_rows_in_order_and_evaluations_per_row():
    model = tiny_model(4, 2, z=latent())
    parts = [model.sample(n, steps=2, trace=True, generator=seeded(n)) for n in (2, 3)]
    whole = Samples.concatenate(parts)
    assert torch.equal(whole.tokens, torch.cat([p.tokens for p in parts]))
    assert torch.equal(whole.z, torch.cat([p.z for p in parts]))
    assert (whole.nfe, whole.cache_passes) == (4, 0)
    assert torch.equal(whole.trace[-1].canvas, whole.tokens)


# Rows are independent


ROW_MODELS = pytest.mark.parametrize(
    "z_config", [NO_LATENT, latent(), latent(on_clean=True)], ids=["none", "latent", "latent-clean"]
)


@ROW_MODELS
@orders
@pytest.mark.parametrize("rule", RULES)
def test_with_seeds_a_row_is_the_same_in_any_batch(z_config, order, rule):
    model = tiny_model(6, 3, z=z_config)
    prompt = gaps(8, 6)
    prompt[1, 2:4] = prompt[2, :2] = prompt[3, 0] = prompt[4] = 1
    seeds = [100 + i for i in range(8)]
    options = {"steps": 2, "order": order, "rule": rule}
    whole = model.sample(prompt=prompt, seeds=seeds, **options).tokens
    permutation = torch.tensor([5, 0, 7, 2, 4, 1, 6, 3])
    permuted = model.sample(prompt=prompt[permutation], seeds=[seeds[i] for i in permutation], **options).tokens
    assert torch.equal(permuted, whole[permutation])
    for size in (1, 3):  # 1: every row alone
        assert torch.equal(model.sample(prompt=prompt, seeds=seeds, batch_size=size, **options).tokens, whole)


def test_rows_with_different_seeds_differ_and_a_seed_repeats():
    model = tiny_model(6, 6)
    tokens = model.sample(20, seeds=[*range(19), 0], steps=6).tokens
    assert torch.equal(tokens[0], tokens[19])
    assert len(tokens[:19].unique(dim=0)) > 15


def test_fresh_latents_of_a_row_do_not_depend_on_its_batch():
    model = tiny_model(6, 3, z=latent())
    whole = model.sample(5, seeds=range(5), steps=3, z="fresh")
    alone = model.sample(1, seeds=[3], steps=3, z="fresh")
    assert torch.equal(whole.tokens[3:4], alone.tokens)
    assert torch.equal(whole.z[3:4], alone.z)


@ROW_MODELS
def test_with_argmax_and_its_latent_a_row_does_not_depend_on_its_batch(z_config):
    """The latent is all chance there is: rows of equal z are equal, whatever the generator did for others."""
    model = tiny_model(6, 2, z=z_config)
    whole = model.sample(6, rule="argmax", steps=2, generator=seeded())

    class SameLatents(type(model)):
        rows = slice(4, 6)

        def predictor(self, batch, *, cached=True, recorded=False):
            predictor = super().predictor(batch, cached=cached, recorded=recorded)

            def draw(canvas, block, z, noise):
                z[:, block] = whole.z[self.rows, block]

            predictor.draw = draw
            return predictor

    model.__class__ = SameLatents
    pair = model.sample(2, rule="argmax", steps=2, generator=seeded(99))
    assert torch.equal(pair.tokens, whole.tokens[4:6])


def test_the_same_generator_state_gives_the_same_samples():
    model = tiny_model(6, 2, z=latent())
    first, again, other = (model.sample(10, steps=2, generator=seeded(s)).tokens for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# Tokens


def test_draws_follow_the_probabilities(generator):
    logits = torch.tensor([0.0, 1.0, -2.0, 2.0, -30.0])
    drawn = draw_tokens(logits.expand(50_000, -1), torch.rand(50_000, generator=generator, dtype=torch.float64))
    assert chi_square_p(torch.bincount(drawn, minlength=5)[:4], logits[:4].double().softmax(-1)) > 1e-4


@given(
    st.lists(st.booleans(), min_size=2, max_size=6).filter(any),
    st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, 1 - 2**-53])),
    st.sampled_from([0.01, 1.0, 10.0]),
    st.sampled_from([0.01, 0.9, 1.0]),
)
def test_tokens_of_probability_zero_are_never_drawn(possible, u, temperature, top_p):
    logits = torch.where(torch.tensor(possible), torch.linspace(-1, 1, len(possible)), -torch.inf)
    token = int(draw_tokens(logits, torch.tensor(u, dtype=torch.float64), temperature, top_p))
    assert possible[token]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_token_of_probability_1e_minus_12_is_drawn_exactly_on_its_interval(place):
    probabilities = torch.full((3,), 0.5, dtype=torch.float64)
    probabilities[place] = 1e-12
    logits = probabilities.log()
    edges = [0.0, *logits.softmax(-1).cumsum(-1).tolist()]
    inside = (edges[place] + edges[place + 1]) / 2
    assert edges[place] < inside < edges[place + 1]
    for u, expected in ((inside, True), (edges[place] - 1e-12, False), (edges[place + 1] + 1e-12, False)):
        if 0 <= u < 1:
            assert (int(draw_tokens(logits, torch.tensor(u, dtype=torch.float64))) == place) == expected


def test_the_largest_uniform_draws_the_last_possible_token():
    u = torch.tensor(1 - 2**-53, dtype=torch.float64)
    for size in (2, 3, 7, 50, 1000):
        assert int(draw_tokens(torch.zeros(size), u)) == size - 1
    assert int(draw_tokens(torch.tensor([1.0, 1.0, -torch.inf]), u)) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_temperature_divides_the_logits(temperature):
    logits = torch.tensor([0.3, -1.0, 2.0])
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
    for u in torch.linspace(0, 0.999, 200, dtype=torch.float64):
        assert int(draw_tokens(logits, u, temperature)) == int((cumulative <= u).sum())


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300, 1e-308])
def test_a_tiny_temperature_is_argmax(temperature):
    logits = torch.tensor([[20.0, 3.0, 1.0], [-90.0, -80.0, -95.0]])
    assert draw_tokens(logits, torch.tensor([0.5, 0.5]), temperature).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, [2]), (0.4, [2]), (0.5, [2, 0]), (0.69, [2, 0]), (0.71, [2, 0, 3]), (0.95, [2, 0, 3, 1]), (1.0, [2, 0, 3, 1])],
)
def test_top_p_keeps_the_fewest_tokens_of_that_mass(top_p, kept):
    probabilities = torch.tensor([0.25, 0.1, 0.45, 0.2], dtype=torch.float64)
    nucleus = keep_nucleus(probabilities, top_p)
    assert sorted(nucleus.nonzero().flatten().tolist()) == sorted(kept)
    assert torch.equal(nucleus[kept], probabilities[kept])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.floats(0.01, 0.99))
def test_the_nucleus_is_minimal(weights, top_p):
    probabilities = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    kept = keep_nucleus(probabilities, top_p)
    mass, smallest = float(kept.sum()), float(kept[kept > 0].min())
    assert mass >= top_p - 1e-12
    assert mass - smallest < top_p + 1e-12
    assert float(probabilities[kept == 0].max() if (kept == 0).any() else 0) <= smallest


def test_draws_within_the_nucleus_are_in_proportion(generator):
    logits = torch.tensor([0.25, 0.1, 0.45, 0.2]).log()
    u = torch.rand(20_000, generator=generator, dtype=torch.float64)
    counts = torch.bincount(draw_tokens(logits.expand(20_000, -1), u, top_p=0.69), minlength=4)
    assert chi_square_p(counts, torch.tensor([0.25, 0, 0.45, 0]) / 0.7) > 1e-4


# Orders


LOGITS = torch.tensor(
    [
        [0.50, 0.49, 0.01, 0.00],  # neither: little margin
        [0.46, 0.18, 0.18, 0.18],  # largest margin
        [0.55, 0.45, 0.00, 0.00],  # largest probability, and lowest entropy
        [0.30, 0.30, 0.20, 0.20],  # nothing
    ],
    dtype=torch.float64,
).log()


@pytest.mark.parametrize(("order", "first"), [("prob", 2), ("margin", 1), ("entropy", 2)])
def test_the_most_confident_position_is_revealed_first(order, first):
    trace = sample(FixedLogits(LOGITS), gaps(3, 4), steps=4, order=order, trace=True).trace
    assert (trace[0].revealed.long().argmax(-1) == first).all()


def right_to_left(probabilities):
    return torch.arange(probabilities.shape[-2]).expand(probabilities.shape[:-1])


@pytest.mark.parametrize("revise", [False, True])
def test_an_order_may_be_one_s_own(revise):
    trace = sample(FixedLogits(LOGITS), gaps(3, 4), steps=4, order=right_to_left, revise=revise, trace=True).trace
    assert [step.revealed.long().argmax(-1).tolist() for step in trace] == [[place] * 3 for place in (3, 2, 1, 0)]


def test_an_order_of_one_s_own_that_is_the_library_s_is_the_same():
    def surest(probabilities):
        return probabilities.amax(-1)

    def least_entropy(probabilities):
        return (probabilities * probabilities.clamp(min=1e-300).log()).sum(-1)

    model = strong_model(6, 3, 3, CODES["by place"])
    for name, order, more in (
        ("prob", surest, {}),
        ("entropy", least_entropy, {}),
        ("entropy", least_entropy, {"rule": "argmax"}),
        ("entropy", least_entropy, {"order_noise": 0.5, "revise": True}),
    ):
        found = model.sample(20, steps=3, order=order, seeds=range(20), **more).tokens
        assert torch.equal(found, model.sample(20, steps=3, order=name, seeds=range(20), **more).tokens)


@pytest.mark.parametrize("order", [lambda p: p, lambda p: 1.0, lambda p: p[..., 0, 0], [], None])
def test_an_order_that_scores_no_positions_is_refused(order):
    with pytest.raises(InvalidInput, match="order="):
        sample(FixedLogits(LOGITS), gaps(3, 4), steps=2, order=order)


def test_prob_and_entropy_are_different_orders():
    probabilities = torch.tensor([[0.6, 0.1, 0.1, 0.1, 0.1], [0.55, 0.45, 0, 0, 0]], dtype=torch.float64)
    assert confidence(probabilities, "prob").argmax() == 0
    assert confidence(probabilities, "entropy").argmax() == 1


def test_confidences_are_their_definitions():
    probabilities = torch.tensor([0.5, 0.2, 0.3, 0.0], dtype=torch.float64)
    entropy = -sum(p * math.log(p) for p in (0.5, 0.2, 0.3))
    assert math.isclose(float(confidence(probabilities, "prob")), 0.5)
    assert math.isclose(float(confidence(probabilities, "margin")), 0.2)
    assert math.isclose(float(confidence(probabilities, "entropy")), -entropy)


def test_one_symbol_vocabularies_can_be_sampled_in_every_order():
    for order in ORDERS:
        assert sample(FixedLogits(torch.zeros(3, 1)), gaps(2, 3), steps=2, order=order).tokens.tolist() == [[0] * 3] * 2


def test_confidence_orders_look_at_masked_positions_only():
    prompt = torch.tensor([[-1, -1, 0, -1]])  # the surest position is given
    trace = sample(FixedLogits(LOGITS), prompt, steps=3, order="prob", trace=True).trace
    assert [int(step.revealed.long().argmax()) for step in trace] == [0, 1, 3]


def test_random_order_is_uniform_over_positions():
    trace = sample(FixedLogits(LOGITS), gaps(8_000, 4), steps=4, order="random", trace=True, generator=seeded()).trace
    order = torch.stack([step.revealed.long().argmax(-1) for step in trace])  # (4, n)
    numbers = (order * torch.tensor([[64], [16], [4], [1]])).sum(0)
    counts = torch.bincount(numbers).index_select(0, numbers.unique())
    assert len(counts) == 24
    assert chi_square_p(counts, torch.full((24,), 1 / 24)) > 1e-4


def test_argmax_takes_the_most_probable_token():
    tokens = sample(FixedLogits(LOGITS), gaps(4, 4), rule="argmax", steps=1).tokens
    assert torch.equal(tokens, LOGITS.argmax(-1).expand(4, -1))


def test_each_step_conditions_on_what_was_revealed():
    """Argmax under the exact conditionals ends in the support of the law; in one step it need not."""
    known = law("dependence-1")
    canvas = torch.tensor([[3, 10]])
    assert conditionals(known, canvas)[0, 1].argmax() == 4
    tokens = sample(LawOracle(known, 2), torch.tensor([[3, -1], [-1, 0]]), steps=2, rule="argmax").tokens
    assert tokens.tolist() == [[3, 4], [9, 0]]


# z once and fresh


@pytest.mark.parametrize(("z", "distinct"), [("once", 1), ("fresh", 4)])
def test_z_is_drawn_once_for_a_block_or_for_every_step(z, distinct):
    oracle = LatentOracle(law("d2"), 4)
    samples = sample(oracle, gaps(50, 4), steps=4, z=z, generator=seeded())
    draws = torch.stack(oracle.seen)  # (steps, rows, 1, 1)
    assert len(draws.flatten(1).unique(dim=0)) == distinct
    assert torch.equal(samples.z, draws[-1])


def test_z_of_other_blocks_stays_while_a_block_is_decoded():
    oracle = LatentOracle(law("d2"), 2)
    samples = sample(oracle, gaps(50, 4), steps=2, generator=seeded())
    assert torch.equal(oracle.seen[0], oracle.seen[1])
    assert torch.equal(oracle.seen[2][:, 0], oracle.seen[0][:, 0])
    assert torch.equal(oracle.seen[3], samples.z)


def test_the_latents_are_standard_normal_draws():
    model = tiny_model(4, 2, z=latent())
    z = model.sample(4_000, generator=seeded()).z.flatten()
    assert abs(float(z.mean())) < 4 / len(z) ** 0.5
    assert abs(float(z.var()) - 1) < 4 * (2 / len(z)) ** 0.5


def test_a_model_without_latent_has_no_z():
    assert tiny_model(4, 2).sample(2).z is None


def test_fresh_is_refused_where_z_enters_the_clean_stream_of_several_blocks():
    with pytest.raises(InvalidInput, match="z=fresh"):
        tiny_model(4, 2, z=latent(on_clean=True)).sample(2, z="fresh")
    tiny_model(4, 4, z=latent(on_clean=True)).sample(2, z="fresh")  # one block: no later block sees z
    tiny_model(4, 2, z=latent()).sample(2, z="fresh")
    with pytest.raises(InvalidInput, match="z=likeliest"):
        tiny_model(4, 2, z=latent(on_clean=True)).sample(2, z="likeliest")


@pytest.mark.parametrize("kind", ["gaussian", "learned", "categorical", "chain"])
@pytest.mark.parametrize("cache", [True, False])
def test_the_likeliest_latent_is_the_mode_of_its_prior_at_every_step(kind, cache):
    """So that nothing is left to chance where tokens are not drawn either; the last step's is kept."""
    z = {"gaussian": latent(), "learned": learned_prior(), "categorical": codes(), "chain": LatentConfig("chain", codes=4)}
    model = strong_model(4, 2, z=z[kind], vocab_size=5)
    drawn = model.sample(50, steps=2, rule="argmax", z="likeliest", cache=cache, generator=seeded(), trace=True)
    assert len(drawn.tokens.unique(dim=0)) == 1
    before = torch.where(drawn.trace[-1].revealed, model.mask_id, drawn.tokens)  # what the last step saw
    with torch.no_grad():
        prior = model.prior(before, drawn.tokens)
    torch.testing.assert_close(drawn.z[:, 1], prior.likeliest()[:, 1])


# Settings


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"steps": -1},
        {"steps": 3},
        {"order": "best"},
        {"rule": "greedy"},
        {"z": "twice"},
        {"temperature": 0},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"rule": "argmax", "temperature": 0.5},
        {"rule": "argmax", "top_p": 0.5},
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name(options):
    with pytest.raises(InvalidInput, match=list(options)[-1]):
        sample(tiny_model(4, 2), gaps(2, 4), **options)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (gaps(2, 3), r"\(2, 3\)"),
        (gaps(2, 5), r"\(2, 5\)"),
        (torch.tensor([-1, -1, -1, -1]), r"\(4,\)"),
        (torch.tensor([[0, 1, 2, 5]]), "token id 5"),
        (torch.tensor([[0, 1, 2, -2]]), "token id -2"),
        (torch.tensor([[0.0, 1.0, 2.0, -1.0]]), "float"),
    ],
)
def test_bad_prompts_are_refused(prompt, says):
    with pytest.raises(InvalidInput, match=says):
        sample(tiny_model(4, 2), prompt)
    with pytest.raises(InvalidInput, match=says):
        tiny_model(4, 2).sample(prompt=prompt)


def test_a_generator_and_seeds_exclude_each_other():
    with pytest.raises(InvalidInput, match="generator and seeds"):
        sample(tiny_model(4, 2), gaps(2, 4), generator=seeded(), seeds=[1, 2])


def test_too_few_seeds_are_refused_by_the_function_too():
    """One seed for three rows must not silently repeat one row three times."""
    with pytest.raises(InvalidInput, match="seeds"):
        sample(tiny_model(4, 2), gaps(3, 4), seeds=[1])


def test_the_function_leaves_no_graph_either():
    samples = sample(tiny_model(4, 2, z=latent()), gaps(3, 4), trace=True, generator=seeded())
    assert not samples.trace[-1].confidence.requires_grad


@pytest.mark.parametrize("vocab_size", [5, 100])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_prompts_of_other_integer_types_are_completed(dtype, vocab_size):
    prompt, model = gaps(3, 4), tiny_model(4, 2, vocab_size)
    prompt[:, 1] = 2
    tokens = model.sample(prompt=prompt.to(dtype), steps=2, seeds=[1, 2, 3]).tokens
    assert torch.equal(tokens.long(), model.sample(prompt=prompt, steps=2, seeds=[1, 2, 3]).tokens)


# Latents whose prior heeds what is revealed


PRIORS = CODES | {"learned": learned_prior(), "learned-clean": learned_prior(on_clean=True)}
with_priors = pytest.mark.parametrize("z_config", PRIORS.values(), ids=PRIORS)


@with_priors
@pytest.mark.parametrize(("length", "r"), [(4, 2), (12, 3)])
@torch.no_grad()
def test_cached_and_uncached_predictors_draw_the_same_latents_and_give_the_same_logits(z_config, length, r):
    model, rows = strong_model(length, r, 5, z_config), 4
    predictors = [model.predictor(rows, cached=cached) for cached in (True, False)]
    assert type(predictors[0]) is not type(predictors[1])
    latents = [torch.zeros(model.latent_shape(rows)) for _ in predictors]
    x0 = random_tokens(rows, length)
    for block in range(length // r):
        for revealed in range(r):
            canvas = x0.clone()
            canvas[:, block * r + revealed :] = model.mask_id
            noise = torch.randn(rows, latents[0].shape[-1], generator=seeded(10 * block + revealed))
            logits = [p.predict(canvas, block, z, noise) for p, z in zip(predictors, latents, strict=True)]
            torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(*latents, atol=1e-5, rtol=1e-5)
            prior = model.prior(canvas, canvas)
            expected = type(prior)(*(part[:, block] for part in prior)).draw(noise)
            torch.testing.assert_close(latents[0][:, block], expected, atol=1e-5, rtol=1e-5)
            held = [p.predict(canvas, block, z) for p, z in zip(predictors, latents, strict=True)]  # z as it was drawn
            torch.testing.assert_close(held, logits)
        canvas = torch.where(torch.arange(length) < (block + 1) * r, x0, model.mask_id)
        for predictor, z in zip(predictors, latents, strict=True):
            predictor.commit(canvas, block, z)


@pytest.mark.parametrize(
    ("name", "z"), [(name, z) for name in PRIORS for z in ("once", "fresh") if (name, z) != ("learned-clean", "fresh")]
)
def test_cached_and_uncached_samples_of_learned_priors_are_the_same(name, z):
    model = strong_model(6, 2, 5, PRIORS[name])
    prompt = gaps(20, 6)
    prompt[::2, 3] = prompt[1, :2] = 1  # a row's first block is given: its z is drawn all the same
    cached, uncached = (
        model.sample(prompt=prompt, steps=2, order="random", z=z, cache=cache, seeds=range(20)) for cache in (True, False)
    )
    assert torch.equal(cached.tokens, uncached.tokens)
    torch.testing.assert_close(cached.z, uncached.z, atol=1e-4, rtol=1e-4)
    assert cached.nfe == uncached.nfe == 6
    layers = PRIORS[name].code_layers if PRIORS[name].kind == "categorical" else 0
    assert (cached.cache_passes, uncached.cache_passes) == (2 if layers else 0, 0)


RUNS = {  # blocks to write, and the passes that read the others
    "at the beginning": ([4, 5, 6, 7], 1),
    "in the middle": ([0, 6, 7], 1),
    "two": ([2, 5], 3),  # the last, after which nothing follows, for z alone
    "at the end": ([0, 1, 2], 1),
    "all": ([], 1),
}


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "distinct"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["none", "latent", "latent-clean", *PRIORS])
def test_given_blocks_in_a_row_are_read_in_one_pass(name, run, alike):
    z_config = {"none": NO_LATENT, "latent": latent(), "latent-clean": latent(on_clean=True)}.get(name) or PRIORS[name]
    model, (written, reads), passes = strong_model(16, 2, 5, z_config), RUNS[run], []
    prompt = random_tokens(12, 16)
    prompt = prompt[:1].repeat(12, 1) if alike else prompt
    prompt.view(12, 8, 2)[:, written] = -1
    hook = model.decoder.trunk.blocks[0].register_forward_hook(lambda block, args, h: passes.append(len(h)))
    cached = model.sample(prompt=prompt, order="random", seeds=range(12))
    hook.remove()
    uncached = model.sample(prompt=prompt, order="random", seeds=range(12), cache=False)
    assert torch.equal(cached.tokens, uncached.tokens)
    if z_config.kind != "none":
        torch.testing.assert_close(cached.z, uncached.z, atol=1e-4, rtol=1e-4)
    coded = z_config.kind in ("categorical", "chain")
    if 7 not in written and not coded:  # nobody sees the last blocks' keys, and their z needs no pass of the decoder
        reads -= 1
    if not (coded and z_config.code_layers):
        assert cached.cache_passes == reads
    assert (cached.nfe, uncached.nfe) == (len(written), len(written))
    assert len(passes) == cached.nfe + cached.cache_passes
    if run == "at the beginning":
        assert passes[0] == (1 if alike and name not in ("latent-clean", "learned-clean") else 12)


@pytest.mark.parametrize("name", ["none", "latent-clean", *PRIORS])
def test_given_blocks_that_do_not_fit_in_one_pass_take_several(name, monkeypatch):
    model = strong_model(16, 2, 5, {"none": NO_LATENT, "latent-clean": latent(on_clean=True)}.get(name) or PRIORS[name])
    prompt = random_tokens(12, 16)
    prompt[:, 12:] = -1
    whole = model.sample(prompt=prompt, seeds=range(12))
    per_block = 12 * 2 * 4 * model.config.width
    monkeypatch.setattr("vmd.predictor.largest_tensor", lambda device: 4 * per_block)
    parts = model.sample(prompt=prompt, seeds=range(12))
    assert parts.cache_passes == whole.cache_passes + 1
    assert torch.equal(parts.tokens, whole.tokens)
    assert whole.z is None or torch.allclose(parts.z, whole.z, atol=1e-4, rtol=1e-4)


@with_priors
def test_a_row_of_learned_priors_is_the_same_in_any_batch(z_config):
    model = strong_model(6, 2, 5, z_config)
    prompt = gaps(6, 6)
    prompt[1, 2:4] = prompt[2, :2] = prompt[3, 0] = prompt[4] = 1
    whole, alone = (model.sample(prompt=prompt, steps=2, seeds=range(6), batch_size=size) for size in (6, 1))
    assert torch.equal(whole.tokens, alone.tokens)
    torch.testing.assert_close(whole.z, alone.z, atol=1e-5, rtol=1e-5)


def test_fresh_codes_heed_what_earlier_steps_revealed():
    """Drawn fresh, the last code follows the prior of the canvas before the last step."""
    model = strong_model(2, 2, 2, codes())
    samples = model.sample(8_000, steps=2, order="random", z="fresh", trace=True, generator=seeded())
    canvases, which = samples.trace[0].canvas.unique(dim=0, return_inverse=True)
    assert len(canvases) == 4  # either position, either token
    with torch.no_grad():
        prior = model.prior(canvases, canvases).log_probs[:, 0].exp()
    for i in range(4):
        assert chi_square_p(torch.bincount(samples.z[which == i].flatten().long(), minlength=4), prior[i]) > 1e-4
    assert float((prior - prior[:1]).abs().max()) > 0.02  # the test has power


def test_latents_of_a_learned_prior_are_drawn_from_it():
    model = strong_model(2, 2, 5, learned_prior())
    z = model.sample(4_000, generator=seeded()).z[:, 0]
    with torch.no_grad():
        mean, log_std = (part[0, 0] for part in model.gaussian_prior(torch.full((1, 2), 5), torch.zeros(1, 2).long()))
    standard = (z - mean) / log_std.exp()
    assert float(mean.abs().max()) > 0.1  # not the standard normal one
    assert (standard.mean(0).abs() < 4 / 4_000**0.5).all()
    assert ((standard.var(0) - 1).abs() < 4 * (2 / 4_000) ** 0.5).all()


# Chance by row, and desks


def test_hashed_numbers_are_uniform_and_unlike_each_other():
    u = hashed_uniforms(torch.arange(200), 0, 500)  # neighbouring seeds, as people use them
    assert u.dtype == torch.float64
    assert float(u.min()) > 0
    assert float(u.max()) < 1
    counts = torch.histc(u.float(), 50, 0, 1)
    assert chi_square_p(counts, torch.full((50,), 1 / 50)) > 1e-4
    z = torch.special.ndtri(u)
    for across in (z, z.T):  # draws of a row, and rows of a draw
        correlations = torch.corrcoef(across)[~torch.eye(len(across), dtype=torch.bool)]
        assert float(correlations.abs().max()) < 6 / across.shape[1] ** 0.5
        assert float(correlations.square().mean()) == pytest.approx(1 / across.shape[1], rel=0.1)
    assert u.unique().numel() == u.numel()


def test_hashed_numbers_depend_on_seed_and_place_alone():
    seeds = torch.tensor([3, 2**62 - 1, 0])
    whole = hashed_uniforms(seeds, 0, 12)
    assert torch.equal(hashed_uniforms(seeds[1:], 5, 4), whole[1:, 5:9])


def test_splitmix_of_its_reference():
    """The published generator's first output for seed 1234567 (Vigna), and our use of its finaliser."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    assert mix(1234567 + golden & mask) == 6457827717110365317
    state = mix(42)
    expected = [((mix(state + (i + 1) * golden & mask) >> 12) + 0.5) * 2.0**-52 for i in range(20)]
    assert hashed_uniforms(torch.tensor([42]), 0, 20)[0].tolist() == expected


@pytest.mark.parametrize("z_config", [NO_LATENT, latent(on_clean=True), *PRIORS.values()])
def test_a_desk_used_again_gives_what_a_new_one_gives(z_config):
    model = strong_model(6, 2, 5, z_config)
    desk = model.desk(4)
    prompt = gaps(4, 6)
    prompt[0, 2:4] = prompt[1, 0] = 1
    for seed in (1, 2):
        seeds = range(seed, seed + 4)
        again = model.sample(prompt=prompt, steps=2, seeds=seeds, desk=desk)
        new = model.sample(prompt=prompt, steps=2, seeds=seeds)
        assert torch.equal(again.tokens, new.tokens)
        assert again.cache_passes == new.cache_passes
        assert again.z is None or torch.equal(again.z, new.z)


@pytest.mark.parametrize(("n", "rows"), [(1, 4), (4, 4), (9, 4)])
def test_batches_are_filled_up_to_the_desk_and_cut_again(n, rows):
    model = tiny_model(6, 2, z=latent())
    drawn = model.sample(n, seeds=range(n), desk=model.desk(rows))
    assert torch.equal(drawn.tokens, model.sample(n, seeds=range(n)).tokens)
    assert drawn.z.shape == (n, 3, 3)


def test_results_are_not_the_desk_s_own_memory():
    model = tiny_model(6, 2)
    desk = model.desk(3)
    first = model.sample(3, seeds=range(3), desk=desk)
    kept = first.tokens.clone()
    model.sample(3, seeds=range(10, 13), desk=desk)
    assert torch.equal(first.tokens, kept)


def test_recording_needs_a_gpu():
    with pytest.raises(InvalidInput, match="GPU"):
        tiny_model(6, 2).desk(3, record=True)


def test_a_desk_serves_its_own_model_and_rows():
    model, other = tiny_model(6, 2), tiny_model(6, 2, seed=1)
    with pytest.raises(InvalidInput, match="another model"):
        other.sample(4, desk=model.desk(4))
    with pytest.raises(InvalidInput, match="cache=False"):
        model.sample(4, desk=model.desk(4), cache=False)
    with pytest.raises(InvalidInput, match="0 rows"):
        model.desk(0)
    with pytest.raises(InvalidInput, match="batch_size=0"):
        model.sample(4, batch_size=0)
    with pytest.raises(InvalidInput, match="2\\^63"):
        model.sample(1, seeds=[2**63])


def test_traces_are_cut_to_the_rows_asked_for():
    model = tiny_model(6, 2)
    traced = model.sample(3, steps=2, trace=True, desk=model.desk(4))
    assert all(len(part) == 3 for step in traced.trace for part in step[2:])


@pytest.mark.parametrize("z_config", [NO_LATENT, latent(), codes()])
def test_samples_under_autocast(z_config):
    model = tiny_model(6, 2, z=z_config)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.sample(3, steps=2).tokens.shape == (3, 6)


# Revising


class ChangesItsMind(FixedLogits):
    """Sure of a wrong first token at first; once the second is written it knows better."""

    def predict(self, canvas, block, z, noise=None):
        logits = super().predict(canvas, block, z).clone()
        knows = canvas[:, 1] != self.config.vocab_size
        logits[knows, 0] = torch.tensor([0.0, 9.0, 0.0]).double()
        return logits


@pytest.mark.parametrize("order", ["prob", "margin"])
def test_what_the_model_has_come_to_doubt_is_written_anew(order):
    doubts = ChangesItsMind(torch.tensor([[8.0, 0, 0], [0, 5.0, 0], [0, 0, 1.0], [0.5, 0, 0]]).double())
    options = {"steps": 4, "order": order, "rule": "argmax"}
    assert sample(doubts, gaps(2, 4), **options).tokens.tolist() == [[0, 1, 2, 0]] * 2
    assert sample(doubts, gaps(2, 4), revise=True, **options).tokens.tolist() == [[1, 1, 2, 0]] * 2


@pytest.mark.parametrize("order", ["prob", "margin", "entropy"])
@pytest.mark.parametrize("rule", RULES)
def test_revising_leaves_no_gap_and_no_given_token_moves(order, rule):
    model = tiny_model(8, 4, z=codes())
    prompt = gaps(12, 8)
    prompt[::2, 1] = prompt[::3, 5:7] = 2
    drawn = model.sample(prompt=prompt, steps=3, order=order, rule=rule, revise=True, seeds=range(12), trace=True)
    assert int(drawn.tokens.max()) < 5
    assert bool((drawn.tokens == prompt)[prompt >= 0].all())
    masked = [int((step.canvas[:, 4 * step.block : 4 * step.block + 4] == 5).sum()) for step in drawn.trace]
    assert masked[0] >= masked[1] >= masked[2] == 0  # as many are kept as without
    assert masked[3] >= masked[4] >= masked[5] == 0


def test_without_doubts_revising_changes_nothing():
    logits = torch.randn(6, 5, generator=seeded()).double()
    options = {"steps": 3, "order": "prob", "rule": "argmax"}
    plain, revised = (sample(FixedLogits(logits), gaps(3, 6), revise=r, **options).tokens for r in (False, True))
    assert torch.equal(plain, revised)


def test_random_orders_have_nothing_to_doubt():
    with pytest.raises(InvalidInput, match="revise"):
        tiny_model().sample(2, order="random", revise=True)


# Noise on the order


@pytest.mark.parametrize("revise", [False, True])
def test_no_noise_on_the_order_changes_nothing(revise):
    model = tiny_model(6, 3, z=latent())
    options = {"steps": 3, "order": "margin", "revise": revise, "trace": True}
    for chance in (lambda: {"seeds": range(8)}, lambda: {"generator": seeded(3)}):
        plain, noisy = (model.sample(8, **options, **chance(), **more) for more in ({}, {"order_noise": 0.0}))
        assert torch.equal(plain.tokens, noisy.tokens)
        for a, b in zip(plain.trace, noisy.trace, strict=True):
            assert torch.equal(a.revealed, b.revealed)
            assert torch.equal(a.confidence.nan_to_num(), b.confidence.nan_to_num())


@pytest.mark.parametrize("order", ["prob", "margin", "entropy"])
@pytest.mark.parametrize("noise", [0.05, 0.5])
def test_with_gumbel_noise_the_first_position_is_drawn_by_its_confidence(order, noise):
    """The largest of confidence + noise * Gumbel is position i in proportion to exp(confidence_i / noise). For prob, log p
    is the confidence. At the first of four steps three quarters of the noise are there."""
    options = {"steps": 4, "order": order, "order_noise": noise, "trace": True, "generator": seeded()}
    first = sample(FixedLogits(LOGITS), gaps(8_000, 4), **options).trace[0].revealed.long().argmax(-1)
    sure = confidence(LOGITS.exp(), order)
    law_of_first = ((sure.log() if order == "prob" else sure) / (0.75 * noise)).softmax(-1)
    assert chi_square_p(torch.bincount(first, minlength=4), law_of_first) > 1e-4
    assert float(law_of_first.max() - law_of_first.min()) > 0.05  # not uniform


def test_noise_on_the_order_falls_with_the_steps_to_come():
    """Revising, a step weighs all tokens again. The third of four masks one: the least sure, with a quarter of the noise."""
    options = {"steps": 4, "order": "prob", "rule": "argmax", "order_noise": 0.5, "revise": True, "trace": True}
    trace = sample(FixedLogits(LOGITS), gaps(8_000, 4), generator=seeded(), **options).trace
    masked = (trace[2].canvas == LOGITS.shape[1]).long().argmax(-1)
    gumbel = -(-torch.rand(200_000, 4, generator=seeded(1)).double().log()).log()
    least = (LOGITS.exp().amax(-1).log() + 0.5 * 0.25 * gumbel).argmin(-1)
    assert chi_square_p(torch.bincount(masked, minlength=4), torch.bincount(least, minlength=4) / len(least)) > 1e-4


def test_very_noisy_orders_are_uniform():
    options = {"steps": 4, "order": "prob", "order_noise": 1e6, "trace": True, "generator": seeded()}
    trace = sample(FixedLogits(LOGITS), gaps(8_000, 4), **options).trace
    order = torch.stack([step.revealed.long().argmax(-1) for step in trace])
    numbers = (order * torch.tensor([[64], [16], [4], [1]])).sum(0)
    counts = torch.bincount(numbers).index_select(0, numbers.unique())
    assert len(counts) == 24
    assert chi_square_p(counts, torch.full((24,), 1 / 24)) > 1e-4


@settings(max_examples=60)
@given(
    prompts(),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(["prob", "margin", "entropy"]),
    st.sampled_from(RULES),
    st.sampled_from([0.1, 3.0, 1e12]),
    st.booleans(),
)
def test_noisy_orders_leave_given_tokens_alone_and_no_gap_open(prompt, key, order, rule, noise, revise):
    model = MODELS[key]
    options = {"steps": model.config.block_size, "order": order, "rule": rule, "revise": revise, "trace": True}
    samples = model.sample(prompt=prompt, order_noise=noise, generator=seeded(), **options)
    assert ((samples.tokens >= 0) & (samples.tokens < 5)).all()
    for canvas in (samples.tokens, *(step.canvas for step in samples.trace)):
        assert torch.equal(canvas[prompt >= 0], prompt[prompt >= 0])


def test_noise_on_the_order_has_nothing_to_say_in_one_step():
    model = tiny_model(6, 6, z=latent())
    plain, noisy = (model.sample(8, steps=1, rule="sample", order_noise=n, seeds=range(8)).tokens for n in (0.0, 5.0))
    assert torch.equal(plain, noisy)


def test_with_seeds_a_row_in_a_noisy_order_is_the_same_in_any_batch():
    model = strong_model(6, 3, 5, latent())
    prompt = gaps(8, 6)
    prompt[1, 2:4] = prompt[2, :2] = prompt[4] = 1
    seeds = [100 + i for i in range(8)]
    options = {"steps": 3, "order": "prob", "rule": "argmax", "order_noise": 0.5}
    whole = model.sample(prompt=prompt, seeds=seeds, **options).tokens
    for size in (1, 3):
        assert torch.equal(model.sample(prompt=prompt, seeds=seeds, batch_size=size, **options).tokens, whole)
    greedy = model.sample(prompt=prompt, seeds=seeds, **(options | {"order_noise": 0.0})).tokens
    assert not torch.equal(greedy, whole)  # the noise is there


@pytest.mark.parametrize(
    "wrong",
    [{"order": "random", "order_noise": 0.5}, {"order_noise": -0.1}, {"order_noise": math.inf}, {"order_noise": math.nan}],
)
def test_noise_without_an_order_or_a_size_is_refused(wrong):
    with pytest.raises(InvalidInput, match="order_noise"):
        tiny_model().sample(2, **wrong)
