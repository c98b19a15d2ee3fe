"""The draw of a campaign: deterministic for a seed, and complete over the points."""

from tests.chaos import letters
from tests.chaos.cases import POINTS, REAL_POINTS, draw, group_into_plans
from tests.support.tiny_model import CHARACTERS, ROLES, SPECIAL_TOKENS


def test_draw_is_determined_by_the_seed():
    assert draw(30, 5) == draw(30, 5)
    assert draw(30, 5) != draw(30, 6)


def test_draw_of_a_hundred_cases_covers_every_point():
    plans = draw(100, 1)
    cases = [case for plan in plans for case in plan.cases]
    assert sorted(case.number for case in cases) == list(range(100))
    assert {case.name for case in cases} == {point.name for point in (*POINTS, *REAL_POINTS)}
    assert sum(len(plan.cases) for plan in plans if plan.engine == "real") == 10
    assert {plan.restarts for plan in plans} == {True, False}
    assert {plan.async_level for plan in plans} == {0, 1, 2}


def test_points_have_unique_names():
    names = [point.name for point in (*POINTS, *REAL_POINTS)]
    assert len(names) == len(set(names))


def test_cases_are_in_runs_that_meet_their_needs():
    plans = draw(200, 2)
    again = group_into_plans([case for plan in plans for case in plan.cases], plans[-1])
    for plan in (*plans, *again):
        needs = {case.needs for case in plan.cases}
        assert len(needs) == 1
        assert (plan.ranks == 2) == (needs == {"two ranks"})
        assert (plan.keep_last is not None) == (needs == {"pruning"})
    assert sum(len(plan.cases) for plan in again) == 200


def test_letters_match_the_tokenizer():
    vocabulary = [*SPECIAL_TOKENS, *ROLES, *CHARACTERS]
    assert vocabulary[letters.END] == "<|im_end|>"
    assert vocabulary[letters.GOOD] == "a"
    assert "".join(vocabulary[index] for index in letters.OTHERS) == "bcdefghijklmnopqrstuvwxyz"


def test_complete_depends_on_the_version_only_and_improves_with_it():
    prompt = [4, 5, 6]
    length = letters.completion_length(prompt, 9) + 1
    shares = []
    for version in (0, 5, 30):
        answer = letters.complete(prompt, 9, [version] * length)
        assert answer == letters.complete(prompt, 9, [version] * length)
        assert answer[-1] == letters.END and len(answer) == length
        shares.append(answer.count(letters.GOOD))
    assert shares == sorted(shares)
