"""What the networks see, tested by changing one input and looking for the change at the outputs."""

import dataclasses

import pytest
import torch
from torch import Tensor

from helpers import NO_LATENT, codes, latent, learned_prior, random_tokens, strong_model, tiny_config, tiny_model
from vmd.config import InvalidInput
from vmd.diagnostics import diagnose
from vmd.masking import apply_mask, draw_masks
from vmd.model import VMD
from vmd.network import init_weights, rotate

V = 5
SHAPES = [(4, 1), (4, 2), (6, 2), (9, 3), (4, 4)]  # both attention paths, and one block
STREAMS = ("single", "doubled")
LATENTS = [NO_LATENT, latent(), latent(on_clean=True), latent("doubled"), latent("doubled", on_clean=True)]
LATENT_NAMES = ["none", "single", "single-clean", "doubled", "doubled-clean"]

shapes = pytest.mark.parametrize(("length", "r"), SHAPES)
several_blocks = pytest.mark.parametrize(("length", "r"), [s for s in SHAPES if s[0] > s[1]])
streams = pytest.mark.parametrize("stream", STREAMS)
on_clean = pytest.mark.parametrize("on_clean", [False, True])
all_latents = pytest.mark.parametrize("z_config", LATENTS, ids=LATENT_NAMES)


