import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import chi_square_p, mean_is, random_tokens, standard_error
from vmd.likelihood import all_orders
from vmd.masking import LINEAR_TIMES, all_masks, apply_mask, draw_masks, draw_steps, stratified_uniforms
from vmd.sampling import reveal_counts

KINDS = ("counts", "times", "linear")


@st.composite
def masking_problems(draw):
    rows, blocks, r = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    fixed = draw(st.none() | st.lists(st.booleans(), min_size=rows * blocks * r, max_size=rows * blocks * r))
    fixed = None if fixed is None else torch.tensor(fixed).view(rows, blocks * r)
    return random_tokens(rows, blocks * r), r, fixed, draw(st.integers(0, 2**31))


def draw_with(problem, kind="counts"):
    x0, r, fixed, seed = problem
    return draw_masks(x0, r, kind=kind, fixed=fixed, generator=torch.Generator().manual_seed(seed))


@given(masking_problems(), st.sampled_from(KINDS))
def test_fixed_tokens_are_never_masked(problem, kind):
    x0, r, fixed, _ = problem
    masks = draw_with(problem, kind)
    assert masks.mask.shape == x0.shape
    assert masks.mask.dtype == torch.bool
    assert masks.weight.shape == (len(x0), x0.shape[1] // r)
    if fixed is not None:
        assert not (masks.mask & fixed).any()


@given(masking_problems())
def test_counts_are_between_one_and_the_maskable_tokens_and_weigh_m_over_k(problem):
    x0, r, fixed, _ = problem
    masks = draw_with(problem)
    free = torch.ones_like(x0, dtype=torch.bool) if fixed is None else ~fixed
    m, k = free.unflatten(1, (-1, r)).sum(-1), masks.mask.unflatten(1, (-1, r)).sum(-1)
    assert ((k >= 1) & (k <= m))[m > 0].all()
    assert (k[m == 0] == 0).all()
    assert (masks.weight[m == 0] == 0).all()
    torch.testing.assert_close(masks.weight[m > 0], (m / k)[m > 0].float())


@given(masking_problems(), st.sampled_from(KINDS))
def test_a_block_without_masks_weighs_nothing_and_every_other_something(problem, kind):
    _, r, _, _ = problem
    masks = draw_with(problem, kind)
    assert ((masks.weight > 0) == masks.mask.unflatten(1, (-1, r)).any(-1)).all()
    assert masks.weight.isfinite().all()


@given(masking_problems(), st.sampled_from(KINDS))
def test_the_same_seed_gives_the_same_masks(problem, kind):
    first, second = draw_with(problem, kind), draw_with(problem, kind)
    assert torch.equal(first.mask, second.mask)
    assert torch.equal(first.weight, second.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_gives_other_masks(kind):
    x0 = random_tokens(32, 8)
    first, second = (draw_masks(x0, 4, kind=kind, generator=torch.Generator().manual_seed(s)).mask for s in (1, 2))
    assert not torch.equal(first, second)


def test_one_row_of_fixed_positions_holds_for_all_rows(generator):
    fixed = torch.tensor([True, False, False, True])
    masks = draw_masks(random_tokens(50, 4), 2, fixed=fixed, generator=generator)
    assert not masks.mask[:, fixed].any()
    assert masks.mask[:, ~fixed].all()  # one maskable token in each block
    assert (masks.weight == 1).all()


def test_one_token_blocks_are_always_masked_with_weight_one(generator):
    masks = draw_masks(random_tokens(20, 5), 1, generator=generator)
    assert masks.mask.all()
    assert (masks.weight == 1).all()


def test_the_count_of_every_row_and_block_is_uniform():
    rows, blocks, r, repeats = 3, 2, 4, 1500
    generator = torch.Generator().manual_seed(5)
    x0 = random_tokens(rows, blocks * r)
    drawn = [draw_masks(x0, r, generator=generator).mask.view(rows, blocks, r).sum(-1) for _ in range(repeats)]
    counts = torch.stack(drawn)
    for row, block in itertools.product(range(rows), range(blocks)):
        seen = torch.bincount(counts[:, row, block], minlength=r + 1)
        assert seen[0] == 0
        assert chi_square_p(seen[1:], torch.full((r,), 1 / r)) > 1e-4


def test_the_count_is_uniform_over_the_maskable_tokens_of_a_row(generator):
    fixed = torch.tensor([[True, False, False, False]])
    masks = draw_masks(random_tokens(3000, 4), 4, fixed=fixed, generator=generator)
    seen = torch.bincount(masks.mask.sum(-1), minlength=5)
    assert seen.tolist() == [0, 1000, 1000, 1000, 0]  # stratified: even, not only on average


def test_a_share_of_blocks_is_masked_whole_besides(generator):
    masks = draw_masks(random_tokens(50, 8), 4, whole=0.2, generator=generator)
    seen = torch.bincount(masks.mask.view(100, 4).sum(-1), minlength=5)
    assert seen.tolist() == [0, 20, 20, 20, 40]
    assert (masks.weight == 4 / masks.mask.view(50, 2, 4).sum(-1)).all()


def test_counts_are_stratified_over_a_batch(generator):
    masks = draw_masks(random_tokens(50, 8), 4, generator=generator)
    seen = torch.bincount(masks.mask.view(100, 4).sum(-1), minlength=5)
    assert seen.tolist() == [0, 25, 25, 25, 25]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_given_its_size_every_subset_is_as_likely(generator, k):
    mask = draw_masks(random_tokens(8000, 4), 4, generator=generator).mask
    of_size = mask[mask.sum(-1) == k]
    subsets = torch.tensor([s for s in itertools.product([False, True], repeat=4) if sum(s) == k])
    seen = (of_size.unsqueeze(1) == subsets).all(-1).sum(0)
    assert seen.sum() == len(of_size)
    assert chi_square_p(seen, torch.full((len(subsets),), 1 / len(subsets))) > 1e-4


def test_all_masks_holds_every_non_empty_mask_once():
    masks, coefficients = all_masks(4)
    assert len({tuple(m) for m in masks.tolist()}) == 15
    assert masks.any(-1).all()
    assert coefficients.dtype == torch.float64


@pytest.mark.parametrize("r", [1, 2, 3, 5])
def test_all_masks_coefficients_are_the_integral_over_time(r):
    masks, coefficients = all_masks(r)
    t = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    for mask, coefficient in zip(masks, coefficients.tolist(), strict=True):
        k = int(mask.sum())
        assert math.isclose(coefficient, float((t ** (k - 1) * (1 - t) ** (r - k)).mean()), rel_tol=1e-6)


@pytest.mark.parametrize(("kind", "options"), [("counts", {}), ("counts", {"whole": 0.3}), ("times", {"t_min": 1e-4})])
@pytest.mark.parametrize("given_tokens", [0, 1])
def test_both_kinds_estimate_the_enumerated_expectation(generator, kind, options, given_tokens):
    """On an arbitrary function of the mask, with and without a fixed token."""
    r, rows = 4, 200_000
    m = r - given_tokens
    patterns, coefficients = all_masks(m)
    worth = torch.randn(2**m, generator=generator, dtype=torch.float64) + 1
    powers = 2 ** torch.arange(m)
    exact = float((coefficients * worth[(patterns * powers).sum(-1)]).sum())
    whole = options.get("whole", 0.0)
    exact = (1 - whole) * exact + whole * float(worth[-1])
    fixed = torch.arange(r) < given_tokens
    masks = draw_masks(torch.zeros(rows, r, dtype=torch.long), r, kind=kind, fixed=fixed, generator=generator, **options)
    values = masks.weight[:, 0].double() * worth[(masks.mask[:, given_tokens:] * powers).sum(-1)]
    error = float(values.std()) / rows**0.5
    assert abs(float(values.mean()) - exact) < 4 * error
    assert 4 * error < 0.1 * abs(exact)  # the test has power


def test_times_masks_tokens_independently_with_probability_t():
    """Marginally over t ~ U(0, 1] each token is masked half of the time, two tokens a third of the time."""
    masks = draw_masks(torch.zeros(60_000, 2, dtype=torch.long), 2, kind="times", t_min=0.0).mask.double()
    assert abs(float(masks[:, 0].mean()) - 1 / 2) < 0.01
    assert abs(float(masks.prod(-1).mean()) - 1 / 3) < 0.01


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="neither"):
        draw_masks(random_tokens(1, 2), 2, kind="neither")


def test_apply_mask_hides_the_masked_tokens_and_no_other():
    x0, mask = torch.tensor([[1, 2, 3]]), torch.tensor([[True, False, True]])
    assert apply_mask(x0, mask, 9).tolist() == [[9, 2, 9]]


@given(st.integers(1, 200), st.integers(0, 2**31))
def test_strata_hold_one_number_each_at_one_shared_offset(count, seed):
    u = stratified_uniforms(count, generator=torch.Generator().manual_seed(seed))
    assert u.dtype == torch.float64
    assert ((u >= 0) & (u < 1)).all()
    offsets = u.sort().values * count - torch.arange(count)
    assert ((offsets > -1e-9) & (offsets < 1)).all()
    torch.testing.assert_close(offsets, offsets[:1].expand(count), atol=1e-9, rtol=0)


def test_each_stratified_number_is_uniform_and_not_tied_to_its_row(generator):
    count, repeats = 5, 4000
    u = torch.stack([stratified_uniforms(count, generator=generator) for _ in range(repeats)])
    for row in range(count):
        seen = torch.histc(u[:, row].float(), bins=20, min=0, max=1)
        assert chi_square_p(seen, torch.full((20,), 1 / 20)) > 1e-4


# The steps of a sampler


@st.composite
def step_problems(draw):
    x0, r, fixed, seed = draw(masking_problems())
    return x0, r, fixed, tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))), seed


