"""Alphabet sort: conversations by seed, the lists a reply gives, and multi-turn rollouts through verifiers' loop."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
import verifiers as vf
from alphabet_sort import load_environment
from alphabet_sort.names import FIRST_NAMES, LAST_NAMES, in_order, made_names, read_names
from alphabet_sort.scores import listed, similarity
from hypothesis import given
from hypothesis import strategies as st

from .scripted import play


def test_names_are_distinct_plain_and_ordered_without_case() -> None:
    names = made_names()
    assert len(names) == len({name.casefold() for name in names}) == len(FIRST_NAMES) * len(LAST_NAMES) > 10_000
    assert all(re.fullmatch(r"[A-Z][a-z]+ [A-Z][a-z]+", name) for name in names)
    assert in_order(["bo Ack", "Ann Zu", "Bo Abe", "Anna Abe"]) == ["Ann Zu", "Anna Abe", "Bo Abe", "bo Ack"]


def names_in(message: str) -> list[str]:
    return message.split("\n\n")[1].split("\n")


def test_a_conversation_merges_marked_names_into_the_sorted_list() -> None:
    env = load_environment(min_turns=2, max_turns=4, min_names_per_turn=2, max_names_per_turn=3)
    for row in env.get_dataset().select(range(200)):
        messages, lines = row["info"]["messages"], row["info"]["lines"]
        assert 2 <= len(messages) == len(lines) <= 4
        assert row["prompt"] == [{"role": "user", "content": messages[0]}]
        known: list[str] = []
        for turn, message in enumerate(messages):
            new = names_in(message)
            known += new
            assert 2 <= len(new) <= 3 and len(set(known)) == len(known)
            marked = [f"{name} // new name!" if turn and name in new else name for name in sorted(known)]
            assert lines[turn] == marked


def reply(lines: list[str], turn: int) -> str:
    tag = "combined_alphabetical_sorted" if turn else "alphabetical_sorted"
    return f"<{tag}>\n" + "\n".join(lines) + f"\n</{tag}>"


@pytest.fixture(scope="module")
def three_turns() -> tuple[Any, Any]:
    env = vf.load_environment("alphabet-sort", min_turns=3, max_turns=3, num_train_examples=2, system_prompt="Sort.")
    return env, env.get_dataset()[0]


def test_each_turn_is_scored_separately(three_turns: tuple[Any, Any]) -> None:
    env, row = three_turns
    right = [reply(lines, turn) for turn, lines in enumerate(row["info"]["lines"])]
    state = play(env, row, right)
    assert state["reward"] == 1 and state["metrics"]["all_turns_right"] == 1 and state["metrics"]["num_turns"] == 3
    said = [message.content for message in state["scripted"].prompts[-1] if message.role == "user"]
    assert said == row["info"]["messages"]
    assert state["scripted"].prompts[0][0].role == "system"
    for wrong in range(3):
        state = play(env, row, [text if turn != wrong else "I do not know." for turn, text in enumerate(right)])
        assert state["reward"] == pytest.approx(2 / 3) and state["metrics"]["all_turns_right"] == 0


def test_a_conversation_shorter_than_the_longest_ends_in_time() -> None:
    env = load_environment(min_turns=1, max_turns=3, num_train_examples=50)
    row = next(row for row in env.get_dataset() if len(row["info"]["lines"]) == 1)
    state = play(env, row, [reply(row["info"]["lines"][0], 0)])
    assert state["reward"] == 1 and state["stop_condition"] == "conversation_over"


def test_similarity_power_lowers_the_score_of_nearly_correct_lists() -> None:
    args: dict[str, Any] = {"min_turns": 2, "max_turns": 2, "min_names_per_turn": 3, "num_train_examples": 1}
    row = load_environment(**args).get_dataset()[0]
    first, second = row["info"]["lines"]
    unmarked = [line.removesuffix(" // new name!") for line in second]
    near = similarity(unmarked, second)
    assert 0.5 < near < 1
    replies = [reply(first, 0), reply(unmarked, 1)]

    def reward(**more: Any) -> float:
        return play(load_environment(**args, **more), row, replies)["reward"]

    assert reward(similarity_power=1) == pytest.approx((1 + near) / 2)
    assert reward() == pytest.approx((1 + near**4) / 2)
    assert reward(similarity_power=2, power_per_turn=False) == pytest.approx(((1 + near) / 2) ** 2)


LIST = "<alphabetical_sorted>Ada Abbott\nBo Berg</alphabetical_sorted>"
NO_LIST = [
    "", "Ada Abbott\nBo Berg", LIST * 2, f"{LIST}</think>", f"<alphabetical_sorted>{LIST}", LIST.split("</")[0],
    "</alphabetical_sorted>Ada Abbott\nBo Berg<alphabetical_sorted>", LIST.replace("alpha", "combined_alpha"),
    "<alphabetical_sorted>" * 10_000,
    "<alphabetical_sorted>" + "Ada Abbott\nBo Berg\n" * 100_000 + "</alphabetical_sorted>",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_LIST, ids=range(len(NO_LIST)))
def test_reply_without_a_single_list_scores_zero(text: str) -> None:
    start = time.process_time()
    assert similarity(listed(text, "alphabetical_sorted"), ["Ada Abbott", "Bo Berg"]) == 0
    assert time.process_time() - start < 1


def test_outer_space_and_reasoning_do_not_matter() -> None:
    text = "<list>x</list></think> <list>\r\n\n  Ada   Abbott \n\tBo Berg</list> so"
    assert listed(text, "list") == ["Ada Abbott", "Bo Berg"]


@given(st.lists(st.text("ab "), max_size=4), st.lists(st.text("ab", min_size=1), min_size=1, max_size=4))
def test_similarity_is_one_for_equal_lists_only(lines: list[str], right: list[str]) -> None:
    assert 0 <= similarity(lines, right) <= 1
    assert (similarity(lines, right) == 1) == ("\n".join(lines) == "\n".join(right))


def test_names_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("\ufeffÅsa Öberg\n\n  Bo   Berg \nci Cole\n")
    assert read_names(str(path)) == ["Åsa Öberg", "Bo Berg", "ci Cole"]
    env = load_environment(max_turns=1, max_names_per_turn=3, min_names_per_turn=3, names_path=str(path))
    assert env.get_dataset()[0]["info"]["lines"] == [["Bo Berg", "ci Cole", "Åsa Öberg"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("Ada Abbott\nBo <b>", r"names\.txt, row 2: no name"),
        ("Ada Abbott\n\nada abbott", r"names\.txt, row 3: 'ada abbott' is in row 1 already"),
        ("Ada Abbott\n" + "x" * 101, r"names\.txt, row 2: no name"),
        ("Ada Abbott", "need 15 names, there are 1"),
    ],
)
def test_invalid_file_raises_with_the_row(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "names.txt").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_environment(names_path=str(tmp_path / "names.txt"))
