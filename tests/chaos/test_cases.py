"""The draw of a chaos campaign: the same for a seed, and every point has its turn."""

from tests.chaos import letters
from tests.chaos.cases import POINTS, REAL_POINTS, draw, together
from tests.support.tiny_model import CHARACTERS, ROLES, SPECIAL_TOKENS


def test_a_seed_draws_the_same_campaign_again_and_another_seed_another():
    assert draw(30, 5) == draw(30, 5)
    assert draw(30, 5) != draw(30, 6)


def test_a_hundred_cases_strike_at_every_point_and_one_in_ten_at_the_real_server():
    plans = draw(100, 1)
    cases = [case for plan in plans for case in plan.cases]
    assert sorted(case.number for case in cases) == list(range(100))
    assert {case.name for case in cases} == {point.name for point in (*POINTS, *REAL_POINTS)}
    assert sum(len(plan.cases) for plan in plans if plan.engine == "real") == 10
    assert {plan.restarts for plan in plans} == {True, False}
    assert {plan.async_level for plan in plans} == {0, 1, 2}


def test_points_have_names_of_their_own():
    names = [point.name for point in (*POINTS, *REAL_POINTS)]
    assert len(names) == len(set(names))


def test_a_case_that_needs_something_is_in_a_run_that_has_it():
    plans = draw(200, 2)
    again = together([case for plan in plans for case in plan.cases], plans[-1])
    for plan in (*plans, *again):
        needs = {case.needs for case in plan.cases}
        assert len(needs) == 1
        assert (plan.ranks == 2) == (needs == {"two ranks"})
        assert (plan.keep_last is not None) == (needs == {"pruning"})
    assert sum(len(plan.cases) for plan in again) == 200


def test_letters_are_those_of_the_tokenizer():
    vocabulary = [*SPECIAL_TOKENS, *ROLES, *CHARACTERS]
    assert vocabulary[letters.END] == "<|im_end|>"
    assert vocabulary[letters.GOOD] == "a"
    assert "".join(vocabulary[index] for index in letters.OTHERS) == "bcdefghijklmnopqrstuvwxyz"


def test_completions_get_better_with_the_version_and_depend_on_nothing_else():
    prompt = [4, 5, 6]
    length = letters.completion_length(prompt, 9) + 1
    shares = []
    for version in (0, 5, 30):
        answer = letters.complete(prompt, 9, [version] * length)
        assert answer == letters.complete(prompt, 9, [version] * length)
        assert answer[-1] == letters.END and len(answer) == length
        shares.append(answer.count(letters.GOOD))
    assert shares == sorted(shares)