def steps_of(problem, whole: bool):
    x0, r, fixed, choices, seed = problem
    return draw_steps(x0, r, choices, whole=whole, fixed=fixed, generator=torch.Generator().manual_seed(seed))


def maskable_tokens(x0, fixed):
    return torch.ones_like(x0, dtype=torch.bool) if fixed is None else ~fixed


@given(step_problems())
def test_the_steps_of_a_sampler_score_every_maskable_token_once_while_it_is_masked(problem):
    x0, r, fixed, choices, _ = problem
    masks, free = steps_of(problem, whole=True), maskable_tokens(x0, fixed)
    assert masks.mask.shape == masks.target.shape == (len(x0), max(choices), x0.shape[1])
    assert torch.equal(masks.target.long().sum(1), free.long())  # fixed tokens are never scored, the others once
    still_hidden = masks.target.flip(1).cumsum(1).flip(1) > 0  # by this step or a later one
    assert torch.equal(masks.mask, still_hidden)
    assert torch.equal(masks.weight, free.unflatten(1, (-1, r)).any(-1).float())


@given(step_problems())
def test_the_steps_of_a_sampler_reveal_its_counts(problem):
    """Those of one of the choices, for every block; behind its last step come empty ones."""
    x0, r, fixed, choices, _ = problem
    masks = steps_of(problem, whole=True)
    m = maskable_tokens(x0, fixed).unflatten(1, (-1, r)).sum(-1)
    counts = masks.target.unflatten(2, (-1, r)).sum(-1)  # (B, J, blocks)
    plans = []
    for steps in choices:
        plan = reveal_counts(m.flatten(), steps).T.view(*m.shape, steps).movedim(2, 1)
        plans.append(torch.nn.functional.pad(plan, (0, 0, 0, max(choices) - steps)))
    fits = torch.stack([(counts == plan).all(1) for plan in plans])  # (choices, B, blocks)
    assert fits.any(0).all()


