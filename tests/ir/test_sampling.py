"""The sampler against its definition: each step's rule, determinism, and what it must never choose."""

import dataclasses
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from zllmc.runtime.sampling import GREEDY, Sampler, SamplingError, SamplingParams, adjusted, candidates
from zllmc.zllm_ir.choice_ops import top_k

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)

rows = hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-20, 20, width=32))


def softmax(logits):
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def only(**changes):
    return dataclasses.replace(OFF, **changes)


def test_greedy_takes_the_largest_logit():
    assert Sampler(GREEDY).sample(np.float32([1, 5, 3])) == 1


def test_with_every_step_off_all_tokens_remain():
    ids, kept = candidates(np.float32([3, 1, 2]), OFF)
    assert ids.tolist() == [0, 1, 2] and kept.tolist() == [3, 1, 2]


@given(rows, st.integers(1, 400))
def test_top_k_keeps_the_k_largest(logits, k):
    ids, kept = candidates(logits, only(top_k=k))
    assert len(ids) == min(k, len(logits))
    assert sorted(kept) == sorted(logits)[-k:]


@given(rows, st.floats(0.0, 0.999))
def test_top_p_keeps_the_smallest_set_with_that_mass(logits, p):
    ids, _ = candidates(logits, only(top_p=p))
    probabilities = softmax(logits)
    kept = probabilities[ids]
    assert kept.sum() >= p - 1e-9
    assert len(ids) == 1 or kept.sum() - kept.min() < p + 1e-9
    others = np.delete(probabilities, ids)
    assert others.max(initial=0) <= kept.min() + 1e-12


@given(rows, st.floats(0.001, 1.0))
def test_min_p_keeps_what_is_at_least_that_fraction_of_the_likeliest(logits, p):
    ids, _ = candidates(logits, only(min_p=p))
    ratios = np.exp(logits.astype(np.float64) - logits.max())
    assert ratios[ids].min() >= p * (1 - 1e-9)
    assert np.delete(ratios, ids).max(initial=0) < p * (1 + 1e-9)


@given(
    rows,
    st.randoms(use_true_random=False),
    st.sampled_from([GREEDY, OFF, SamplingParams(), only(top_p=0.5), only(min_p=0.9), only(top_k=3)]),
)
def test_a_masked_token_is_never_chosen(logits, random, params):
    mask = np.array([random.random() < 0.3 for _ in logits])
    mask[random.randrange(len(mask))] = True
    sampler = Sampler(params, seed=1)
    assert all(mask[sampler.sample(logits, mask=mask)] for _ in range(20))


SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 8, 30]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
    logit_bias=st.sampled_from([{}, {}, {0: 2.0}]),
)
tied = hnp.arrays(np.float32, st.integers(8, 60), elements=st.integers(-20, 6).map(lambda n: n / 2))


@given(tied, SAMPLING, st.integers(0, 1000))
def test_the_largest_logits_alone_give_the_same_tokens_where_they_give_any(logits, params, seed):
    values, ids = top_k(logits[None], k=8)
    whole, largest = Sampler(params, seed), Sampler(params, seed)
    for _ in range(4):
        found = largest.sample_largest(ids[0], values[0])
        if found is None:
            assert not params.is_greedy and not (0 < params.top_k <= 8 and params.may_need_only(8))
            return
        assert found == whole.sample(logits)


def test_the_largest_logits_are_enough_where_the_others_are_below_min_p():
    logits = np.log(np.float32([0.5, 0.3, 0.01, 0.009]))
    values, ids = top_k(logits[None], k=3)
    assert Sampler(only(min_p=0.1), 0).sample_largest(ids[0], values[0]) in (0, 1)
    assert Sampler(only(min_p=0.019), 0).sample_largest(ids[0], values[0]) is None


def test_of_equal_logits_top_k_keeps_the_lowest_ids():
    ids, _ = candidates(np.float32([1, 2, 1, 0, 1]), only(top_k=3))
    assert ids.tolist() == [0, 1, 2]


