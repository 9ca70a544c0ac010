"""The categorical latent: every code scored at once, drawn, conditioned on, and learned."""

import dataclasses
import itertools
import math
import sys
import types

import pytest
import torch

from helpers import (
    CODES,
    NO_LATENT,
    all_sequences,
    chi_square_p,
    codes,
    random_law,
    random_tokens,
    sequence_counts,
    strong_model,
    tiny_config,
    tiny_model,
)
from vmd import splitting
from vmd.attention import attention_by
from vmd.codes import CodeDecoder, order_targets
from vmd.config import InvalidInput, LatentConfig, ModelConfig, ObjectiveConfig, RunConfig, TrainingConfig
from vmd.data.synthetic import deterministic
from vmd.diagnostics import diagnose
from vmd.ensemble import Ensemble
from vmd.latent import Categorical
from vmd.likelihood import all_orders, enumerate_orders, exact_nll, nll_bound
from vmd.masking import Masks, apply_mask, draw_masks, draw_steps
from vmd.metrics import kl_to
from vmd.model import VMD
from vmd.splitting import split_codes
from vmd.step import Batch
from vmd.training import train

V, K = 3, 4
all_codes = pytest.mark.parametrize("z_config", CODES.values(), ids=CODES)
some_codes = pytest.mark.parametrize("z_config", [codes(), codes(layers=1)], ids=["head", "layer"])
shapes = pytest.mark.parametrize(("length", "r"), [(4, 4), (4, 2), (4, 1), (9, 3)])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def step_inputs(length: int, r: int, rows: int = 5):
    """xt, x0 and targets of a random step, with tokens that are hidden and not scored."""
    x0 = random_tokens(rows, length, V)
    masks = draw_steps(x0, r, (max(1, r - 1),), generator=seeded())
    return apply_mask(x0, masks.mask, V), x0, masks.target


# All codes at once


