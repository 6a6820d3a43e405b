"""Generation over a model that is a table: each token's successor, in bytes of a real tokenizer."""

from threading import Event

import numpy as np
import pytest

from table_model import BOS, EOS, VOCAB, engine
from zllmc.runtime.generation import LOOP_PERIOD, LOOP_TOKENS, PromptError, common_length, generate
from zllmc.runtime.sampling import GREEDY, SamplingParams


def text_of(chunks):
    return "".join(chunk.text for chunk in chunks)


def greedy(engine, prompt, **options):
    return list(generate(engine, prompt, sampling=GREEDY, **options))


def test_an_answer_ends_at_the_token_that_ends_generation():
    chunks = greedy(engine("Hello!"), "hi")
    assert text_of(chunks) == "Hello!"
    assert [c.finish for c in chunks] == [None] * 6 + ["stop"]
    assert chunks[-1].ids == (EOS,)
    assert chunks[-1].stats.tokens == 7 and chunks[-1].stats.prompt_tokens == 3


def test_max_tokens_ends_an_answer():
    chunks = greedy(engine("Hello!"), "hi", max_tokens=3)
    assert text_of(chunks) == "Hel" and chunks[-1].finish == "length"


def test_the_end_of_the_context_ends_an_answer():
    e = engine("Hello!", context=5)
    session = e.session()
    chunks = greedy(e, "hi", session=session)
    assert text_of(chunks) == "Hel" and chunks[-1].finish == "length"
    assert len(session.tokens) == 5


def test_an_answer_that_only_repeats_itself_ends():
    chunks = greedy(engine("Well. " + "and again " * 200, context=4000), "hi")
    assert chunks[-1].finish == "repetition"
    assert LOOP_TOKENS <= chunks[-1].stats.tokens < LOOP_TOKENS + 2 * LOOP_PERIOD


def test_a_long_answer_with_a_change_in_it_goes_on():
    script = "and again " * 30 + "!" + "and again " * 45
    assert greedy(engine(script, context=4000), "hi")[-1].finish == "stop"


def test_a_prompt_that_fills_the_context_still_gives_one_token():
    assert text_of(greedy(engine("Hello!", context=3), "hi")) == "H"


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_stream_cut_anywhere_is_the_decoded_text_of_its_tokens(cut):
    e = engine("añ🙂c€!")
    chunks = greedy(e, "hi", max_tokens=cut)
    ids = [id for c in chunks for id in c.ids]
    assert text_of(chunks) == e.tokenizer.decode(ids)
    assert all("�" not in c.text for c in chunks[:-1])


def test_only_a_new_text_loses_the_space_that_the_tokenizer_puts_before_texts():
    e = engine(" Hello")
    e.tokenizer.facts["add_space_prefix"] = True
    assert text_of(greedy(e, "hi")) == " Hello"
    assert text_of(greedy(e, [{"role": "user", "content": "hi"}])) == "Hello"


@pytest.mark.parametrize("stop", ["END", ["END"]])
def test_a_stop_string_ends_an_answer_before_it(stop):
    chunks = greedy(engine("one END two"), "hi", stop=stop)
    assert text_of(chunks) == "one " and chunks[-1].finish == "stop"


def test_the_beginning_of_a_stop_string_is_held_back_and_then_given():
    chunks = greedy(engine("an ENx EN"), "hi", stop=["END"])
    assert text_of(chunks) == "an ENx EN"
    assert all(not c.text.endswith("E") for c in chunks[:-1])


def test_bos_stands_once_at_the_beginning():
    for prompt in ("hi", [{"role": "user", "content": "hi"}]):
        e = engine("x")
        session = e.session()
        greedy(e, prompt, session=session)
        assert session.tokens[0] == BOS and session.tokens.count(BOS) == 1


def test_text_from_a_user_never_becomes_control_tokens():
    e = engine("x")
    session = e.session()
    greedy(e, "</s>", session=session)
    assert EOS not in session.tokens


def test_token_ids_are_taken_as_they_are():
    e = engine("x")
    session = e.session()
    greedy(e, np.array([5, 6, 7]), session=session)
    assert session.tokens[:3] == [5, 6, 7]