@given(step_problems())
def test_a_single_step_is_one_of_the_steps_of_a_sampler(problem):
    x0, r, fixed, choices, _ = problem
    masks, free = steps_of(problem, whole=False), maskable_tokens(x0, fixed)
    assert masks.mask.shape == x0.shape
    assert not (masks.mask & ~free).any()
    assert not (masks.target & ~masks.mask).any()
    blocks = [part.unflatten(1, (-1, r)).sum(-1).flatten().tolist() for part in (free, masks.mask, masks.target)]
    for m, hidden, revealed, weight in zip(*blocks, masks.weight.flatten().tolist(), strict=True):
        assert (weight > 0) == (revealed > 0)
        assert weight in (0, *choices)
        of = [int(weight)] if weight else choices
        assert any((hidden, revealed) in plan_of(m, steps) for steps in of)


def plan_of(m: int, steps: int) -> list[tuple[int, int]]:
    """(hidden before, revealed by) each step that fills m tokens."""
    counts = reveal_counts(torch.tensor([m]), steps)[:, 0].tolist()
    return [(m - sum(counts[:j]), counts[j]) for j in range(steps)]


@given(step_problems(), st.booleans())
def test_the_same_seed_gives_the_same_steps(problem, whole):
    for first, second in zip(steps_of(problem, whole)[:3], steps_of(problem, whole)[:3], strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("given_tokens", [0, 1])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6])