@all_codes
@shapes
@torch.no_grad()
def test_the_score_of_a_code_is_the_log_probability_under_that_code_alone(z_config, length, r):
    model = strong_model(length, r, V, z_config)
    xt, x0, target = step_inputs(length, r)
    features, scores = model.decoder.code_features(xt, x0), model.codes(xt, x0, target)
    assert scores.log_prior.shape == scores.log_likelihood.shape == (5, length // r, K)
    for code in range(K):
        logits = model.decoder.code_logits(features, torch.full((5, length // r, 1), code))
        log_p = logits.log_softmax(-1).gather(-1, x0.unsqueeze(-1)).squeeze(-1) * target
        alone = log_p.view(5, -1, r).sum(-1)
        torch.testing.assert_close(scores.log_likelihood[..., code], alone, atol=1e-5, rtol=1e-5)
    assert float(scores.log_likelihood.std(-1).max()) > 0.1  # codes differ
    torch.testing.assert_close(scores.log_prior.exp().sum(-1), torch.ones(5, length // r))
    assert torch.equal(scores.log_prior, model.prior(xt, x0).log_probs)


@pytest.mark.parametrize("head", ["bilinear", "additive"])
def test_scores_and_their_gradients_stay_exact_where_logits_are_extreme(head):
    model = strong_model(4, 2, V, codes(head=head))
    with torch.no_grad():
        for name, parameter in model.decoder.named_parameters():
            if name in ("head.weight", "pathway.out.weight", "pathway.code_table.weight"):
                parameter.mul_(30)
    xt, x0, target = step_inputs(4, 2)
    scores = model.codes(xt, x0, target).log_likelihood
    assert float(scores.detach().min()) < -100
    for code in range(K):
        logits = model.denoise(xt, x0, torch.full((5, 2, 1), float(code)))
        log_p = logits.log_softmax(-1).gather(-1, x0.unsqueeze(-1)).squeeze(-1) * target
        torch.testing.assert_close(scores[..., code], log_p.view(5, 2, 2).sum(-1), atol=1e-3, rtol=1e-4)
    scores.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@all_codes
@torch.no_grad()
def test_every_block_is_decoded_by_its_own_code(z_config):
    model = strong_model(6, 2, V, z_config)
    xt, x0, _ = step_inputs(6, 2)
    code = torch.randint(K, (5, 3, 1), generator=seeded())
    before = model.denoise(xt, x0, code.float())
    for block in range(3):
        changed = code.clone()
        changed[:, block] = (code[:, block] + 1) % K
        difference = (model.denoise(xt, x0, changed.float()) - before).abs().amax((0, 2)).view(3, 2).amax(-1)
        assert difference[block] > 1e-3
        assert (difference[torch.arange(3) != block] == 0).all()


@all_codes
@pytest.mark.parametrize(("length", "r"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("chunk", [1, 3])
def test_codes_scored_some_at_a_time_have_the_same_scores_and_gradients(z_config, length, r, chunk):
    whole = strong_model(length, r, V, z_config)
    parts = VMD(dataclasses.replace(whole.config, latent=dataclasses.replace(z_config, code_chunk=chunk)))
    parts.load_state_dict(whole.state_dict())
    xt, x0, target = step_inputs(length, r)
    for model in (whole, parts):
        log_prior, log_likelihood = model.codes(xt, x0, target)
        (-(log_prior + log_likelihood).logsumexp(-1)).sum().backward()
    for a, b in zip(whole.codes(xt, x0, target), parts.codes(xt, x0, target), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        for a, b in zip(whole.codes(xt, x0, target), parts.codes(xt, x0, target), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    expected = dict(whole.named_parameters())
    for name, parameter in parts.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-5, rtol=1e-4)


@all_codes
@pytest.mark.parametrize(("length", "r"), [(4, 1), (4, 2), (4, 4)])
def test_every_parameter_of_a_model_with_codes_gets_a_gradient(z_config, length, r):
    model = strong_model(length, r, V, z_config)
    x0 = random_tokens(16, length, V)
    model(x0, draw_masks(x0, r, generator=seeded()), None).total.mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("head", ["bilinear", "additive"])
def test_the_backbone_of_a_model_with_codes_is_that_of_the_model_without(head):
    """With silent heads, the same weights give the same logits whatever the code."""
    plain, coded = strong_model(6, 2, V), strong_model(6, 2, V, codes(head=head), seed=1)
    coded.load_state_dict(coded.state_dict() | plain.state_dict())
    assert coded.parameter_counts()["backbone"] == plain.parameter_counts()["backbone"]
    xt, x0, _ = step_inputs(6, 2)
    with torch.no_grad():
        for name, parameter in coded.named_parameters():
            if name.endswith(("pathway.out.weight", "code_table.weight")):
                parameter.zero_()
        logits = coded.denoise(xt, x0, torch.ones(5, 3, 1))
        torch.testing.assert_close(logits, plain.denoise(xt, x0), atol=1e-5, rtol=1e-5)


# What a code and its prior may see


@all_codes
@pytest.mark.parametrize(("length", "r"), [(4, 2), (4, 1), (9, 3)])
@torch.no_grad()
def test_codes_of_a_block_see_earlier_clean_blocks_and_never_their_own(z_config, length, r):
    model = strong_model(length, r, V, z_config)
    xt, x0, target = step_inputs(length, r)
    blocks = length // r
    for block in range(blocks):
        changed, unscored = x0.clone(), target.clone()
        here = slice(block * r, (block + 1) * r)
        changed[:, here] = (x0[:, here] + 1) % V
        unscored[:, here] = False  # what the block is asked would change with its tokens
        for before, after in zip(model.codes(xt, x0, unscored), model.codes(xt, changed, unscored), strict=True):
            difference = (after - before).abs().amax((0, 2))
            assert difference[: block + 1].le(1e-6).all()
            assert difference[block + 1 :].gt(1e-5).all()


@all_codes
@pytest.mark.parametrize(("length", "r"), [(4, 4), (4, 2)])
@torch.no_grad()
def test_the_score_of_a_block_changes_with_its_own_targets_alone(z_config, length, r):
    model = strong_model(length, r, V, z_config)
    x0 = random_tokens(5, length, V)
    mask = torch.ones(5, length, dtype=torch.bool)
    target = torch.arange(length).remainder(2).eq(0).expand(5, -1)  # of hidden tokens, every other is scored
    xt = apply_mask(x0, mask, V)
    before = model.codes(xt, x0, target).log_likelihood
    last = slice(length - r, length)  # later blocks see x0 of earlier ones; the last is seen by none
    hidden = torch.where(target, x0, (x0 + 1) % V)
    scored = torch.where(target, (x0 + 1) % V, x0)
    for changed, moves in ((hidden, False), (scored, True)):
        rows = x0.clone()
        rows[:, last] = changed[:, last]
        difference = (model.codes(xt, rows, target).log_likelihood - before).abs().amax((0, 2))
        assert bool(difference[-1] > 1e-5) == moves
        assert difference[:-1].le(1e-6).all()


@all_codes
@pytest.mark.parametrize(("length", "r"), [(4, 2), (9, 3)])
@torch.no_grad()
def test_codes_see_what_is_revealed_of_their_own_block_and_of_no_other(z_config, length, r):
    model = strong_model(length, r, V, z_config)
    xt, x0, target = step_inputs(length, r)
    before = model.codes(xt, x0, target)
    for block in range(length // r):
        here = slice(block * r, (block + 1) * r)
        changed = xt.clone()
        changed[:, here] = torch.where(xt == V, x0, V)[:, here]
        for a, b in zip(model.codes(changed, x0, target), before, strict=True):
            difference = (a - b).abs().amax((0, 2))
            assert difference[block] > 1e-5
            assert difference[torch.arange(length // r) != block].le(1e-6).all()


# Sampling


@some_codes
@pytest.mark.parametrize(
    ("length", "r", "steps", "z"),
    [(4, 4, 1, "once"), (4, 4, 2, "once"), (4, 4, 2, "fresh"), (4, 2, 1, "once"), (4, 2, 2, "once"), (4, 2, 2, "fresh")],
)
def test_samples_have_the_enumerated_likelihoods(z_config, length, r, steps, z):
    model, known = strong_model(length, r, 2, z_config, seed=3), random_law(length, 2)

    def likelihoods(z):
        p = exact_nll(enumerate_orders(model, known.sequences, steps, z=z)).neg().exp()
        return p / p.sum()

    options = {"steps": steps, "order": "random", "rule": "sample", "z": z}
    counts = sequence_counts(model.sample(4_000, generator=seeded(), **options).tokens, known)
    assert chi_square_p(counts, likelihoods(z)) > 1e-4
    if steps > 1:  # the test has power: the other way to draw codes is another law
        other = likelihoods("fresh" if z == "once" else "once")
        assert chi_square_p((likelihoods(z) * 100_000).round(), other) < 1e-4


@some_codes
@torch.no_grad()
def test_the_posterior_of_a_code_after_each_step_has_the_law_of_a_code_drawn_once(z_config):
    """p(A1) * sum_k p(k | A1) p(A2 | k, A1) * .. = sum_k p(k) p(A1 | k) p(A2 | k, A1) * .. for every order."""
    model, sequences = strong_model(3, 3, V, z_config), all_sequences(3, V)
    per_order = enumerate_orders(model, sequences, 3, z="once")
    for order, expected in zip(all_orders(3, 3), per_order[..., 0], strict=True):
        nll, belief = torch.zeros(len(sequences)), None
        for j in range(3):
            xt = apply_mask(sequences, order[j:].any(0), V)
            log_prior, log_likelihood = model.codes(xt, sequences, order[j].expand_as(sequences))
            belief = log_prior[:, 0] if belief is None else belief
            log_joint = belief + log_likelihood[:, 0]
            nll -= log_joint.logsumexp(-1)
            belief = log_joint.log_softmax(-1)
        torch.testing.assert_close(nll.double(), expected, atol=1e-5, rtol=1e-5)


@all_codes
@pytest.mark.parametrize("cache", [True, False])
def test_exactly_n_passes_for_every_block(z_config, cache):
    model, passes = strong_model(6, 3, V, z_config), []
    hook = model.decoder.trunk.blocks[0].register_forward_hook(lambda module, args, output: passes.append(1))
    for z in ("once", "fresh"):
        passes.clear()
        samples = model.sample(4, steps=2, z=z, cache=cache)
        assert samples.nfe == 2 * 2
        assert samples.cache_passes == (1 if cache and z_config.code_layers else 0)  # else it goes with the next block
        assert len(passes) == samples.nfe + samples.cache_passes
    hook.remove()


@pytest.mark.parametrize("steps", [1, 3])
def test_the_codes_of_samples_follow_the_prior_of_the_first_step(steps):
    model = strong_model(3, 3, V, codes())
    z = model.sample(5_000, steps=steps, z="once", generator=seeded()).z
    assert z.shape == (5_000, 1, 1)
    with torch.no_grad():
        prior = model.prior(torch.full((1, 3), V), torch.zeros(1, 3, dtype=torch.long)).log_probs[0, 0].exp()
    assert chi_square_p(torch.bincount(z.flatten().long(), minlength=K), prior) > 1e-4


def test_codes_of_later_blocks_heed_the_blocks_before():
    """Given the first block, the second's codes follow their own prior."""
    model, prompt = strong_model(4, 2, V, codes()), torch.tensor([[0, 2, -1, -1]])
    z = model.sample(prompt=prompt.expand(5_000, -1), generator=seeded()).z
    with torch.no_grad():
        canvas = torch.where(prompt < 0, V, prompt)
        prior = model.prior(canvas, canvas).log_probs[0].exp()
    for block in range(2):  # drawn where nothing is written, too
        assert chi_square_p(torch.bincount(z[:, block, 0].long(), minlength=K), prior[block]) > 1e-4


def test_a_model_with_codes_can_be_saved_and_loaded(tmp_path):
    model = strong_model(4, 2, V, codes(layers=1, head="additive"))
    model.save_pretrained(tmp_path)
    loaded = VMD.from_pretrained(tmp_path)
    assert loaded.config == model.config
    x0 = random_tokens(4, 4, V)
    assert torch.equal(nll_bound(loaded, x0, 1), nll_bound(model, x0, 1))


# Learning


def test_codes_learn_pairs_in_one_step_and_the_loss_of_one_step_never_falls_below_the_entropy():
    """Without a latent the KL of one step is the total correlation, 2.303 nats."""
    known = deterministic()
    x0, one_step = known.sequences, draw_steps(known.sequences, 2, (1,))
    objective = ObjectiveConfig(masking="steps", steps=(1,))
    kls = {}
    for name, z_config, steps in (("none", NO_LATENT, 50), ("codes", codes(32), 300)):
        training = TrainingConfig(steps=steps, batch_size=64, learning_rate=5e-3)
        config = RunConfig(tiny_config(2, 2, 10, z_config, layers=1, width=32), objective, training)
        model, losses = VMD(config.model), []

        def note(done, record, model=model, losses=losses):
            if done % 25 == 0:
                with torch.no_grad():
                    losses.append(float((known.probabilities * model(x0, one_step, None).total).sum()))

        train(model, known, config, on_step=note)
        assert min(losses) > known.entropy - 1e-4
        kls[name] = kl_to(known, nll_bound(model, x0, 1).neg().exp())
        assert math.isclose(kls[name], losses[-1] - known.entropy, abs_tol=1e-4)  # the loss is the likelihood
    assert kls["none"] > known.total_correlation() - 1e-4
    assert kls["codes"] < 1


# Splitting


def with_a_shared_code(head: str) -> VMD:
    """A model trained on little, whose codes but two have been killed."""
    model = strong_model(4, 2, 5, codes(32, head=head))
    with torch.no_grad():
        model.decoder.pathway.prior.bias[2:] = -60.0
    return model


@pytest.mark.parametrize("head", ["bilinear", "additive"])
def test_a_split_gives_spare_codes_a_share_and_changes_little(head):
    model, x0 = with_a_shared_code(head), random_tokens(64, 4)
    batch = Batch(x0, draw_masks(x0, 2), None)
    before, used = nll_bound(model, x0, 1), diagnose(model, x0).active
    split_codes(model, batch, torch.Generator().manual_seed(0))
    after = nll_bound(model, x0, 1)
    assert diagnose(model, x0).active == 2 * used
    assert float((after - before).abs().mean()) < 0.1 * float(before.std() + 1)


def test_a_split_of_an_ensemble_is_a_split_of_each_member():
    models, x0 = [with_a_shared_code("bilinear") for _ in range(2)], random_tokens(32, 4)
    ensemble = Ensemble(models)
    batch = Batch(x0.expand(2, -1, -1), None, None)
    split_codes(ensemble, batch, torch.Generator().manual_seed(0))
    assert [diagnose(member, x0).active for member in ensemble.models()] == [4, 4]


@pytest.mark.parametrize("why", ["none is spare", "none is costly"])
def test_codes_are_left_alone_where_a_split_does_not_pay(why, monkeypatch):
    model, x0 = tiny_model(4, 2, z=codes()), random_tokens(32, 4)
    posterior = torch.eye(4).repeat(16, 1) if why == "none is spare" else torch.tensor([[1.0, 0, 0, 0]]).repeat(64, 1)
    likelihood = torch.full((64, 4), -3.0 if why == "none is spare" else -0.01)
    monkeypatch.setattr(splitting, "code_posterior", lambda *_: (posterior, None, likelihood))
    before = {name: p.clone() for name, p in model.named_parameters()}
    split_codes(model, Batch(x0, None, None), torch.Generator().manual_seed(0))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_of_several_codes_for_one_mode_one_goes_where_two_modes_share():
    """No code is unused, so that only a spare one can help: 7 codes for two modes, one for the other two."""
    model = strong_model(2, 2, 4, codes(16))
    modes = torch.tensor([[0, 0], [1, 1], [2, 2], [3, 3]])
    posterior = torch.zeros(4, 16)
    posterior[0, :7] = posterior[1, 7:14] = 1 / 7
    posterior[2:, 14], posterior[3, 14:] = 1.0, torch.tensor([0.9, 0.1])
    likelihood = torch.zeros(4, 16)
    likelihood[2:, 14] = -2 * math.log(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting, "code_posterior", lambda *_: (posterior, None, likelihood))
        before = model.decoder.pathway.code_scale.weight.detach().clone()
        split_codes(model, Batch(modes, None, None), torch.Generator().manual_seed(0))
    changed = (model.decoder.pathway.code_scale.weight != before).any(1).nonzero().flatten().tolist()
    assert len(changed) == 1
    assert changed[0] not in (14,)
    bias = model.decoder.pathway.prior.bias.detach()
    assert float(bias[changed[0]]) == float(bias[14])


SUMMED = {
    "bilinear": codes(5),
    "additive": codes(5, head="additive"),
    "low rank": codes(5, head_dim=3),
    "by place": codes(5, by_place=True),
    "chain": LatentConfig(kind="chain", codes=5),
    "chain by place": LatentConfig(kind="chain", codes=5, by_place=True),
}


@pytest.mark.parametrize("z_config", SUMMED.values(), ids=SUMMED.keys())
def test_marginals_are_the_sum_over_codes(z_config):
    """Against all codes one by one; of a chain, all chains."""
    model, r = tiny_model(4, 2, z=z_config), 2
    generator = torch.Generator().manual_seed(0)
    spread(model, generator)
    x0 = torch.randint(0, 5, (3, 4), generator=generator)
    xt = apply_mask(x0, torch.rand(3, 4, generator=generator) < 0.7, model.mask_id)
    with torch.no_grad():
        features = model.decoder.code_features(xt, x0)
        found = model.decoder.code_marginals(features)
        expected = torch.zeros(3, 4, 5)
        places = r if z_config.kind == "chain" else 1
        for chosen in itertools.product(range(5), repeat=places):
            code = torch.tensor(chosen).float().expand(3, 2, -1)
            expected += probability_of(features.prior, code) * model.decoder.code_logits(features, code.long()).softmax(-1)
    torch.testing.assert_close(found.exp(), expected, atol=1e-5, rtol=1e-4)


def spread(model: VMD, generator: torch.Generator) -> None:
    """Priors and codes that differ much."""
    for name, p in model.named_parameters():
        if "pathway" in name:
            p.data += torch.randn(p.shape, generator=generator)


def probability_of(prior, code: torch.Tensor) -> torch.Tensor:
    """(B, C, places) codes -> (B, L, 1), for two tokens a block."""
    if isinstance(prior, Categorical):
        each = prior.log_probs.gather(-1, code.long()).squeeze(-1)
    else:
        each = prior.bias[..., 0, :].log_softmax(-1).gather(-1, code[..., :1].long()).squeeze(-1)
        second = (prior.next[code[..., 0].long()] + prior.bias[..., 1, :]).log_softmax(-1)
        each = each + second.gather(-1, code[..., 1:].long()).squeeze(-1)
    return each.exp().repeat_interleave(2, dim=1).unsqueeze(-1)


@pytest.mark.parametrize("z_config", SUMMED.values(), ids=SUMMED.keys())
@pytest.mark.parametrize("order", ["prob", "margin", "entropy"])
@pytest.mark.parametrize("z", ["once", "fresh", "likeliest"])
def test_cached_samples_rank_positions_as_uncached_ones(z_config, order, z):
    model = tiny_model(12, 4, z=z_config)
    spread(model, torch.Generator().manual_seed(1))
    options = {"steps": 3, "order": order, "z": z, "rule": "argmax", "seeds": list(range(40)), "trace": True}
    cached, uncached = (model.sample(40, cache=cache, **options) for cache in (True, False))
    assert (cached.tokens == uncached.tokens).all()
    for a, b in zip(cached.trace, uncached.trace, strict=True):
        torch.testing.assert_close(a.confidence, b.confidence, atol=1e-5, rtol=1e-4, equal_nan=True)


def certain_of_the_first_place() -> VMD:
    """Two codes. The first token is 0 under both, with 90 %; the second is the code, surely."""
    model = tiny_model(2, 2, vocab_size=3, z=codes(2, head="additive"))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        table = torch.tensor([[[0.9, 0.05, 0.05], [1, 1e-6, 1e-6]], [[0.9, 0.05, 0.05], [1e-6, 1, 1e-6]]]).log()
        model.decoder.pathway.code_table.weight.copy_(table.flatten(1))
    return model


@pytest.mark.parametrize("z", ["once", "fresh", "likeliest"])
@pytest.mark.parametrize("order", ["prob", "margin", "entropy"])
def test_what_one_code_is_sure_of_comes_after_what_all_are_sure_of(order, z):
    """Given its code the second token is the surer one; before it is known, the first is."""
    model = certain_of_the_first_place()
    first = model.sample(32, steps=2, order=order, z=z, rule="argmax", trace=True).trace[0]
    assert first.revealed[:, 0].all()
    assert not first.revealed[:, 1].any()


@pytest.mark.parametrize("z", ["once", "fresh"])
def test_of_drawn_tokens_those_come_first_that_their_code_is_sure_of(z):
    """A code that was drawn is not wrong."""
    first = certain_of_the_first_place().sample(32, steps=2, z=z, rule="sample", trace=True).trace[0]
    assert first.revealed[:, 1].all()


@pytest.mark.parametrize("order", ["prob", "margin"])
def test_a_token_that_all_codes_together_doubt_waits(order):
    """Given the code it is sure; but the code is one of many that say otherwise."""
    model = tiny_model(2, 2, vocab_size=3, z=codes(4, head="additive"))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        second = torch.eye(3)[[0, 1, 1, 1]].clamp(min=1e-6)  # of one code in four a token of its own
        first = torch.tensor([0.6, 0.2, 0.2]).expand(4, 3)
        model.decoder.pathway.code_table.weight.copy_(torch.stack([first, second], 1).log().flatten(1))
    drawn = model.sample(400, steps=2, z="once", order=order, rule="argmax", trace=True, generator=seeded())
    of_the_one = drawn.tokens[:, 1] == 0
    assert 0.15 < float(of_the_one.double().mean()) < 0.35
    assert (drawn.trace[0].revealed[:, 1] == ~of_the_one).all()


def test_codes_that_are_all_alike_are_ranked_as_no_codes():
    with_codes, without = tiny_model(6, 6, z=codes(4)), tiny_model(6, 6)
    with torch.no_grad():
        for part in ("code_scale", "code_shift"):
            weight = getattr(with_codes.decoder.pathway, part).weight
            weight.copy_(weight[:1].expand_as(weight))
            weight.mul_(part == "code_scale")
        with_codes.decoder.pathway.out.weight.zero_()
    without.decoder.trunk.load_state_dict(with_codes.decoder.trunk.state_dict())
    without.decoder.head.load_state_dict(with_codes.decoder.head.state_dict())
    for order in ("prob", "margin", "entropy"):
        a, b = (
            m.sample(20, steps=3, order=order, rule="argmax", trace=True, seeds=range(20)) for m in (with_codes, without)
        )
        assert (a.tokens == b.tokens).all()
        assert all((x.revealed == y.revealed).all() for x, y in zip(a.trace, b.trace, strict=True))


def test_codes_by_place_may_each_be_a_word():
    """Tokens that no context tells apart: a code for each word, which says another token at each place."""
    words = torch.tensor([[0, 1, 2], [2, 1, 0], [1, 1, 3], [3, 0, 2]])
    model = VMD(tiny_config(3, 3, z=codes(4, by_place=True)))
    pathway = model.decoder.pathway
    with torch.no_grad():
        for p in (*pathway.parameters(), *model.decoder.head.parameters()):
            p.zero_()
        pathway.out.weight[:, :5] = 50 * torch.eye(5)
        pathway.code_shift.weight.unflatten(-1, (3, 16))[:, :, :5] = torch.nn.functional.one_hot(words, 5).float()
    torch.testing.assert_close(nll_bound(model, words, 1).float(), torch.full((4,), math.log(4)))
    drawn = model.sample(64, steps=1, generator=torch.Generator().manual_seed(0)).tokens
    assert {tuple(row) for row in drawn.tolist()} == {tuple(row) for row in words.tolist()}


def test_codes_by_place_are_for_short_blocks():
    with pytest.raises(InvalidInput, match="by_place=true with blocks of 256: expected at most 128 tokens"):
        ModelConfig(length=256, latent=codes(4, by_place=True))
    ModelConfig(length=256, latent=LatentConfig(kind="none", by_place=True))
    ModelConfig(length=128, latent=codes(4, by_place=True))
    with pytest.raises(InvalidInput, match="blocks of 129"):
        ModelConfig(length=129, latent=codes(4, by_place=True))


BY_PLACE = {
    "one": codes(5, by_place=True),
    "low rank": codes(5, by_place=True, head_dim=3),
    "chain": LatentConfig(kind="chain", codes=5, by_place=True),
    "chain of two": LatentConfig(kind="chain", codes=5, by_place=True, span=2),
}


@torch.no_grad()
@pytest.mark.parametrize("z_config", BY_PLACE.values(), ids=BY_PLACE)
def test_by_place_against_a_loop(z_config):
    """Priors and logits, one place of one block at a time."""
    r, blocks, width = 4, 2, 16
    model = tiny_model(r * blocks, r, z=z_config)
    generator = torch.Generator().manual_seed(0)
    spread(model, generator)
    decoder, pathway = model.decoder, model.decoder.pathway
    x0 = torch.randint(0, 5, (1, r * blocks), generator=generator)
    features = decoder.code_features(apply_mask(x0, torch.ones_like(x0).bool(), model.mask_id), x0)
    shared = z_config.span if z_config.kind == "chain" else r  # tokens that have a code together
    read, weights = pathway.prior_norm(features.h)[0], pathway.prior.weight.unflatten(1, (shared, width))
    bias = torch.stack(
        [
            pathway.prior.bias + sum(weights[:, j] @ read[first + j] for j in range(shared)) / shared
            for first in range(0, r * blocks, shared)
        ]
    )
    if z_config.kind == "chain":
        torch.testing.assert_close(features.prior.bias[0].flatten(0, 1), bias)
    else:
        torch.testing.assert_close(features.prior.log_probs[0], bias.log_softmax(-1))
    code = torch.randint(0, 5, (1, blocks, r // shared), generator=generator)
    scale, shift = (table.weight.unflatten(1, (r, -1)) for table in (pathway.code_scale, pathway.code_shift))
    for at, found in enumerate(decoder.code_logits(features, code)[0]):
        (block, place), h = divmod(at, r), decoder.trunk.norm(features.h)[0, at]
        k = code[0, block, place // shared]
        moved = pathway.project(h) * scale[k, place] + shift[k, place]
        torch.testing.assert_close(found, decoder.head(h) + pathway.out(moved))


def test_codes_fit_the_budget_whatever_the_vocabulary(monkeypatch):
    """The output layers of all places are made for some codes at a time, like logits."""
    monkeypatch.setattr("vmd.codes.largest_tensor", lambda device: 8 * 2 * 5 * 4 * 16)
    model, made = tiny_model(4, 4, z=codes(7, by_place=True)), []
    logits = model.decoder._logits_of_codes
    monkeypatch.setattr(model.decoder, "_logits_of_codes", lambda h, some: made.append(len(some)) or logits(h, some))
    with torch.no_grad():
        x0 = torch.zeros(1, 4, dtype=torch.long)
        model.decoder.code_marginals(model.decoder.code_features(x0, x0))
    assert made == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("z_config", "vocab", "budget", "parts"),
    [
        (codes(7, head="additive"), 3, 3 * 20, [3, 3, 1]),  # a number for every token
        (codes(7, head="additive"), 40, 3 * 4 * 40, [3, 3, 1]),  # and for every symbol at every place
        (codes(12, by_place=True), 40, 5 * 40 * 4 * 16 * 8, [5, 5, 2]),  # an output layer for every place
        (codes(12, by_place=True), 3, 0, [11, 1]),  # what all share, two rows of 16 a token, is worth 11 codes of 3 symbols
    ],
)
def test_trained_codes_fit_the_budget(z_config, vocab, budget, parts, monkeypatch):
    model, made = tiny_model(4, 4, vocab, z_config), []
    score = model.coder._score_some
    monkeypatch.setattr(model.coder, "_score_some", lambda f, some, *more: made.append(len(some)) or score(f, some, *more))
    monkeypatch.setattr("vmd.codes.largest_tensor", lambda device: budget)
    x0 = random_tokens(5, 4, vocab)
    scores = model.coder.code_scores(torch.full_like(x0, vocab), x0, torch.ones_like(x0).bool())
    assert made == parts
    scores.log_likelihood.sum().backward()
    assert sum(made) == 2 * z_config.codes  # each part is made again


def of_all(model, xt, x0, target):
    scores, alone = model.coder.code_scores_twice(xt, x0, target)
    return scores.log_joint().logsumexp(-1).sum() + alone.sum()


def test_codes_compile_as_one_graph_on_a_cpu():
    """Shapes that depend on the masks would break it."""
    model = strong_model(4, 2, V, codes(by_place=True))
    inputs = step_inputs(4, 2)
    compiled = torch.compile(of_all, fullgraph=True, backend="eager")
    assert compiled(model, *inputs).item() == pytest.approx(of_all(model, *inputs).item(), abs=1e-4)


def test_each_row_has_a_gradient_of_its_own():
    model = strong_model(4, 2, V, codes(by_place=True))
    inputs = step_inputs(4, 2)
    parameters = dict(model.named_parameters())

    def of_row(parameters, *row):
        with torch.nn.utils.stateless._reparametrize_module(model, parameters):
            return of_all(model, *(part.unsqueeze(0) for part in row))

    each = torch.func.vmap(torch.func.grad(of_row), (None, 0, 0, 0))(parameters, *inputs)
    of_all(model, *inputs).backward()
    for name, p in parameters.items():
        together = torch.zeros_like(p) if p.grad is None else p.grad
        assert torch.allclose(each[name].sum(0), together, rtol=1e-3, atol=1e-3), name


# What the kernel is given, with another in its place that is as plain as can be


def plain_kernel(features, base, rows, bias, x0, target):
    """What `vmd.code_kernels.score_codes` promises, token by token."""
    found, (order, counts) = torch.zeros(len(features), rows.shape[1]), order_targets(target, len(rows))
    for place, (tokens, count) in enumerate(zip(order.long(), counts, strict=True)):
        for i in tokens[:count]:
            logits = base[i] + rows[place].float() @ features[i] + bias[place]
            found[i] = logits.log_softmax(-1)[:, x0[i]]
    return found


@pytest.mark.parametrize("by_place", [True, False])
@shapes
@torch.no_grad()
def test_scores_by_a_kernel_are_those_of_plain_logits(by_place, length, r, monkeypatch):
    model = strong_model(length, r, V, dataclasses.replace(codes(), by_place=by_place))
    xt, x0, target = step_inputs(length, r)
    plain, alone = model.coder.code_scores_twice(xt, x0, target)
    monkeypatch.setitem(sys.modules, "vmd.code_kernels", types.SimpleNamespace(score_codes=plain_kernel))
    monkeypatch.setattr(model.coder, "kernel_scores", lambda: True)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)  # as exact as the plain way
    by_kernel, alone_by_kernel = model.coder.code_scores_twice(xt, x0, target)
    assert torch.allclose(plain.log_joint(), by_kernel.log_joint(), atol=1e-4)
    assert torch.allclose(alone, alone_by_kernel, atol=1e-4)


def test_targets_come_first_at_their_own_place():
    target = torch.tensor([[0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 1]], dtype=torch.bool)
    order, counts = order_targets(target, 3)
    assert counts.tolist() == [2, 2, 2]
    assert order.tolist() == [[3, 6, 0, 9], [1, 7, 4, 10], [2, 11, 5, 8]]
    assert order_targets(target, 1)[0].tolist() == [[1, 2, 3, 6, 7, 11, 0, 4, 5, 8, 9, 10]]


@pytest.mark.parametrize(
    ("why_not", "z_config", "vocab", "way"),
    [
        ("", codes(by_place=True), V, "fused"),
        ("", codes(), 64, "fused"),
        ("not asked for", codes(), V, "dense"),
        ("a code layer", codes(layers=1), V, "fused"),
        ("additive", codes(head="additive"), V, "fused"),
        ("a rank it does not know", codes(head_dim=24), V, "fused"),
        ("too many symbols", codes(), 65, "fused"),
        ("no room", codes(), V, "fused"),
        ("not bf16", codes(), V, "fused"),
    ],
)
def test_what_the_kernel_is_for(why_not, z_config, vocab, way, monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: why_not != "not bf16")
    monkeypatch.setattr("vmd.attention.kernels_known_here", lambda: why_not != "no room")
    model = tiny_model(4, 2, vocab, z_config)
    with attention_by(model, way):
        assert model.coder.kernel_scores() == (not why_not)
    assert not model.coder.kernel_scores()


@pytest.mark.parametrize("rows", [3, 1024])
def test_codes_are_scored_in_parts_by_the_kernel_too(rows, monkeypatch):
    """A code has a number for every token, 4 in a row, and an output layer for both places of a block, 2 x 16 x 16."""
    model = tiny_model(4, 2, V, codes(12, by_place=True))
    xt, x0, target = step_inputs(4, 2, rows)
    parts = []
    monkeypatch.setattr(model.coder, "kernel_scores", lambda: True)
    monkeypatch.setattr("vmd.codes.largest_tensor", lambda device: 5 * max(512, 4 * rows))
    monkeypatch.setattr(
        model.coder, "_score_by_kernel", lambda f, some, x0, t: parts.append(len(some)) or torch.zeros(*x0.shape, len(some))
    )
    with torch.enable_grad():
        model.coder.code_scores(xt, x0, target)
    assert parts == [5, 5, 2]


@pytest.mark.parametrize("by_place", [True, False])
@torch.no_grad()
def test_few_tokens_have_the_logits_of_many(by_place):
    """Of few, features are moved; of many, output rows."""
    model = strong_model(4, 2, V, codes(by_place=by_place))
    h, every = torch.randn(64, 4, 1, model.config.width), torch.arange(4)
    many = model.coder._logits_of_codes(h, every)
    few = torch.cat([model.coder._logits_of_codes(row[None, :2], every) for row in h])
    assert torch.allclose(few, many[:, :2], atol=1e-5)


@all_codes
@shapes
@pytest.mark.parametrize(("rows", "kind", "chunk"), [(1, torch.float32, 0), (40, torch.float32, 3), (2, torch.float64, 0)])
def test_leaving_out_what_is_no_target_changes_nothing(z_config, length, r, rows, kind, chunk, monkeypatch):
    """A CPU scores targets alone, place by place, few tokens and many: the same scores and gradients as of all tokens."""
    model = strong_model(length, r, V, dataclasses.replace(z_config, code_chunk=chunk)).to(kind)
    xt, x0, target = step_inputs(length, r, rows)

    def scores_and_gradients():
        model.zero_grad()
        scores, alone = model.coder.code_scores_twice(xt, x0, target)
        (scores.log_joint().logsumexp(-1).sum() + alone.sum()).backward()
        return scores.log_joint(), alone, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    joint, alone, gradients = scores_and_gradients()
    with torch.no_grad():
        scored, scored_alone = model.coder.code_scores_twice(xt, x0, target)
        nothing = model.coder.code_scores(xt, x0, torch.zeros_like(target))
    monkeypatch.setattr(CodeDecoder, "_by_target", lambda *_: False)
    whole, whole_alone, whole_gradients = scores_and_gradients()
    for some, some_alone in ((joint, alone), (scored.log_joint(), scored_alone)):
        assert torch.allclose(some, whole, atol=1e-4)
        assert torch.allclose(some_alone, whole_alone, atol=1e-4)
    assert gradients.keys() == whole_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, whole_gradients[name], rtol=1e-3, atol=1e-3), name
    assert nothing.log_joint().logsumexp(-1).abs().max() < 1e-4  # what asks for nothing is certain


@pytest.mark.parametrize("trained", [False, True])
def test_what_is_no_target_takes_no_work(trained, monkeypatch):
    model = strong_model(9, 3, V, codes())
    xt, x0, target = step_inputs(9, 3, 40)
    seen, head = [], model.coder.head.forward
    monkeypatch.setattr(model.coder.head, "forward", lambda h: seen.append(h.shape[:-1].numel()) or head(h))
    with torch.set_grad_enabled(trained):
        model.coder.code_scores(xt, x0, target)
    assert 0 < sum(seen) == int(target.sum()) < target.numel()


@torch.no_grad()
def test_an_ensemble_of_codes_is_scored_as_it_is_trained():
    members = [strong_model(4, 2, V, codes()) for _ in range(2)]
    x0 = random_tokens(6, 4, V).expand(2, -1, -1)
    masks = draw_masks(x0.flatten(0, 1), 2, generator=seeded())
    masks = Masks(*(part.unflatten(0, (2, -1)) for part in masks))
    terms = [Ensemble(members)(x0, masks, None, torch.ones(2)).total]
    with torch.enable_grad():
        terms.append(Ensemble(members)(x0, masks, None, torch.ones(2)).total)
    assert torch.allclose(*terms, atol=1e-5)
