import math
from dataclasses import replace

import pytest
import torch

import vmd
from helpers import (
    NO_LATENT,
    all_sequences,
    close,
    codes,
    latent,
    learned_prior,
    random_law,
    random_tokens,
    strong_model,
    tiny_model,
)
from vmd import likelihood
from vmd.config import InvalidInput, LatentConfig
from vmd.data import ArrayData, law
from vmd.data.synthetic import d1, d2, dependence
from vmd.data.tokenizers import CharTokenizer
from vmd.diagnostics import advice, describe
from vmd.evaluation import CERTIFIED, diagnose_model, evaluate_model
from vmd.likelihood import enumerate_orders, in_bits, nll_bound, random_order_nll
from vmd.model import VMD

SURROGATE, BOUND = "surrogate (not a bound), bits per token", "bound at N = block size, bits per token"
EXACT, COUNTED = "KL(data || model), nats", "KL(data || samples), nats"


def uniform_model(z=None, vocab_size: int = 10) -> VMD:
    """Predicts every token with probability 1 / V."""
    model = tiny_model(vocab_size=vocab_size) if z is None else tiny_model(vocab_size=vocab_size, z=z)
    torch.nn.init.zeros_(model.decoder.head.weight)
    torch.nn.init.zeros_(model.decoder.head.bias)
    return model


def metrics(rows: list[dict]) -> list[str]:
    return [row["metric"] for row in rows]


def array(vocab_size: int = 10, rows: int = 30) -> ArrayData:
    return ArrayData(random_tokens(rows, 4, vocab_size, seed=3).numpy())


def test_a_uniform_model_scores_log_v_bits_per_token_exactly():
    """Whatever is masked: k tokens of weight r/k cost r log V."""
    rows = evaluate_model(uniform_model(), array(), [1, 2])
    assert metrics(rows) == [CERTIFIED] * 4 + [BOUND]  # random order and order prob for each number of steps
    for row in rows:
        assert close(row["value"], math.log2(10), 1e-6)
        assert row["stderr"] < 1e-6


def test_the_exact_kl_of_a_uniform_model_is_what_entropy_lacks():
    rows = {row["metric"]: row["value"] for row in evaluate_model(uniform_model(), d1(), [1], n=10)}
    assert close(rows[EXACT], 4 * math.log(10) - math.log(10), 1e-6)


def test_samples_of_a_uniform_model_are_counted():
    rows = evaluate_model(uniform_model(), d2(), [1], n=5_000)
    value = {row["metric"]: row["value"] for row in rows if "rule sample" in row["about"]}
    assert abs(value["accuracy, %"] - 1) < 0.6
    assert value[COUNTED] > 2 * math.log(10) - 0.1


def test_of_an_array_bounds_and_objective_are_known():
    assert set(metrics(evaluate_model(tiny_model(vocab_size=10), array(), [1, 2]))) == {CERTIFIED, BOUND}
    found = metrics(evaluate_model(tiny_model(vocab_size=10, z=latent()), array(), [1, 2], iwae=(1, 4)))
    assert found[:5] == [CERTIFIED] * 4 + [SURROGATE]


CODES = LatentConfig(kind="categorical", codes=6)


@pytest.mark.parametrize("z", [NO_LATENT, latent(), CODES], ids=["none", "gaussian", "codes"])
@pytest.mark.parametrize("draw", ["once", "fresh"])
def test_certified_bits_of_a_law_are_not_below_its_entropy(z, draw):
    truth = random_law(4, 3)
    rows = evaluate_model(tiny_model(4, 2, 3, z=z), truth, [1, 2], z=draw, iwae=(1, 8), n=20, rows_scored=400)
    certified = [row for row in rows if row["metric"] == CERTIFIED]
    assert len(certified) >= 2
    for row in certified:
        assert row["value"] + 3 * (row["stderr"] or 0) > truth.entropy / (4 * math.log(2))


def test_certified_rows_name_their_sampler():
    rows = evaluate_model(tiny_model(vocab_size=10, z=latent()), array(), [1, 2], z="fresh", iwae=(1, 4))
    certified = [row for row in rows if row["metric"] == CERTIFIED]
    assert [(row["steps"], row["iwae"], row["z"], row["order"]) for row in certified] == [
        (steps, samples, "fresh", "random") for steps in (1, 2) for samples in (1, 4)
    ]
    for row in certified:
        for part in (f"NFE {2 * row['steps']}", "random order", "rule sample", f"IWAE {row['iwae']}", "z fresh"):
            assert part in row["about"]