def test_only_what_differs_from_the_session_is_computed():
    e = engine("ok")
    session = e.session()
    greedy(e, "first question", session=session)
    del session.computed[:]
    chunks = greedy(e, "first questionok and more", session=session)
    assert bytes(session.computed[:9]) == b" and more"
    assert chunks[-1].stats.reused_tokens == 1 + len("first questionok")
    del session.computed[:]
    greedy(e, "first try", session=session)
    assert bytes(session.computed[:3]) == b"try"
    assert bytes(session.tokens[1:]) == b"first tryok"


def test_the_same_prompt_again_computes_its_last_token():
    e = engine("ok")
    session = e.session()
    first = greedy(e, "again", session=session)
    del session.computed[:]
    second = greedy(e, "again", session=session)
    assert bytes(session.computed[:1]) == b"n" and text_of(first) == text_of(second)


def test_closing_a_stream_stops_it_and_leaves_the_session_consistent():
    e = engine("Hello!")
    session = e.session()
    stream = generate(e, "hi", sampling=GREEDY, session=session)
    assert next(stream).text + next(stream).text == "He"
    stream.close()
    assert session.tokens == [BOS, *b"hi", *b"H"] == session.computed
    assert text_of(greedy(e, "hi", session=session)) == "Hello!"


def test_cancel_ends_a_stream_within_one_step():
    e, cancel = engine("Hello!"), Event()
    session = e.session()
    stream = generate(e, "hi", sampling=GREEDY, session=session, cancel=cancel)
    next(stream)
    cancel.set()
    chunks = list(stream)
    assert [c.finish for c in chunks] == ["cancelled"] and session.tokens == [BOS, *b"hi"]


def test_cancel_ends_a_long_prompt_between_two_passes():
    e, cancel = engine("Hello!", context=5000), Event()
    session = e.session()
    advance = session._advance
    session._advance = lambda ids: (cancel.set(), advance(ids))[1]
    chunks = greedy(e, "x" * 3000, session=session, cancel=cancel)
    assert [c.finish for c in chunks] == ["cancelled"]
    assert chunks[-1].stats.prefill_rate == 0
    assert 0 < len(session.tokens) < 3000


def test_a_fence_decides_what_may_come_next():
    def only_digits(generated):
        mask = np.zeros(VOCAB, bool)
        mask[list(b"0123456789") if len(generated) < 4 else [EOS]] = True
        return mask

    chunks = list(generate(engine("Hello!"), "hi", fence=only_digits, seed=3))
    assert len(text_of(chunks)) == 4 and text_of(chunks).isdigit() and chunks[-1].finish == "stop"


def test_the_same_seed_gives_the_same_text():
    wild = SamplingParams(temperature=100.0, top_k=0, top_p=1.0, min_p=0.0)

    def run(seed):
        return [c.ids for c in generate(engine("x"), "hi", sampling=wild, seed=seed, max_tokens=20)]

    assert run(1) == run(1) != run(2)


def test_penalties_see_the_prompt():
    forbid = SamplingParams(temperature=0, presence_penalty=20.0)
    assert greedy(engine("hhh"), "hi", max_tokens=1)[0].text == "h"
    assert next(iter(generate(engine("hhh"), "hi", sampling=forbid))).text != "h"


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "empty"),
        ("x" * 1000, {}, r"1,001 tokens.*1,000"),
        ([5, VOCAB], {}, "258"),
        ([-1], {}, "-1"),
        ("hi", {"max_tokens": 0}, "max_tokens is 0; it must be a whole number, 1 or more"),
        ("hi", {"max_tokens": 1.5}, "max_tokens is 1.5"),
        ("hi", {"seed": -1}, "seed is -1; it must be a whole number, 0 or more"),
        ([5, {"role": "user", "content": "hi"}], {}, "mixes"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_an_error_at_once(prompt, options, message):
    with pytest.raises(PromptError, match=message):
        generate(engine("x"), prompt, **options)


def test_messages_need_a_template():
    with pytest.raises(PromptError, match="no chat template"):
        generate(engine("x", template=None), [{"role": "user", "content": "hi"}])


def test_common_length():
    assert common_length([1, 2, 3], [1, 2, 4]) == 2
    assert common_length([1, 2], [1, 2, 3]) == 2
    assert common_length([], [1]) == 0
