"""Masked tokens that are scored twice, each alone and all in one step: what the two parts are, and what they train."""

from dataclasses import replace

import pytest
import torch

from helpers import CODES, all_sequences, codes, learned_prior, random_tokens, strong_model, tiny_config
from vmd.config import InvalidInput, LatentConfig, ModelConfig, ObjectiveConfig, RunConfig, TrainingConfig
from vmd.data.synthetic import law
from vmd.ensemble import Ensemble
from vmd.likelihood import enumerate_orders, exact_nll
from vmd.masking import Masks, all_masks, draw_masks
from vmd.metrics import kl_to, one_step_probabilities
from vmd.model import VMD
from vmd.presets import preset
from vmd.step import Batch, draw_batch, micro_batches, step_seed
from vmd.training import train

V = 3
NO_Z = LatentConfig(kind="none")
CHAINS = {f"chain of {span}": LatentConfig(kind="chain", codes=4, span=span) for span in (1, 2)}
LATENTS = CODES | {"in parts": codes(5, code_chunk=2)} | CHAINS
kinds = pytest.mark.parametrize("kind", [*LATENTS, "draft"])
ALONE = 1e-12  # as little together as there can be: 0 is the paper's objective


@torch.no_grad()
def agreeing(kind: str, length: int = 4, r: int = 2, vocab: int = V, seed: int = 2) -> VMD:
    """A random model whose tokens depend strongly on each other."""
    if kind != "draft":
        return strong_model(length, r, vocab, LATENTS[kind], seed=seed)
    model = VMD(replace(tiny_config(length, r, vocab, NO_Z), draft=16), seed=seed).eval()
    draft = model.decoder.draft
    assert draft is not None
    for part, factor in ((draft.out, 2), (draft.last, 8)):
        part.weight.mul_(factor)
    return model