def test_given_tokens_cost_no_bits():
    """A uniform model pays log V for each token that is not given, whatever the steps."""
    rows = evaluate_model(uniform_model(), array(), [1, 2], fixed="0:3")
    assert all(close(row["value"], math.log2(10), 1e-6) for row in rows)
    assert all(row["order"] == "random" for row in rows if row["metric"] == CERTIFIED)


@pytest.mark.parametrize("z", [latent(), CODES], ids=["gaussian", "codes"])
def test_a_latent_that_nothing_reads_carries_nothing(z):
    """Every code and every z predicts the same, so that the posterior over codes is the prior."""
    model = uniform_model(z)
    for name, parameter in model.named_parameters():
        if "pathway.out" in name or name == "encoder.head.weight" or name == "encoder.head.bias":
            torch.nn.init.zeros_(parameter)
    found = diagnose_model(model, array())
    assert found.information < 0.01
    assert abs(found.kl) < 0.01
    assert abs(found.nll_gap) < 1e-5
    assert advice(found, z.kind).startswith("the latent has collapsed")
    assert found.size == (6 if z.kind == "categorical" else 3) == len(found.spread)


def test_no_latent_has_no_diagnosis():
    assert diagnose_model(tiny_model(vocab_size=10), array()) is None


def test_dead_codes_are_not_counted_as_used():
    model = tiny_model(vocab_size=10, z=CODES)
    with torch.no_grad():
        model.decoder.pathway.prior.bias[2:] = -60.0
    found = diagnose_model(model, array())
    assert found.active <= 2
    assert sum(found.spread) == pytest.approx(1, abs=1e-5)


def test_the_kl_is_information_and_gap():
    for z in (latent(), CODES):
        found = diagnose_model(tiny_model(4, 4, 10, z=z), array())
        assert found.kl == pytest.approx(found.information + found.marginal_gap, abs=1e-4)
        assert sum(found.spread) == pytest.approx(found.kl if z.kind == "gaussian" else 1, abs=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 30])
@pytest.mark.parametrize("z", [latent(), CODES, LatentConfig(kind="chain", codes=4)], ids=["gaussian", "codes", "chain"])
def test_what_so_few_rows_cannot_tell_is_not_told(z, rows):
    """Within n rows I(x; z) is at most log n, for each code of a chain."""
    found = diagnose_model(tiny_model(4, 4, 10, z=z), array(), rows=rows)
    assert found.limit == pytest.approx((4 if z.kind == "chain" else 1) * math.log(rows))
    if rows == 1:
        assert "I(x; z) not told by one row; " in describe(found, z.kind)
        return
    assert found.information <= found.limit + 1e-6
    clamped, free = (
        found._replace(kl=found.limit + 1, information=found.limit - 0.01),
        found._replace(kl=0.1, information=0.1),
    )
    assert f"I(x; z) at least {clamped.information:.3f} (so few rows tell at most {found.limit:.3f}); " in describe(
        clamped, z.kind
    )
    assert "I(x; z) 0.100" in describe(free, z.kind)  # not less than the KL, which no number of rows would make more
    assert clamped.limited
    assert not free.limited
    assert not found._replace(kl=9.0, limit=7.0, information=5.0).limited  # with many rows


def test_codes_that_only_name_their_block_carry_nothing():
    """Two codes, each preferred by one block whatever the tokens are, and none of them heeded by the tokens."""
    model = tiny_model(vocab_size=10, z=LatentConfig(kind="categorical", codes=2))
    with torch.no_grad():
        model.decoder.pathway.out.weight.zero_()
        model.decoder.pathway.prior.weight.mul_(300)
    found = diagnose_model(model, array())
    assert found.information < 1e-3
    assert found.marginal_gap is None  # earlier blocks change the prior


def test_given_tokens_leave_z_nothing_to_say_but_of_the_rest():
    model = tiny_model(4, 4, 10, z=CODES)
    found = diagnose_model(model, array(), fixed="0:3")
    assert found.information <= found.kl + 1e-6
    assert found.marginal_gap is None


