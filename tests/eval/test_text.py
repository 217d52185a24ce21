"""Loops are found, and what is no loop is not."""

from __future__ import annotations

import random

import pytest

from vllm_ascend_dsv41.eval.text import LOOPS, distinct, looping, passages, words

PROSE = " ".join(f"word{number}" for number in range(200))


@pytest.mark.parametrize("period", [1, 2, 3, 7, 20, 64])
def test_a_loop_of_any_period_up_to_64(period):
    loop = " ".join(f"w{number}" for number in range(period))
    text = " ".join([loop] * max(4, 60 // period))
    assert looping(text) > 0.7
    assert looping(f"{PROSE} {text}") < looping(text)


def test_the_share_is_that_of_the_loop():
    text = f"{PROSE} {'and so on ' * 100}"
    assert looping(text) == pytest.approx(300 / 500, abs=0.02)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no no no",  # short
        PROSE,
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16",
        "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n| 5 | 6 |\n" + PROSE,
        f"{PROSE}. {PROSE}.",  # said twice
    ],
)
def test_what_is_no_loop(text):
    assert looping(text) < LOOPS


def test_chinese_text_loops_too():
    assert words("雪火水 red") == ["雪", "火", "水", "red"]
    assert looping("雪火水" * 20) > 0.7


def test_against_a_plain_definition():
    """Every place of which the two before it, a period apart, are the same for a whole period."""

    def plain(found):
        best = 0
        for period in range(1, min(64, len(found) // 3) + 1):
            inside = set()
            for at in range(len(found) - 3 * period + 1):
                one, two, three = (found[at + n * period : at + (n + 1) * period] for n in range(3))
                if one == two == three:
                    inside |= set(range(at + period, at + 3 * period))
            best = max(best, len(inside))
        return best / len(found)

    source = random.Random(3)
    for _ in range(300):
        found = [source.choice("ab") for _ in range(source.randint(24, 60))]
        assert looping(" ".join(found)) == pytest.approx(plain(found)), found


def test_distinct_and_passages():
    assert distinct(["a b a b", "a b"], 2) == pytest.approx(2 / 4)
    assert distinct(["one"], 2) is None
    assert passages("a b c d e f", 2, 3) == ["a b", "c d", "e f"]
    with pytest.raises(ValueError, match="5 words of text; 3 prompts of 2 words take 6"):
        passages("a b c d e", 2, 3)
