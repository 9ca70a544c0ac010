import pytest
import torch
import torch.nn.functional as F

from vmd.attention import SHORT, KVCache, Visibility, attend, attend_few, attend_short, of_first_queries, visibility


def sees(query: int, key: int, length: int, r: int, own_clean_block: bool) -> bool:
    """The definition, one pair at a time: positions 0..L-1 are noisy, L..2L-1 clean."""
    query_clean, key_clean = query >= length, key >= length
    query_block, key_block = query % length // r, key % length // r
    if query_clean:
        return key_clean and key_block <= query_block
    if not key_clean:
        return key_block == query_block
    return key_block < query_block or (own_clean_block and key_block == query_block)


@pytest.mark.parametrize("own_clean_block", [False, True])
@pytest.mark.parametrize(("length", "r"), [(1, 1), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (12, 4)])
def test_visibility_is_its_definition(length, r, own_clean_block):
    expected = [[sees(q, k, length, r, own_clean_block) for k in range(2 * length)] for q in range(2 * length)]
    assert visibility(length, r, own_clean_block=own_clean_block).tolist() == expected


@pytest.mark.parametrize(("length", "r"), [(4, 1), (4, 2), (4, 4), (6, 3)])
def test_the_clean_stream_sees_this_block_and_earlier_ones(length, r):
    clean = Visibility(length, r, own_clean_block=False).clean
    assert clean.tolist() == [[k // r <= q // r for k in range(length)] for q in range(length)]


def queries_keys_values(tq: int, tk: int, generator):
    return (torch.randn(2, 3, t, 4, generator=generator) for t in (tq, tk, tk))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("tq", "tk"), [(1, 1), (4, 40), (8, 256)])
def test_attention_of_few_queries_equals_the_kernel(generator, tq, tk, masked):
    q, k, v = queries_keys_values(tq, tk, generator)
    visible = torch.arange(tk) <= torch.arange(tq).unsqueeze(1) + tk // 2 if masked else None
    torch.testing.assert_close(attend_few(q, k, v, visible), F.scaled_dot_product_attention(q, k, v, attn_mask=visible))


@pytest.mark.parametrize(("tq", "tk"), [(1, 1), (2, 2), (3, 5), (8, 8)])
def test_short_attention_equals_the_kernel(generator, tq, tk):
    q, k, v = queries_keys_values(tq, tk, generator)
    torch.testing.assert_close(attend_short(q, k, v, None), F.scaled_dot_product_attention(q, k, v), atol=1e-6, rtol=1e-5)


def test_masked_short_attention_equals_the_kernel(generator):
    q, k, v = queries_keys_values(8, 8, generator)
    visible = visibility(4, 2, own_clean_block=False)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    torch.testing.assert_close(attend_short(q, k, v, visible), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("own_clean_block", [False, True])
@pytest.mark.parametrize(("length", "r"), [(8, 2), (48, 4), (130, 13)])
def test_tiles_are_the_dense_mask(generator, length, r, own_clean_block):
    visible = Visibility(length, r, own_clean_block=own_clean_block)
    q, k, v = queries_keys_values(2 * length, 2 * length, generator)
    expected = attend(q, k, v, of_first_queries(visible(), None))
    visible.use("tiles")
    torch.testing.assert_close(attend(q, k, v, of_first_queries(visible(), None)), expected, atol=1e-5, rtol=1e-4)
    noisy = attend(q[:, :, :length], k, v, of_first_queries(visible(), length))
    torch.testing.assert_close(noisy, expected[:, :, :length], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("keys", [SHORT, SHORT + 1])
def test_attend_is_softmax_attention_on_both_sides_of_its_threshold(generator, keys):
    q, k, v = queries_keys_values(5, keys, generator)
    expected = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v  # head dimension 4
    torch.testing.assert_close(attend(q, k, v, None), expected, atol=1e-6, rtol=1e-5)


def test_what_is_not_visible_has_no_influence(generator):
    q, k, v = queries_keys_values(3, 3, generator)
    visible = torch.tensor([[True, False, True]]).expand(3, 3)
    before = attend(q, k, v, visible)
    k[:, :, 1], v[:, :, 1] = 50.0, 50.0
    assert torch.equal(attend(q, k, v, visible), before)


def test_a_pass_reads_what_stands_before_it_and_itself(generator):
    cache = KVCache(1, 1, 1, 6, 4, 2)
    parts = [torch.randn(1, 1, 2, 4, generator=generator) for _ in range(3)]
    for block, part in enumerate(parts):
        cache.look(torch.arange(2) + 2 * block, 2 * block + 2, everything=True)
        cache.update(0, part + 5, part + 5)  # a denoising pass, replaced by the finished block's
        keys, values = cache.update(0, part, 2 * part)
    assert torch.equal(keys, torch.cat(parts, dim=2))
    assert torch.equal(values, 2 * torch.cat(parts, dim=2))


@pytest.mark.parametrize("reach", [6, 8])
def test_tokens_of_a_pass_see_up_to_the_end_of_their_own_block(reach):
    cache = KVCache(1, 1, 1, 8, 4, 2)
    cache.look(torch.tensor([2, 3, 4, 5]), reach, everything=False)
    assert cache.visible.tolist() == [[key < end for key in range(reach)] for end in (4, 4, 6, 6)]


def test_layers_have_caches_of_their_own(generator):
    cache = KVCache(2, 1, 1, 2, 4, 2)
    cache.look(torch.arange(2), 2, everything=True)
    first, second = (torch.randn(1, 1, 2, 4, generator=generator) for _ in range(2))
    keys, _ = cache.update(0, first, first)
    cache.update(1, second, second)
    assert torch.equal(keys, first)