def test_the_surrogate_is_the_sum_of_its_parts():
    rows = evaluate_model(tiny_model(vocab_size=10, z=latent()), array(), [1])
    total, reconstruction, kl = rows[-3:]
    assert close(total["value"], reconstruction["value"] + kl["value"], 1e-6)
    assert kl["value"] >= 0


@pytest.mark.parametrize("z", [None, latent()], ids=["MDM", "VMD"])
def test_each_number_of_steps_is_sampled_by_both_rules(z):
    model = tiny_model(vocab_size=10) if z is None else tiny_model(vocab_size=10, z=z)
    rows = [row for row in evaluate_model(model, d1(), [1, 2], n=20) if row["metric"] == COUNTED]
    want = [(rule, steps) for steps in (1, 2) for rule in ("argmax", "sample")]
    assert [(rule, steps) for rule, steps in want if any(f"rule {rule}" in r["about"] for r in rows)] == want
    for (rule, steps), row in zip(want, rows, strict=True):
        assert row["about"].startswith(
            f"rule {rule}, order prob, {steps} step{'s' if steps > 1 else ''} per block, NFE {2 * steps}, n 20"
        )
        assert ("z once" in row["about"]) is (z is not None)


def test_integration_is_for_one_step():
    model = tiny_model(vocab_size=10)
    assert metrics(evaluate_model(model, d1(), [1, 2], n=20)).count(EXACT) == 1
    assert metrics(evaluate_model(model, d1(), [2], n=20)).count(EXACT) == 0


def test_accuracy_is_only_for_data_that_constrain():
    model = tiny_model(2, 2, 10)
    assert "accuracy, %" not in metrics(evaluate_model(model, dependence(0.5), [1], n=20))
    assert "accuracy, %" in metrics(evaluate_model(model, dependence(1.0), [1], n=20))


def test_the_exact_kl_agrees_with_counting():
    truth = random_law(2, 3)
    model = tiny_model(2, 2, 3, z=latent())
    rows = evaluate_model(model, truth, [1], n=10_000)
    counted = next(r["value"] for r in rows if r["metric"] == COUNTED and "rule sample" in r["about"])
    exact = next(r["value"] for r in rows if r["metric"] == EXACT)
    assert abs(counted - exact) < 0.03
    assert len(truth.sequences) == len(all_sequences(2, 3))


def test_scores_are_a_function_of_the_seed():
    model = tiny_model(vocab_size=10, z=latent())
    first = evaluate_model(model, d1(), [1], n=50, seed=1)
    assert first == evaluate_model(model, d1(), [1], n=50, seed=1)
    assert first != evaluate_model(model, d1(), [1], n=50, seed=2)


def test_scores_of_a_number_of_steps_do_not_depend_on_the_others():
    model = tiny_model(vocab_size=10, z=latent())
    together = [row for row in evaluate_model(model, d2(), [1, 2], n=50) if "2 steps" in row["about"]]
    alone = [row for row in evaluate_model(model, d2(), [2], n=50) if "2 steps" in row["about"]]
    assert together == alone


def test_as_many_rows_are_scored_as_asked_for_or_there_are():
    model = tiny_model(vocab_size=10)
    for asked, scored in ((20, 20), (99, 30)):
        rows = evaluate_model(model, array(rows=30), [1], n=asked, rows_scored=asked)
        assert rows[0]["about"].endswith(f"; {scored} rows")
        assert rows[-1]["about"].startswith(f"{scored} rows")


def test_the_standard_error_shrinks_with_the_root_of_the_rows():
    model = tiny_model(vocab_size=10)
    few, many = (evaluate_model(model, array(rows=n), [1], rows_scored=n)[-1]["stderr"] for n in (400, 40_000))
    assert 8 < few / many < 12.5


def test_more_rows_than_a_chunk_are_scored_alike():
    """The means of 8,192 and of 20,000 rows agree within their errors."""
    model = tiny_model(vocab_size=10, z=latent())
    a, b = (evaluate_model(model, array(rows=20_000), [1], rows_scored=n)[-3] for n in (8_192, 20_000))
    assert abs(a["value"] - b["value"]) < 4 * math.hypot(a["stderr"], b["stderr"])