def test_top_k_counts_only_tokens_that_the_mask_allows():
    logits = np.arange(10, dtype=np.float32)
    ids, _ = candidates(adjusted(logits, OFF, mask=logits < 5), only(top_k=8))
    assert ids.tolist() == [0, 1, 2, 3, 4]


@given(rows, st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_tokens(logits, seed):
    params = SamplingParams(temperature=2.0, min_p=0)
    first, second = Sampler(params, seed), Sampler(params, seed)
    assert [first.sample(logits) for _ in range(10)] == [second.sample(logits) for _ in range(10)]


def test_draws_follow_the_probabilities_at_the_temperature():
    logits = np.log(np.float32([0.1, 0.2, 0.3, 0.4]))
    for temperature in (0.5, 1.0, 2.0):
        sampler = Sampler(only(temperature=temperature), seed=7)
        counts = np.bincount([sampler.sample(logits) for _ in range(4000)], minlength=4)
        assert np.allclose(counts / 4000, softmax(logits / temperature), atol=0.03)


def test_a_tiny_temperature_is_greedy_and_huge_logits_are_no_problem():
    logits = np.float32([3e38, -3e38, 2.9e38])
    assert Sampler(only(temperature=1e-300), seed=0).sample(logits) == 0
    assert Sampler(only(temperature=100.0), seed=0).sample(logits) == 0


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits():
    params = only(repeat_penalty=2.0)
    assert adjusted(np.float32([4, -4, 4]), params, [0, 1]).tolist() == [2, -8, 4]


def test_frequency_penalty_counts_and_presence_penalty_does_not():
    params = only(frequency_penalty=1.0, presence_penalty=0.5)
    assert adjusted(np.zeros(3, np.float32), params, [1, 1, 2]).tolist() == [0, -2.5, -1.5]


def test_penalties_look_at_the_window_only():
    params = only(presence_penalty=1.0, penalty_window=2)
    assert adjusted(np.zeros(3, np.float32), params, [0, 1, 2]).tolist() == [0, -1, -1]


def test_logit_bias_forbids_and_favours():
    logits = np.float32([1, 2, 3])
    assert Sampler(SamplingParams(temperature=0, logit_bias={2: -math.inf})).sample(logits) == 1
    assert Sampler(SamplingParams(temperature=0, logit_bias={0: 5.0})).sample(logits) == 0
    assert logits.tolist() == [1, 2, 3]


def test_penalties_come_before_top_k():
    params = only(top_k=1, repeat_penalty=2.0)
    assert Sampler(params).sample(np.float32([3, 2]), [0]) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, OFF, SamplingParams()])
def test_logits_that_are_no_numbers_are_an_error(bad, params):
    with pytest.raises(SamplingError, match="aren't finite"):
        Sampler(params).sample(np.float32([1, bad, 2]))


@pytest.mark.parametrize("params", [GREEDY, OFF, SamplingParams()])
def test_nothing_allowed_is_an_error(params):
    with pytest.raises(SamplingError, match="no token is allowed"):
        Sampler(params).sample(np.zeros(4, np.float32), mask=np.zeros(4, bool))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repeat_penalty": 0},
        {"presence_penalty": math.inf},
        {"penalty_window": -1},
        {"penalty_window": math.inf},
        {"top_k": 1.5},
        {"top_k": "40"},
        {"temperature": None},
    ],
)
def test_parameters_out_of_range_are_named(wrong):
    ((name, value),) = wrong.items()
    whole = "whole " if name in ("top_k", "penalty_window") else ""
    with pytest.raises(SamplingError, match=f"{name} is {value!r}; it must be a {whole}number"):
        SamplingParams(**wrong)


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(top_k=np.int64(3), temperature=np.float32(0.5))
    assert Sampler(params).sample(np.float32([0, 0, 9])) in range(3)


def test_a_bias_for_a_token_that_does_not_exist_is_an_error():
    with pytest.raises(SamplingError, match="token 9"):
        Sampler(SamplingParams(logit_bias={9: 1.0})).sample(np.zeros(4, np.float32))