def test_a_single_step_and_the_sum_over_all_steps_have_the_enumerated_expectation(generator, steps, given_tokens):
    """On an arbitrary function of what a step hides and scores, with and without a fixed token."""
    r, rows = 4, 40_000
    m = r - given_tokens
    worth = torch.randn(2**m, 2**m, generator=generator, dtype=torch.float64) + 1
    worth[:, 0] = 0  # nothing is scored

    def value(mask, target):
        powers = 2 ** torch.arange(m)
        return worth[(mask * powers).sum(-1), (target * powers).sum(-1)]

    orders = all_orders(m, steps)  # (O, N, m)
    exact = float(value(orders.flip(1).cumsum(1).flip(1) > 0, orders).sum(1).mean())
    fixed = torch.arange(r) < given_tokens
    x0 = torch.zeros(rows, r, dtype=torch.long)
    single = draw_steps(x0, r, (steps,), fixed=fixed, generator=generator)
    whole = draw_steps(x0, r, (steps,), whole=True, fixed=fixed, generator=generator)
    free = ~fixed
    estimates = (
        single.weight[:, 0] * value(single.mask[:, free], single.target[:, free]),
        whole.weight[:, 0] * value(whole.mask[..., free], whole.target[..., free]).sum(1),
    )
    for draws in estimates:
        assert mean_is(draws, exact)
        assert standard_error(draws) < 0.05 * abs(exact)  # the test has power


def test_every_order_of_the_steps_is_as_likely(generator):
    orders = all_orders(4, 3)
    drawn = draw_steps(random_tokens(6000, 8), 4, (3,), whole=True, generator=generator).target
    drawn = drawn.unflatten(2, (2, 4)).movedim(2, 1).flatten(0, 1)  # (rows and blocks, N, r)
    seen = (drawn.unsqueeze(1) == orders).flatten(2).all(-1).sum(0)
    assert seen.sum() == len(drawn)
    assert chi_square_p(seen, torch.full((len(orders),), 1 / len(orders))) > 1e-4