def test_a_model_may_know_more_tokens_than_the_data_have():
    rows = evaluate_model(uniform_model(vocab_size=20), d1(), [1], n=20)
    assert close(rows[0]["value"], math.log2(20), 1e-6)


def test_data_of_another_shape_are_refused():
    with pytest.raises(InvalidInput, match="token id 9 in the data: expected 0 to 4"):
        evaluate_model(tiny_model(vocab_size=5), d1(), [1])
    with pytest.raises(InvalidInput, match="data of length 2: expected 4"):
        evaluate_model(tiny_model(vocab_size=10), law("deterministic"), [1])


@pytest.mark.parametrize("steps", [0, 3])
def test_steps_outside_the_block_are_refused(steps):
    with pytest.raises(InvalidInput, match=f"steps={steps}"):
        evaluate_model(tiny_model(vocab_size=10), d1(), [1, steps], n=10)


def test_given_positions_are_given_to_the_sampler_too():
    """With three of four tokens of D1 given, a uniform model is right once in ten, not once in a thousand."""
    rows = evaluate_model(uniform_model(), d1(), [1], n=4_000, fixed="0:3")
    sampled = next(row["value"] for row in rows if row["metric"] == "accuracy, %" and "rule sample" in row["about"])
    assert close(sampled, 10, 2)
    assert EXACT not in metrics(rows)


def test_models_are_scored_from_python():
    """Rows of tokens, an array of them, or a law: the same bits; codes as one would sum over them by hand."""
    model = strong_model(4, 2, 3, codes(by_place=True))
    rows = random_tokens(40, 4, 3, seed=1)
    found = vmd.evaluate(model, rows, steps=(1, 2))
    assert found == vmd.evaluate(model, ArrayData(rows.numpy()), steps=(1, 2))
    exact = enumerate_orders(model, rows, 1)[0].sum(-1) / (4 * math.log(2))
    assert found[1].value == pytest.approx(float(exact.mean()), abs=1e-6)
    assert found[1].stderr == pytest.approx(float(exact.std() / 40**0.5), abs=1e-6)
    scored = [row for row in evaluate_model(model, ArrayData(rows.numpy()), [1], z="fresh") if row["metric"] == CERTIFIED]
    assert scored[0]["value"] == pytest.approx(found[1].value, abs=1e-6)
    assert vmd.evaluate(model, rows, rows=7)[1].value != found[1].value


def test_a_text_is_cut_into_rows_and_scored():
    model = strong_model(4, 2, 3)
    model.tokenizer = CharTokenizer("abc")
    rows = random_tokens(12, 4, 3, seed=1)
    text = model.tokenizer.decode(rows.flatten().numpy())
    assert vmd.evaluate(model, text + "ab") == vmd.evaluate(model, rows)


def test_differences_are_of_rows():
    model, other = strong_model(4, 2, 3), strong_model(4, 2, 3, seed=1)
    rows = random_tokens(40, 4, 3, seed=1)
    nats = [enumerate_orders(one, rows, 1)[0].sum(-1) for one in (model, other)]
    apart = (nats[0] - nats[1]) / (4 * math.log(2))
    found = vmd.evaluate(model, rows, against=other)[1]
    assert found.value == pytest.approx(float(apart.mean()), abs=1e-6)
    assert found.stderr == pytest.approx(float(apart.std() / 40**0.5), abs=1e-6)
    assert vmd.evaluate(model, rows, steps=(1, 2), against=model) == {1: (0.0, 0.0), 2: (0.0, 0.0)}


@pytest.mark.parametrize("z", [latent(), codes(), learned_prior()], ids=["gaussian", "codes", "learned"])
def test_models_are_compared_by_the_same_orders(z, monkeypatch):
    """Whatever else they draw, and in how many parts they are scored."""
    monkeypatch.setattr("vmd.scoring.rows_per_score", lambda model: 32 if model.config.has_latent else 64)
    drawn = []
    draw = likelihood.draw_steps
    monkeypatch.setattr(likelihood, "draw_steps", lambda *args, **more: drawn.append(draw(*args, **more)) or drawn[-1])
    model, other = strong_model(4, 4, 3), strong_model(4, 4, 3, z)
    vmd.evaluate(model, random_tokens(40, 4, 3, seed=1), steps=2, against=other, samples=2)
    own, theirs = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
    assert len(own) == len(theirs) == 10
    assert all(torch.equal(one.mask, another.mask) for one, another in zip(own, theirs, strict=True))
    assert not torch.equal(own[0].mask, own[1].mask)