def masked(x0: torch.Tensor, pattern: torch.Tensor, weight: float = 1.0) -> Masks:
    """The same mask for every block."""
    mask = pattern.repeat(x0.shape[1] // len(pattern)).expand_as(x0)
    return Masks(mask, mask, torch.full((len(x0), x0.shape[1] // len(pattern)), weight))


@kinds
@torch.no_grad()
def test_all_of_it_together_is_one_step_of_the_sampler(kind):
    """Of blocks that are masked whole the second part is their exact cost in one step."""
    model, rows = agreeing(kind), all_sequences(4, V)
    exact = exact_nll(enumerate_orders(model, rows, 1)).double()
    trained = model(rows, masked(rows, torch.ones(2, dtype=torch.bool)), None, together=1.0).total.double()
    torch.testing.assert_close(trained, exact, atol=1e-4, rtol=1e-4)
    assert float((-trained).exp().sum()) == pytest.approx(1, abs=1e-4)


@kinds
@pytest.mark.parametrize("r", [2, 4])
@torch.no_grad()
def test_none_of_it_together_has_the_mean_of_the_bound_at_one_token_a_step(kind, r):
    """By enumeration of all masks of a block and, on the other side, of all orders."""
    model, rows = agreeing(kind, r=r), all_sequences(4, V)
    total = torch.zeros(len(rows), dtype=torch.float64)
    for pattern, coefficient in zip(*all_masks(r), strict=True):
        total += model(rows, masked(rows, pattern, float(coefficient)), None, together=ALONE).total.double()
    bound = enumerate_orders(model, rows, r).mean(0).sum(-1).double()
    torch.testing.assert_close(total, bound, atol=1e-4, rtol=1e-4)


@kinds
@torch.no_grad()
def test_the_whole_is_the_mixture_of_its_parts(kind):
    model, x0 = agreeing(kind, 8, 4), random_tokens(6, 8, V)
    masks = draw_masks(x0, 4, generator=torch.Generator().manual_seed(0))
    alone, joint, mixed = (model(x0, masks, None, together=share).total for share in (ALONE, 1.0, 0.3))
    torch.testing.assert_close(mixed, 0.7 * alone + 0.3 * joint, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(alone, joint, atol=1e-2)


@pytest.mark.parametrize("kind", [kind for kind in LATENTS if kind not in CHAINS])  # whose loss is not split
@torch.no_grad()
def test_its_kl_is_that_of_one_step(kind):
    """The paper's objective reports it too, weighed m/k."""
    model, x0 = agreeing(kind, 8, 4), random_tokens(6, 8, V)
    masks = draw_masks(x0, 4, generator=torch.Generator().manual_seed(0))
    unweighted = masks._replace(weight=torch.ones_like(masks.weight))
    ours, papers = model(x0, masks, None, together=0.4), model(x0, unweighted, None)
    torch.testing.assert_close(ours.kl, papers.kl, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours.total, ours.reconstruction + 0.4 * ours.kl)
    assert float(ours.kl.min()) > 0


def by_hand(model: VMD, x0: torch.Tensor, masks: Masks, m: torch.Tensor, share: float) -> torch.Tensor:
    """(B,): the formula, where m tokens of a block may be masked, by what the sampler goes by: codes and tokens in turn."""
    xt, r = torch.where(masks.mask, V, x0), model.config.block_size
    blocks = x0.shape[1] // r

    def log_p(z: torch.Tensor) -> torch.Tensor:
        """(B, blocks, r): of masked tokens, 0 of others."""
        found = model.denoise(xt, x0, z).log_softmax(-1).gather(-1, x0.unsqueeze(-1)).squeeze(-1)
        return found.masked_fill(~masks.mask, 0.0).unflatten(1, (blocks, r))

    if model.config.draft:
        alone, joint = log_p(xt).sum(-1), log_p(x0).sum(-1)
    else:
        prior = model.prior(xt, x0)
        log_prior = prior.log_probs  # (B, blocks, K)
        by_code = torch.stack([log_p(torch.full((len(x0), blocks, 1), float(k))) for k in range(log_prior.shape[-1])], -1)
        joint = (log_prior + by_code.sum(2)).logsumexp(-1)
        single = (log_prior.unsqueeze(2) + by_code).logsumexp(-1)
        alone = single.masked_fill(~masks.mask.unflatten(1, (blocks, r)), 0.0).sum(-1)
    k = masks.mask.unflatten(1, (blocks, r)).sum(-1)
    return -((1 - share) * (m / k.clamp(min=1)) * alone + share * joint).sum(-1)


@pytest.mark.parametrize("kind", [kind for kind in (*LATENTS, "draft") if kind not in CHAINS])
@pytest.mark.parametrize("given", [[], [0, 1, 2, 3, 5]], ids=["nothing given", "a block and a token given"])
def test_losses_and_gradients_are_those_of_the_formula(kind, given):
    """On masks of some tokens, whose weight m/k is not 1. Given tokens cost nothing."""
    model, x0 = agreeing(kind, 8, 4), random_tokens(12, 8, V)
    fixed = torch.isin(torch.arange(8), torch.tensor(given, dtype=torch.long))
    masks = draw_masks(x0, 4, fixed=fixed, generator=torch.Generator().manual_seed(0))
    assert len(masks.weight.unique()) == 4
    m = (~fixed).view(2, 4).sum(-1)
    names = [name for name, parameter in model.named_parameters()]
    for share in (ALONE, 0.4, 1.0):
        losses = [model(x0, masks, None, together=share).total, by_hand(model, x0, masks, m, share)]
        torch.testing.assert_close(*losses, atol=1e-4, rtol=1e-4)
        gradients = [
            torch.autograd.grad(loss.mean(), list(model.parameters()), allow_unused=True, materialize_grads=True)
            for loss in losses
        ]
        for name, found, expected in zip(names, *gradients, strict=True):
            assert torch.allclose(found, expected, atol=2e-4, rtol=1e-2), (name, share)


@pytest.mark.parametrize("kind", ["codes", "draft"])
def test_training_heeds_it(kind):
    """The first loss that is logged is that of the first batch."""
    truth, latent = law("d2"), LatentConfig(kind="categorical", codes=8) if kind == "codes" else NO_Z
    config = ModelConfig(10, 4, 4, layers=1, width=16, heads=2, draft=16 * (kind == "draft"), latent=latent)
    training = TrainingConfig(steps=1, batch_size=32, log_every=1)
    for share in (0.0, 0.5, 1.0):
        run = RunConfig(config, ObjectiveConfig(together=share), training)
        first = train(VMD(config), truth, run)[0]["total"]
        generator = torch.Generator().manual_seed(step_seed(training.seed, 0))
        model = VMD(config)
        batch = draw_batch(model, truth, run.objective, 0, 32, None, generator)
        with torch.no_grad():
            expected = float(model(batch.x0, batch.masks, None, together=share).total.mean()) / 4
        assert first == pytest.approx(expected, rel=1e-5)


@kinds
@torch.no_grad()
def test_tokens_that_are_scored_alone_do_not_see_each_other(kind):
    """What the first token costs does not depend on the others' values; together, it does."""
    model, x0 = agreeing(kind, 4, 4), random_tokens(1, 4, V)

    def change(x0: torch.Tensor, share: float) -> float:
        """By how much the cost of a block that is masked whole changes with its first token."""
        other = (x0 + torch.tensor([[1, 0, 0, 0]])) % V
        masks = masked(x0, torch.ones(4, dtype=torch.bool))
        return float(model(other, masks, None, together=share).total - model(x0, masks, None, together=share).total)

    elsewhere = (x0 + torch.tensor([[0, 1, 1, 1]])) % V
    assert change(x0, ALONE) == pytest.approx(change(elsewhere, ALONE), abs=1e-5)
    assert change(x0, 1.0) != pytest.approx(change(elsewhere, 1.0), abs=1e-3)


@pytest.mark.parametrize("kind", ["bilinear", "additive", "chain of 2", "draft"])
def test_members_of_an_ensemble_have_the_losses_they_have_by_themselves(kind):
    models = [agreeing(kind, 4, 4, seed=seed) for seed in range(2)]
    x0 = random_tokens(8, 4, V)
    masks = draw_masks(x0, 4, generator=torch.Generator().manual_seed(0)).map(lambda part: part.view(2, 4, -1))
    x0 = x0.view(2, 4, 4)
    in_turn = [
        model(x0[i], masks.map(lambda part, i=i: part[i]), None, together=0.5).total for i, model in enumerate(models)
    ]
    found = Ensemble(models)(x0, masks, None, torch.ones(2), together=0.5).total
    torch.testing.assert_close(found, torch.stack(in_turn), rtol=1e-5, atol=1e-5)


@kinds
def test_gradients_of_parts_add_up_to_those_of_the_batch(kind):
    model, x0 = agreeing(kind, 4, 4), random_tokens(8, 4, V)
    batch = Batch(x0, draw_masks(x0, 4, generator=torch.Generator().manual_seed(0)), None)
    gradients = []
    for count in (1, 4):
        model.zero_grad()
        for part in micro_batches(batch, count):
            (model(part.x0, part.masks, None, together=0.5).total.sum()).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(bool(g.isfinite().all()) for g in gradients[0])
    for one, many in zip(*gradients, strict=True):
        torch.testing.assert_close(one, many, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["codes", "draft"])
def test_it_trains_for_one_step_and_for_many(kind):
    """D2 is two pairs, (k, k + 1): blind tokens lose log 10 nats a pair."""
    truth = law("d2")
    latent = LatentConfig(kind="categorical", codes=128) if kind == "codes" else NO_Z
    model = VMD(ModelConfig(10, 4, 4, layers=1, width=32, heads=2, draft=64 * (kind == "draft"), latent=latent))
    training = TrainingConfig(steps=400, batch_size=64, learning_rate=6e-3, log_every=400)
    share = 0.9 if kind == "codes" else 0.5
    train(model, truth, RunConfig(model.config, ObjectiveConfig(together=share), training))
    blind = 2 * float(torch.log(torch.tensor(10.0)))  # lost by tokens that do not know of each other
    assert kl_to(truth, one_step_probabilities(model, truth.sequences)) < 0.3 * blind
    with torch.no_grad():
        token_by_token = enumerate_orders(model, truth.sequences, 4).mean(0).sum(-1)
    entropy = float(-(truth.probabilities * truth.probabilities.log()).sum())
    assert float((truth.probabilities * token_by_token).sum()) - entropy < 0.3 * blind


@pytest.mark.parametrize(
    ("name", "model", "objective", "told"),
    [
        ("no latent", {"latent": NO_Z}, {}, "without codes or a draft head"),
        ("Gaussian", {"latent": learned_prior()}, {}, "without codes or a draft head"),
        ("steps", {"latent": codes()}, {"masking": "steps"}, "with objective.masking=steps"),
        ("times", {"latent": codes()}, {"masking": "times"}, "with objective.masking=times"),
        ("whole", {"latent": codes()}, {"whole": 0.5}, "with objective.whole=0.5"),
        ("focal", {"latent": NO_Z, "draft": 8}, {"focal": 1.0}, "with objective.focal=1.0"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_it_does_not_go_with_is_refused(name, model, objective, told):
    with pytest.raises(InvalidInput, match=rf"objective.together=0.5: expected 0 \(--set objective.together=0\) {told}"):
        ObjectiveConfig(together=0.5, **objective).check(ModelConfig(vocab_size=V, length=4, block_size=4, **model))


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_from_none_to_all(share):
    with pytest.raises(InvalidInput, match=rf"objective.together={share}: expected a share, from 0 to 1"):
        ObjectiveConfig(together=share)


def test_text_presets_of_codes_and_draft_heads_train_so():
    assert preset("text").objective.together == 0.9
    assert preset("text-draft").objective.together == 0.5
    for name in ("text-mdm", "text-gaussian", "text-paper", "sudoku", "array", "poker"):
        assert preset(name).objective.together == 0