def inputs(length: int, r: int, dim: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """x0, a mask with a hidden and (r > 1) an open token in each block, and z."""
    x0 = random_tokens(2, length)
    mask = torch.arange(length).remainder(r).eq(0).expand(2, -1)
    return x0, mask, torch.randn(2, length // r, dim, generator=torch.Generator().manual_seed(3))


def other(tokens: Tensor) -> Tensor:
    """Different tokens everywhere."""
    return (tokens + 1) % V


def block_slice(block: int, r: int) -> slice:
    return slice(block * r, (block + 1) * r)


def changed(before: Tensor, after: Tensor) -> bool:
    return float((before - after).abs().max()) > 1e-5


def same(before: Tensor, after: Tensor) -> bool:
    return float((before - after).abs().max()) < 1e-6


@torch.no_grad()
def logits_of(model, xt, x0, z):
    return model.denoise(xt, x0, z if model.config.has_latent else None)


@shapes
@all_latents
def test_decoder_never_sees_its_own_clean_block_nor_later_ones(length, r, z_config):
    model = tiny_model(length, r, z=z_config)
    x0, mask, z = inputs(length, r)
    xt = apply_mask(x0, mask, V)
    before = logits_of(model, xt, x0, z)
    for block in range(length // r):
        perturbed = x0.clone()
        perturbed[:, block * r :] = other(x0)[:, block * r :]
        after = logits_of(model, xt, perturbed, z)
        assert same(before[:, : (block + 1) * r], after[:, : (block + 1) * r])


@several_blocks
@all_latents
def test_decoder_sees_every_earlier_clean_block(length, r, z_config):
    model = tiny_model(length, r, z=z_config)
    x0, mask, z = inputs(length, r)
    xt = apply_mask(x0, mask, V)
    before = logits_of(model, xt, x0, z)
    for earlier in range(length // r - 1):
        perturbed = x0.clone()
        perturbed[:, block_slice(earlier, r)] = other(x0)[:, block_slice(earlier, r)]
        after = logits_of(model, xt, perturbed, z)
        for block in range(earlier + 1, length // r):
            assert changed(before[:, block_slice(block, r)], after[:, block_slice(block, r)])


@shapes
@all_latents
def test_decoder_sees_its_own_noisy_block_and_no_other(length, r, z_config):
    model = tiny_model(length, r, z=z_config)
    x0, mask, z = inputs(length, r)
    xt = apply_mask(x0, mask, V)
    before = logits_of(model, xt, x0, z)
    for block in range(length // r):
        here = block_slice(block, r)
        perturbed = xt.clone()
        perturbed[:, here] = torch.where(mask, x0, V)[:, here]
        difference = (logits_of(model, perturbed, x0, z) - before).abs().amax((0, 2)).view(-1, r).amax(-1)
        assert difference[block] > 1e-5
        assert difference[torch.arange(length // r) != block].le(1e-6).all()


@several_blocks
@streams
@on_clean
def test_z_reaches_its_own_block_and_later_ones_only_through_the_clean_stream(length, r, stream, on_clean):
    model = tiny_model(length, r, z=latent(stream, on_clean))
    x0, mask, z = inputs(length, r)
    xt = apply_mask(x0, mask, V)
    before = logits_of(model, xt, x0, z)
    for block in range(length // r):
        perturbed = z.clone()
        perturbed[:, block] += 1
        difference = (logits_of(model, xt, x0, perturbed) - before).abs().amax((0, 2)).view(-1, r).amax(-1)
        assert difference[:block].le(1e-6).all()
        assert difference[block] > 1e-5
        if on_clean:
            assert difference[block + 1 :].gt(1e-5).all()
        else:
            assert difference[block + 1 :].le(1e-6).all()


@shapes
@streams
def test_posterior_sees_clean_blocks_up_to_its_own_and_none_later(length, r, stream):
    model = tiny_model(length, r, z=latent(stream))
    x0, mask, _ = inputs(length, r)
    with torch.no_grad():
        before = torch.cat(model.encode(x0, mask), dim=-1)
        for block in range(length // r):
            perturbed = x0.clone()
            perturbed[:, block_slice(block, r)] = other(x0)[:, block_slice(block, r)]
            difference = (torch.cat(model.encode(perturbed, mask), dim=-1) - before).abs().amax((0, 2))
            assert difference[:block].le(1e-6).all()
            assert difference[block:].gt(1e-5).all()


@shapes
@streams
def test_posterior_sees_the_mask_of_its_own_block(length, r, stream):
    model = tiny_model(length, r, z=latent(stream))
    x0, mask, _ = inputs(length, r)
    with torch.no_grad():
        before = torch.cat(model.encode(x0, mask), dim=-1)
        for block in range(length // r):
            flipped = mask.clone()
            flipped[:, block_slice(block, r)] = ~mask[:, block_slice(block, r)]
            after = torch.cat(model.encode(x0, flipped), dim=-1)
            assert changed(before[:, block], after[:, block])


@several_blocks
@streams
def test_posterior_sees_no_other_blocks_mask(length, r, stream):
    """q(z^b | xt^b, x0^{<=b}): the loss of a block may not depend on what is masked in another."""
    model = tiny_model(length, r, z=latent(stream))
    x0, mask, _ = inputs(length, r)
    with torch.no_grad():
        before = torch.cat(model.encode(x0, mask), dim=-1)
        for block in range(length // r):
            flipped = mask.clone()
            flipped[:, block_slice(block, r)] = ~mask[:, block_slice(block, r)]
            after = torch.cat(model.encode(x0, flipped), dim=-1)
            others = torch.arange(length // r) != block
            assert same(before[:, others], after[:, others])


@shapes
@streams
def test_an_encoder_that_sees_no_mask_gives_one_posterior_for_all_masks(length, r, stream):
    model = tiny_model(length, r, z=dataclasses.replace(latent(stream), encoder_sees_mask=False))
    x0, mask, _ = inputs(length, r)
    with torch.no_grad():
        expected = torch.cat(model.encode(x0, torch.ones_like(mask)), dim=-1)
        for shown in (mask, ~mask, torch.zeros_like(mask)):
            assert torch.equal(torch.cat(model.encode(x0, shown), dim=-1), expected)


@shapes
def test_on_the_doubled_stream_that_is_the_posterior_of_the_all_masked_block(length, r):
    blind = dataclasses.replace(latent("doubled"), encoder_sees_mask=False)
    seeing, unseeing = tiny_model(length, r, z=latent("doubled")), tiny_model(length, r, z=blind)
    x0, mask, _ = inputs(length, r)
    with torch.no_grad():
        expected = torch.cat(seeing.encode(x0, torch.ones_like(mask)), dim=-1)
        assert same(torch.cat(unseeing.encode(x0, mask), dim=-1), expected)


@pytest.mark.parametrize("vocab_size", [5, 100])
def test_tokens_outside_the_vocabulary_are_not_read_as_nothing(vocab_size):
    model = tiny_model(4, 2, vocab_size)
    x0 = torch.full((1, 4), vocab_size + 1)  # [MASK] is vocab_size
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        model.denoise(x0, x0)


def tokens_entering_trunk(model, run) -> list[int]:
    lengths = []
    hook = model.decoder.trunk.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    with torch.no_grad():
        run()
    hook.remove()
    return lengths


@pytest.mark.parametrize("z_config", [NO_LATENT, latent(), latent(on_clean=True)], ids=["none", "latent", "clean"])
@pytest.mark.parametrize(("r", "expected"), [(6, 6), (3, 12), (1, 12)])
def test_one_block_runs_on_the_noisy_tokens_alone(r, expected, z_config):
    model = tiny_model(6, r, z=z_config)
    x0, mask, z = inputs(6, r)
    xt = apply_mask(x0, mask, V)
    assert tokens_entering_trunk(model, lambda: logits_of(model, xt, x0, z)) == [expected]


def test_a_cached_pass_runs_on_one_block():
    model = tiny_model(6, 2, z=latent())
    lengths = tokens_entering_trunk(model, lambda: model.sample(2, steps=2))
    assert lengths == [2, 2, 4, 2, 4, 2]  # two steps for each block; the first takes the finished block before it along


def test_given_blocks_are_passed_together_before_the_first_step():
    model = tiny_model(8, 2, z=latent())
    prompt = torch.tensor([[1, 1, 1, 1, -1, -1, -1, -1]])
    lengths = tokens_entering_trunk(model, lambda: model.sample(prompt=prompt, steps=1))
    assert lengths == [4, 2, 4]  # the first two blocks, the third, and the third with the fourth


@all_latents
@pytest.mark.parametrize("r", [2, 4])
def test_positions_of_an_all_masked_block_differ(r, z_config):
    model = tiny_model(4, r, z=z_config)
    x0, _, z = inputs(4, r)
    logits = logits_of(model, torch.full_like(x0, V), x0, z)
    assert changed(logits[:, 0], logits[:, 1])


def test_without_modulation_a_latent_model_is_the_model_without_latent():
    """The backbone is the same network: with the pathway silenced, the same weights give the same logits."""
    plain, with_z = tiny_model(6, 2), tiny_model(6, 2, z=latent(), seed=1)
    state = with_z.state_dict() | plain.state_dict()
    with_z.load_state_dict({name: torch.zeros_like(t) if "embed" in name else t for name, t in state.items()})
    x0, mask, z = inputs(6, 2)
    xt = apply_mask(x0, mask, V)
    torch.testing.assert_close(logits_of(with_z, xt, x0, z), logits_of(plain, xt, x0, None), atol=1e-6, rtol=1e-5)


def test_rotation_preserves_lengths_and_depends_on_distances_alone(generator):
    q, k = torch.randn(2, 1, 1, 1, 6, generator=generator, dtype=torch.float64)
    frequencies = torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64)

    def turned_by(x: torch.Tensor, place: int) -> torch.Tensor:
        angles = place * frequencies.unsqueeze(0)
        return rotate(x, angles.cos(), angles.sin())

    def product(i: int, j: int) -> float:
        return float((turned_by(q, i) * turned_by(k, j)).sum())

    turned = turned_by(q, 5)
    torch.testing.assert_close(turned.norm(), q.norm())
    assert abs(product(2, 5) - product(7, 10)) < 1e-12
    assert abs(product(2, 5) - product(2, 6)) > 1e-6


@pytest.mark.parametrize("z_config", [NO_LATENT, latent(), latent("doubled")], ids=["none", "single", "doubled"])
def test_initial_weights_are_a_function_of_the_seed(z_config):
    one, again, two = (tiny_model(4, 2, z=z_config, seed=s) for s in (1, 1, 2))
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        if "norm" not in name and not name.endswith("scale"):
            assert not torch.equal(tensor, two.state_dict()[name])


def test_every_initial_value_comes_from_the_given_generator():
    """No weight is left at a value drawn from the global generator."""
    torch.manual_seed(1)
    one = tiny_model(4, 2, z=latent())
    torch.manual_seed(2)
    two = tiny_model(4, 2, z=latent())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_residual_outputs_start_smaller_with_depth():
    shallow, deep = (VMD(tiny_config(layers=layers)).decoder.trunk.blocks[0].mlp_out.weight.detach() for layers in (1, 4))
    assert abs(float(shallow.abs().max() / deep.abs().max()) - 2) < 0.2


def test_init_weights_works_on_a_part_without_trunk(generator):
    linear = torch.nn.Linear(4, 4)
    init_weights(linear, generator)
    assert float(linear.weight.detach().abs().max()) <= 0.5


@pytest.mark.parametrize(("length", "r"), [(4, 1), (4, 2), (4, 4)])
@all_latents
def test_every_parameter_gets_a_gradient(length, r, z_config):
    model = tiny_model(length, r, z=z_config)
    x0 = random_tokens(16, length)
    masks = draw_masks(x0, r, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(16, length // r, 3)
    model(x0, masks, noise).total.mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


# Steps that score some of the masked tokens, and priors that see what is revealed


def hiding(length: int, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """x0, a mask and targets: of every block's tokens the last is shown, the first is scored, those between are hidden."""
    place = torch.arange(length) % r
    return random_tokens(2, length), (place < r - 1).expand(2, -1), (place == 0).expand(2, -1)


def posterior_of(model, x0, mask, target=None) -> Tensor:
    with torch.no_grad():
        return torch.cat(model.encode(x0, mask, target), dim=-1)


@pytest.mark.parametrize(
    ("stream", "length", "r"), [("single", 4, 4), ("single", 6, 3), ("single", 9, 3), ("doubled", 4, 4)]
)
def test_posterior_does_not_see_the_values_of_hidden_tokens(stream, length, r):
    model = tiny_model(length, r, z=latent(stream))
    x0, mask, target = hiding(length, r)
    before = posterior_of(model, x0, mask, target)
    for block in range(length // r):
        here = torch.arange(length) // r == block
        for tokens, seen in ((mask & ~target, False), (target, True), (~mask, True)):
            perturbed = torch.where(tokens & here, other(x0), x0)
            after = posterior_of(model, perturbed, mask, target)
            assert changed(before[:, block], after[:, block]) == seen
            if block:
                assert same(before[:, :block], after[:, :block])


@streams
@shapes
def test_posterior_is_shown_all_masked_tokens_unless_told_the_targets(stream, length, r):
    model = tiny_model(length, r, z=latent(stream))
    x0, mask, _ = inputs(length, r)
    assert torch.equal(posterior_of(model, x0, mask), posterior_of(model, x0, mask, mask))


@streams
@pytest.mark.parametrize(("length", "r"), [(6, 3), (9, 3)])
def test_posterior_sees_no_other_blocks_mask_or_targets(stream, length, r):
    model = tiny_model(length, r, z=latent(stream))
    x0, mask, target = hiding(length, r)
    before = posterior_of(model, x0, mask, target)
    for block in range(length // r):
        here = torch.arange(length) // r == block
        after = posterior_of(model, x0, mask ^ here, torch.where(here, mask & ~target, target) & (mask ^ here))
        others = torch.arange(length // r) != block
        assert same(before[:, others], after[:, others])
        assert changed(before[:, block], after[:, block])


def test_a_posterior_that_sees_no_mask_heeds_no_targets_either():
    for stream in STREAMS:
        model = tiny_model(4, 4, z=dataclasses.replace(latent(stream), encoder_sees_mask=False))
        x0, mask, target = hiding(4, 4)
        assert torch.equal(posterior_of(model, x0, mask, target), posterior_of(model, x0, mask))


@torch.no_grad()
def prior_of(model, xt, x0) -> Tensor:
    return torch.cat(model.gaussian_prior(xt, x0), dim=-1)


@shapes
def test_learned_prior_sees_earlier_clean_blocks_and_never_its_own(length, r):
    model = strong_model(length, r, V, learned_prior())
    x0, mask, _ = inputs(length, r)
    xt = apply_mask(x0, mask, V)
    before = prior_of(model, xt, x0)
    assert before.shape == (2, length // r, 4)
    for block in range(length // r):
        perturbed = x0.clone()
        perturbed[:, block_slice(block, r)] = other(x0)[:, block_slice(block, r)]
        difference = (prior_of(model, xt, perturbed) - before).abs().amax((0, 2))
        assert difference[: block + 1].le(1e-6).all()
        assert difference[block + 1 :].gt(1e-5).all()


@shapes
def test_learned_prior_sees_what_is_revealed_of_its_own_block_and_of_no_other(length, r):
    model = strong_model(length, r, V, learned_prior())
    x0, mask, _ = inputs(length, r)
    xt = apply_mask(x0, mask, V)
    before = prior_of(model, xt, x0)
    for block in range(length // r):
        here = block_slice(block, r)
        perturbed = xt.clone()
        perturbed[:, here] = torch.where(mask, x0, V)[:, here]
        difference = (prior_of(model, perturbed, x0) - before).abs().amax((0, 2))
        assert difference[block] > 1e-5
        assert difference[torch.arange(length // r) != block].le(1e-6).all()


def test_a_prior_that_is_not_learned_is_standard_normal():
    x0, mask, _ = inputs(4, 2)
    for z_config in (latent(), latent(on_clean=True)):
        mean, log_std = tiny_model(4, 2, z=z_config).gaussian_prior(apply_mask(x0, mask, V), x0)
        assert mean.shape == log_std.shape == (2, 2, 3)
        assert not mean.any()
        assert not log_std.any()


@pytest.mark.parametrize(("length", "r"), [(4, 1), (4, 2), (4, 4)])
def test_every_parameter_of_a_learned_prior_gets_a_gradient(length, r):
    model = tiny_model(length, r, z=learned_prior())
    x0 = random_tokens(16, length)
    masks = draw_masks(x0, r, generator=torch.Generator().manual_seed(0))
    model(x0, masks, torch.randn(16, length // r, 2)).total.mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    "z_config", [codes(64), codes(64, "additive", 1), learned_prior()], ids=["head", "layer", "gaussian"]
)
@torch.no_grad()
def test_learned_priors_start_near_the_uniform_or_the_standard_normal_one(z_config):
    model = tiny_model(4, 2, z=z_config)
    x0, mask, _ = inputs(4, 2)
    parts = model.prior(apply_mask(x0, mask, V), x0)
    for part in parts:
        spread = part - part.mean(-1, keepdim=True) if z_config.kind == "categorical" else part
        assert float(spread.abs().max()) < 0.7


def test_parameters_are_counted_where_they_live():
    plain, learned, coded = (tiny_model(4, 2, z=z) for z in (NO_LATENT, learned_prior(), codes(layers=1)))
    for model in (learned, coded):
        counts = model.parameter_counts()
        assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
        assert counts["backbone"] == plain.parameter_counts()["backbone"]
        assert counts["pathway"] > 0
    assert learned.parameter_counts()["prior"] == sum(p.numel() for p in learned.prior_network.parameters())
    assert coded.parameter_counts()["prior"] == coded.parameter_counts()["encoder"] == 0


# The paper's Sudoku network: one modulation for all layers, gated pooling


def test_a_shared_modulation_is_one_modulation_in_every_layer():
    own = tiny_model(6, 2, z=latent())
    shared = tiny_model(6, 2, z=dataclasses.replace(latent(), shared_modulation=True), seed=1)
    state = own.state_dict()
    first = state["decoder.trunk.blocks.0.modulation.weight"]
    ours = {name: t for name, t in state.items() if ".modulation." not in name or name.startswith("encoder")}
    shared.load_state_dict(ours | {"decoder.trunk.modulation.weight": first})
    own.load_state_dict(state | {name: first for name in state if ".blocks." in name and ".modulation." in name})
    x0, mask, z = inputs(6, 2)
    xt = apply_mask(x0, mask, V)
    torch.testing.assert_close(logits_of(own, xt, x0, z), logits_of(shared, xt, x0, z))


def test_a_shared_modulation_costs_one_layer_s():
    own, shared = (
        tiny_model(6, 2, z=dataclasses.replace(latent(), shared_modulation=s)).parameter_counts() for s in (False, True)
    )
    assert own["pathway"] - shared["pathway"] == 6 * 16 * 16  # of two layers
    assert own["backbone"] == shared["backbone"]


def test_a_gated_pool_leaves_the_prompt_out():
    config = tiny_config(6, 6, z=dataclasses.replace(latent(), pool="gated"), prompt=4)
    pool = VMD(config).encoder.pool
    h = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    pooled = pool(h, 1)
    h[:, :4] += 10
    assert torch.equal(pool(h, 1), pooled)
    h[:, 5] += 1
    assert not torch.equal(pool(h, 1), pooled)


def test_a_gated_pool_without_preferences_is_the_mean():
    pool = VMD(tiny_config(6, 2, z=dataclasses.replace(latent(), pool="gated"))).encoder.pool
    torch.nn.init.zeros_(pool.gate.weight)
    h = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(pool(h, 3), h.unflatten(1, (3, 2)).mean(2))


# GPT-2's: tokens predicted one place later, and no rotation


@torch.no_grad()
def test_a_shifted_model_predicts_a_token_where_the_one_before_stands():
    shifted, plain = VMD(tiny_config(6, 6, shifted=True)), VMD(tiny_config(6, 6), seed=1)
    plain.load_state_dict(shifted.state_dict())
    x0, mask, _ = inputs(6, 6)
    xt = apply_mask(x0, mask, V)
    ours, theirs = shifted.denoise(xt, x0), plain.denoise(xt, x0)
    assert torch.equal(ours[:, 1:], theirs[:, :-1])
    assert torch.equal(ours[:, 0], theirs[:, 0])  # nothing stands before the first
    assert changed(ours, theirs)


def test_a_shifted_model_is_sampled_by_the_logits_it_is_trained_on():
    model = VMD(tiny_config(6, 6, shifted=True), seed=1).eval()
    prompt = torch.tensor([[1, 2, -1, 3, -1, 0]])
    drawn = model.sample(prompt=prompt, steps=1, rule="argmax").tokens
    canvas = torch.where(prompt < 0, V, prompt)
    expected = logits_of(model, canvas, canvas, None).argmax(-1)
    assert torch.equal(drawn, torch.where(prompt < 0, expected, prompt))


@pytest.mark.parametrize(
    ("shape", "z_config"), [((6, 2), NO_LATENT), ((6, 6), latent()), ((6, 6), codes())], ids=["blocks", "gaussian", "codes"]
)
def test_a_shifted_model_has_one_block_and_no_latent(shape, z_config):
    tiny_config(6, 0, shifted=True)  # the block is the whole sequence
    with pytest.raises(InvalidInput, match="shifted"):
        tiny_config(*shape, z=z_config, shifted=True)


@pytest.mark.parametrize("rotary", [False, True])
@torch.no_grad()
def test_without_rotation_places_are_known_by_their_embeddings_alone(rotary):
    """Tokens that change places together with the embeddings of these places give logits that change places."""
    model = VMD(tiny_config(6, 6, rotary=rotary)).eval()
    x0, mask, _ = inputs(6, 6)
    xt = apply_mask(x0, mask, V)
    before, order = model.denoise(xt, x0), torch.tensor([4, 0, 5, 2, 1, 3])
    place = model.decoder.trunk.position.weight
    place.copy_(place[order].clone())
    after = model.denoise(xt[:, order], x0[:, order])
    assert (same if not rotary else changed)(after, before[:, order])
    assert changed(after, before)


def test_rotation_is_no_weight():
    with_it, without = (VMD(tiny_config(6, 6, rotary=r)).state_dict() for r in (True, False))
    assert with_it.keys() == without.keys()
    assert all(torch.equal(a, b) for a, b in zip(with_it.values(), without.values(), strict=True))


# A z that carries nothing


def noise_latent(dim: int = 3):
    return dataclasses.replace(latent(dim=dim), encoder_layers=0)


@pytest.mark.parametrize(("length", "r"), [(4, 4), (6, 2)])
def test_without_an_encoder_the_posterior_is_the_prior_whatever_it_is_shown(length, r):
    model = tiny_model(length, r, z=noise_latent())
    assert list(model.encoder.parameters()) == []
    x0, mask, _ = inputs(length, r)
    xt = apply_mask(x0, mask, V)
    for shown in (x0, other(x0)):
        posterior, prior = model.encode(shown, mask), model.prior(xt, shown)
        assert posterior.mean.shape == (2, length // r, 3)
        assert all(torch.equal(a, b.expand_as(a)) for a, b in zip(posterior, prior, strict=True))
        assert (posterior.kl(prior) == 0).all()


@pytest.mark.parametrize(("length", "r"), [(4, 4), (6, 2)])
def test_without_an_encoder_the_loss_is_that_of_z_drawn_as_noise(length, r):
    model = tiny_model(length, r, z=noise_latent())
    x0 = random_tokens(8, length)
    masks = draw_masks(x0, r, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(8, length // r, 3, generator=torch.Generator().manual_seed(1))
    loss = model(x0, masks, noise, kl_weight=7.0)
    logits = model.denoise(apply_mask(x0, masks.mask, V), x0, noise)
    nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), x0, reduction="none") * masks.mask
    torch.testing.assert_close(loss.total, (nll.unflatten(1, (-1, r)).sum(-1) * masks.weight).sum(-1))
    assert torch.equal(loss.total, loss.reconstruction)
    assert (loss.kl == 0).all()
    assert changed(logits.detach(), logits_of(model, apply_mask(x0, masks.mask, V), x0, -noise))  # the decoder does see it
    loss.total.mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_a_z_of_noise_has_the_parameters_of_a_latent_less_its_encoder_and_tells_nothing():
    noise, whole = tiny_model(6, 6, z=noise_latent()), tiny_model(6, 6, z=latent())
    counts, others = noise.parameter_counts(), whole.parameter_counts()
    assert counts["encoder"] == 0 < others["encoder"]
    assert counts | {"encoder": others["encoder"]} == others
    found = diagnose(noise, random_tokens(16, 6), generator=torch.Generator().manual_seed(0))
    assert (found.kl, found.nll_gap, found.active) == (0, 0, 0)
    assert abs(found.information) < 1e-6