def test_samples_and_z_are_those_asked_for():
    rows = random_tokens(40, 4, 3, seed=1)
    model = strong_model(4, 2, 3, latent())
    assert vmd.evaluate(model, rows, samples=64)[1].value < vmd.evaluate(model, rows)[1].value - 0.01
    once, fresh = (vmd.evaluate(model, rows, steps=2, z=z)[2] for z in ("once", "fresh"))
    assert vmd.evaluate(model, rows, steps=2)[2] == once != fresh
    coded = strong_model(4, 2, 3, codes())
    once, fresh = (vmd.evaluate(coded, rows, steps=2, z=z)[2] for z in ("once", "fresh"))
    assert vmd.evaluate(coded, rows, steps=2)[2] == fresh != once
    assert vmd.evaluate(coded, rows, steps=2, z="once", against=coded, z_against="once")[2] == (0.0, 0.0)
    assert vmd.evaluate(coded, rows, steps=2, z="once", against=coded)[2].value == pytest.approx(once.value - fresh.value)


def test_positions_that_are_given_cost_nothing():
    """By default those that always were given in training."""
    rows, model = random_tokens(40, 4, 3, seed=1), strong_model(4, 2, 3, codes())
    nats = nll_bound(model, rows, 1, fixed=torch.tensor([True, False, False, False]))
    given = vmd.evaluate(model, rows, fixed="0")[1]
    assert given.value == pytest.approx(in_bits(nats, 3).value)
    assert vmd.evaluate(model, rows)[1].value != given.value
    other = strong_model(4, 2, 3, codes(), seed=1)
    apart = vmd.evaluate(model, rows, fixed="0", against=other)[1]
    assert apart.value == pytest.approx(given.value - vmd.evaluate(other, rows, fixed="0")[1].value)
    model.fixed = "0"
    assert vmd.evaluate(model, rows)[1] == given
    with pytest.raises(InvalidInput, match="expected fixed=, for both"):
        vmd.evaluate(model, rows, against=other)


MODEL = tiny_model(vocab_size=3)
ROWS = random_tokens(3, 4, 3)
WRONG = [
    (lambda: vmd.evaluate(None, ROWS), "evaluate\\(NoneType\\): expected a model"),
    (lambda: vmd.evaluate(MODEL, ROWS[:, :3]), "rows of shape \\(3, 3\\): expected \\(rows, 4\\)"),
    (lambda: vmd.evaluate(MODEL, ROWS[0]), "rows of shape \\(4,\\)"),
    (lambda: vmd.evaluate(MODEL, ROWS / 2), "rows of torch.float32: expected integers"),
    (lambda: vmd.evaluate(MODEL, ROWS + 3), "expected 0 to 2"),
    (lambda: vmd.evaluate(MODEL, "abc"), "this is no model of text$"),
    (lambda: vmd.evaluate(MODEL, "poker"), "a name or a path goes through vmd.load_data\\('poker'\\)"),
    (lambda: vmd.evaluate(MODEL, ROWS[:0]), "data without rows"),
    (lambda: vmd.evaluate(MODEL, ROWS[:0].numpy()), "data without rows"),
    (lambda: vmd.evaluate(MODEL, ROWS, steps=(3,)), "steps=3: expected 1 to 2"),
    (lambda: vmd.evaluate(MODEL, ROWS, against=tiny_model(6, 2, 3)), "against a model of rows of 6 of 3 tokens: expected 4"),
    (lambda: vmd.evaluate(MODEL, ROWS, steps=(2,), against=tiny_model(4, 1, 3)), "steps=2: expected 1 to 1"),
    (lambda: vmd.evaluate(MODEL, ROWS, against=tiny_model(4, 2, 4)), "of 4 tokens: expected 4 of 3"),
    (lambda: vmd.evaluate(MODEL, ROWS, against="text"), "evaluate\\(str\\): expected a model"),
    (lambda: vmd.evaluate(MODEL, ROWS, steps=()), r"steps=\(\): expected a whole number"),
    (lambda: vmd.evaluate(MODEL, ROWS, steps=1.5), "steps=1.5: expected a whole number"),
    (lambda: vmd.evaluate(MODEL, ROWS, steps=(1, "2")), "expected a whole number of steps, or several"),
    (lambda: vmd.evaluate(MODEL, ROWS, rows=0), "rows=0: expected a whole number"),
    (lambda: vmd.evaluate(MODEL, [[1, 2]]), "data of type list: expected an array or tensor of rows"),
    (lambda: vmd.evaluate(MODEL, ROWS, z="twice"), "z='twice': expected"),
]


