"""The counter-based noise: its exact values, its range, and that it looks random along every axis it is used on."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.sampling import p_value

from raysonar.kernels.noise import Stream, gumbel, keys, uniform

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
DRAWS = 200_000
LEAST = 1e-4
"""Every figure is fixed by its seed; a p-value under this would be a flaw, not bad luck."""


def mixed(z: int) -> int:
    z = (z ^ z >> 30) * FACTORS[0] & WORD
    z = (z ^ z >> 27) * FACTORS[1] & WORD
    return z ^ z >> 31


def unmixed(z: int) -> int:
    """The argument that `mixed` makes z of."""

    def unshifted(z: int, shift: int) -> int:
        known = z
        for _ in range(64 // shift):
            known = z ^ known >> shift
        return known

    z = unshifted(z, 31) * pow(FACTORS[1], -1, 1 << 64) & WORD
    z = unshifted(z, 27) * pow(FACTORS[0], -1, 1 << 64) & WORD
    return unshifted(z, 30)


def reference_uniform(seed: int, position: int, stream: int, column: int) -> np.float32:
    key = mixed(mixed(seed + GOLDEN & WORD) + (position * 4 + stream) * GOLDEN & WORD)
    bits = mixed(key + (column + 1) * GOLDEN & WORD) & (WORD >> 1)
    return np.clip(np.float32(bits) * np.float32(2.0**-63), np.float32(2.0**-64), np.float32(1 - 2.0**-24))


def seed_for_bits(bits: int, position: int, stream: int) -> int:
    """The seed whose column 0 has these bits."""
    key = unmixed(bits) - GOLDEN & WORD
    seed = unmixed(unmixed(key) - (position * 4 + stream) * GOLDEN & WORD) - GOLDEN & WORD
    return seed - (1 << 64) if seed >> 63 else seed


def grid(seeds: int, positions: int, stream: int = Stream.TARGET, columns: int = 1) -> torch.Tensor:
    """[seeds, positions, columns] of uniforms: seeds and positions 0, 1, 2, ..."""
    seed = torch.arange(seeds).repeat_interleave(positions)
    position = torch.arange(positions).repeat(seeds)
    return uniform(keys(seed), position, stream, columns).view(seeds, positions, columns)


def test_the_reference_is_splitmix64():
    """Its published first outputs for seed 1234567."""
    outputs = [mixed(1234567 + i * GOLDEN & WORD) for i in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@settings(max_examples=100, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.sampled_from(Stream), st.integers(1, 9))
def test_values_are_those_of_plain_integer_arithmetic(seed, position, stream, columns):
    made = uniform(keys(torch.tensor([seed])), torch.tensor([position]), stream, columns)
    assert made[0].tolist() == [float(reference_uniform(seed, position, stream, v)) for v in range(columns)]


@pytest.mark.parametrize(
    ("bits", "value"),
    [(0, 2.0**-64), (1, 2.0**-63), ((1 << 63) - 1, 1 - 2.0**-24), (1 << 62, 0.5), (1 << 63, 2.0**-64)],
)
def test_the_interval_is_open_at_both_ends(bits, value):
    key = keys(torch.tensor([seed_for_bits(bits, 17, Stream.ACCEPT)]))
    drawn = uniform(key, torch.tensor([17]), Stream.ACCEPT, 1)
    noise = gumbel(key, torch.tensor([17]), Stream.ACCEPT, 1)
    assert drawn.item() == value
    assert 0 < drawn.item() < 1
    assert -2.82 < noise.item() < 44.4


def test_a_row_is_the_same_whatever_is_drawn_beside_it():
    key, position = keys(torch.tensor([5, -7, 1 << 60])), torch.tensor([0, 3, 100_000])
    stream = torch.tensor([Stream.TARGET, Stream.DRAFT, Stream.ACCEPT])
    together = gumbel(key, position, stream, 37)
    for row in range(3):
        alone = gumbel(key[row : row + 1], position[row : row + 1], int(stream[row]), 37)
        assert torch.equal(together[row : row + 1], alone)
        assert torch.equal(gumbel(key[row : row + 1], position[row : row + 1], int(stream[row]), 11), alone[:, :11])


@pytest.mark.parametrize("axis", ["positions", "seeds", "columns", "both"])
def test_uniform_along_every_axis(axis):
    shape = {"positions": (1, DRAWS), "seeds": (DRAWS, 1), "columns": (1, 1, DRAWS), "both": (447, 447)}[axis]
    values = grid(*shape[:2], columns=shape[2] if len(shape) == 3 else 1).flatten().double().numpy()
    assert p_value(np.bincount((values * 1024).astype(int), minlength=1024), np.ones(1024)) > LEAST
    assert stats.kstest(values, "uniform").pvalue > LEAST
    tail = -np.log2(values)
    octaves = np.bincount(np.minimum(tail.astype(int), 12), minlength=13)
    assert p_value(octaves, np.append(0.5 ** np.arange(1, 13), 0.5**12)) > LEAST


@pytest.mark.parametrize("neighbour", ["position", "seed", "column", "stream"])
def test_neighbours_are_independent(neighbour):
    """Pairs of neighbouring values fill a 32 x 32 grid evenly, from the high bits and from fine fractions alike."""
    if neighbour == "position":
        first, second = grid(1, DRAWS + 1)[0, :-1], grid(1, DRAWS + 1)[0, 1:]
    elif neighbour == "seed":
        first, second = grid(DRAWS + 1, 1)[:-1], grid(DRAWS + 1, 1)[1:]
    elif neighbour == "column":
        first, second = grid(1, DRAWS, columns=2)[0].unbind(1)
    else:
        first, second = grid(1, DRAWS, Stream.TARGET), grid(1, DRAWS, Stream.DRAFT)
    for scale in (1, 997):
        cell = [((values.flatten().double() * scale % 1) * 32).long() for values in (first, second)]
        counts = torch.bincount(cell[0] * 32 + cell[1], minlength=1024).numpy()
        assert p_value(counts, np.ones(1024)) > LEAST


def test_gumbel_noise_has_its_distribution():
    noise = gumbel(keys(torch.zeros(DRAWS, dtype=torch.int64)), torch.arange(DRAWS), Stream.TARGET, 1)
    assert stats.kstest(noise.flatten().double().numpy(), "gumbel_r").pvalue > LEAST


def test_the_winners_of_a_large_vocabulary_are_finer_than_a_24_bit_grid():
    """The largest of V Gumbels is Gumbel(log V), and the 200 largest are distinct, as those of a grid are not."""
    rows, vocab = 60, 129_280
    noise = gumbel(keys(torch.arange(rows)), torch.zeros(rows, dtype=torch.int64), Stream.TARGET, vocab)
    best = noise.topk(200).values
    assert stats.kstest(best[:, 0].double().numpy() - np.log(vocab), "gumbel_r").pvalue > 1e-3
    assert (best[:, 1:] < best[:, :-1]).double().mean() > 0.9995

    on_grid = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(1))
    coarse_best = on_grid.log_().neg_().log_().neg_().topk(200).values
    assert (coarse_best[:, 1:] < coarse_best[:, :-1]).double().mean() < 0.998


def test_argmax_with_gumbel_noise_draws_from_softmax():
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf, 0.5])
    noise = gumbel(keys(torch.arange(DRAWS)), torch.zeros(DRAWS, dtype=torch.int64), Stream.TARGET, 6)
    counts = torch.bincount((scores + noise).argmax(1), minlength=6)
    assert p_value(counts, scores.double().softmax(0)) > LEAST