def test_choices_and_their_steps_come_equally_often(generator):
    """Stratified over rows and blocks: even, not only on average."""
    masks = draw_steps(random_tokens(60, 8), 4, (1, 2, 4), generator=generator)
    hidden = masks.mask.view(120, 4).sum(-1)
    weight = masks.weight.flatten().long()
    assert torch.bincount(weight, minlength=5).tolist() == [0, 40, 40, 0, 40]
    assert torch.bincount(hidden[weight == 2], minlength=5).tolist() == [0, 0, 20, 0, 20]
    assert torch.bincount(hidden[weight == 4], minlength=5).tolist() == [0, 10, 10, 10, 10]
    whole = draw_steps(random_tokens(60, 8), 4, (1, 2, 4), whole=True, generator=generator)
    steps = whole.target.view(60, 4, 2, 4).any(-1).sum(1).flatten()
    assert torch.bincount(steps).tolist() == [0, 40, 40, 0, 40]


def test_more_steps_than_tokens_leave_steps_empty_at_no_weight(generator):
    fixed = torch.tensor([False, True, True, False])
    masks = draw_steps(random_tokens(80, 4), 4, (4,), fixed=fixed, generator=generator)
    assert torch.bincount(masks.weight[:, 0].long()).tolist() == [40, 0, 0, 0, 40]  # two steps of four reveal a token
    whole = draw_steps(random_tokens(80, 4), 4, (4,), whole=True, fixed=fixed, generator=generator)
    assert (whole.target.sum(-1).sort(-1).values == torch.tensor([0, 0, 1, 1])).all()


def test_a_block_of_fixed_tokens_has_no_weight_in_any_form(generator):
    fixed = torch.tensor([True, True, False, False])
    for whole in (False, True):
        masks = draw_steps(random_tokens(10, 4), 2, (1, 2), whole=whole, fixed=fixed, generator=generator)
        assert (masks.weight[:, 0] == 0).all()
        assert (masks.weight[:, 1] > 0).all()


# Twenty times of linear weights


def test_linear_times_come_equally_often_and_weigh_what_is_left_to_the_end(generator):
    """T = 20 times t = 1/T..1 of weight (T - (tT - 1)) / T, stratified: even, not only on average."""
    masks = draw_masks(random_tokens(400, 300), 300, kind="linear", generator=generator)
    steps = (LINEAR_TIMES + 1 - masks.weight[:, 0] * LINEAR_TIMES).round().long()  # tT
    assert torch.bincount(steps, minlength=21).tolist() == [0] + [20] * 20
    torch.testing.assert_close(masks.weight[:, 0], (LINEAR_TIMES - (steps - 1)) / LINEAR_TIMES)
    shares = torch.stack([masks.mask[steps == step].double().mean() for step in range(1, 21)])
    t = torch.arange(1, 21) / 20
    assert ((shares - t).abs() < 5 * (t * (1 - t) / (20 * 300)).sqrt() + 1e-9).all()


@pytest.mark.parametrize("given_tokens", [0, 1])
def test_linear_masks_have_the_enumerated_expectation(generator, given_tokens):
    """On an arbitrary function of the mask: tokens are masked independently with probability t."""
    r, rows = 4, 100_000
    m = r - given_tokens
    patterns = torch.tensor(list(itertools.product([False, True], repeat=m)))
    worth = torch.randn(2**m, generator=generator, dtype=torch.float64) + 1
    worth[0] = 0  # nothing is masked
    powers = 2 ** torch.arange(m)
    values, k = worth[(patterns * powers).sum(-1)], patterns.sum(-1)
    times = [step / 20 for step in range(1, 21)]
    exact = sum(float((1.05 - t) * (t**k * (1 - t) ** (m - k) * values).sum()) for t in times) / 20
    fixed = torch.arange(r) < given_tokens
    masks = draw_masks(torch.zeros(rows, r, dtype=torch.long), r, kind="linear", fixed=fixed, generator=generator)
    draws = masks.weight[:, 0] * worth[(masks.mask[:, given_tokens:] * powers).sum(-1)]
    assert mean_is(draws, exact)
    assert 4 * standard_error(draws) < 0.1 * abs(exact)  # the test has power