@pytest.mark.parametrize(("call", "told"), WRONG)
def test_what_cannot_be_scored_is_one_line(call, told):
    with pytest.raises(InvalidInput, match=told):
        call()


def test_text_in_other_tokens_is_not_scored():
    """Ids of one tokenizer mean nothing to another."""
    model, data = strong_model(4, 2, 3), ArrayData(ROWS.numpy())
    model.tokenizer, data.tokenizer = CharTokenizer("abc"), CharTokenizer("xyz")
    with pytest.raises(InvalidInput, match=r"expected vmd.load_data\(..., tokenizer=model.tokenizer\)"):
        vmd.evaluate(model, data)
    data.tokenizer = CharTokenizer("abc")
    assert vmd.evaluate(model, data) == vmd.evaluate(model, ROWS)
    model.tokenizer = None
    with pytest.raises(InvalidInput, match="other tokens"):
        vmd.evaluate(model, data)
    named, data = VMD(replace(model.config, symbols=("a", "b", "c"))), ArrayData(ROWS.numpy())
    data.symbols = ("x", "y", "z")
    with pytest.raises(InvalidInput, match="other symbols"):
        vmd.evaluate(named, data)


def test_rows_of_bytes_are_rows():
    assert vmd.evaluate(MODEL, ROWS.to(torch.uint8)) == vmd.evaluate(MODEL, ROWS)


def test_progress_is_told_within_what_takes_long(monkeypatch):
    monkeypatch.setattr("vmd.evaluation.rows_per_score", lambda model: 10)
    told = []
    data = ArrayData(random_tokens(40, 4).numpy(), "some")
    evaluate_model(tiny_model(), data, [1, 2], order="random", rows_scored=40, on_part=lambda *now: told.append(now))
    done = [share for share, _ in told]
    assert {total for _, total in told} == {3}  # two bounds and the objective
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] == 3
    assert [share for share in done if share < 1] == [0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("z", [NO_LATENT, codes()], ids=["no z", "codes"])
def test_exact_bits_are_those_of_all_orders(z):
    """Of data whose law is known as well: below the bound of several steps, and that of one step itself."""
    model = strong_model(4, 4, 3, z)
    rows = random_tokens(30, 4, 3, seed=1)
    scored = evaluate_model(model, ArrayData(rows.numpy()), [1, 2, 4], z="fresh", exact=True)
    found = {(row["metric"], row["steps"]): row["value"] for row in scored if row.get("order") == "random"}
    for steps in (1, 2, 4):
        exact = in_bits(random_order_nll(model, rows, steps)[0], 4).value
        assert found["exact bits per token", steps] == pytest.approx(exact, abs=1e-5)
        if steps > 1:
            bound = in_bits(random_order_nll(model, rows, steps)[1], 4).value
            assert found["  so much below the bound, bits per token", steps] == pytest.approx(bound - exact, abs=1e-5)
    assert found["exact bits per token", 1] == pytest.approx(found[CERTIFIED, 1], abs=1e-5)
    assert found["exact bits per token", 4] < in_bits(random_order_nll(model, rows, 4)[1], 4).value - 1e-3
    with pytest.raises(InvalidInput, match="--exact: expected no positions"):
        evaluate_model(model, ArrayData(rows.numpy()), [2], z="fresh", exact=True, fixed="0")
    with pytest.raises(InvalidInput, match="expected codes or none"):
        evaluate_model(strong_model(4, 4, 3, latent()), ArrayData(rows.numpy()), [2], z="fresh", exact=True)
