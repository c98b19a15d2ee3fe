"""The environment: conversations about sorted names, with a score per turn."""

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from alphabet_sort.conversations import FIRST_TAG, LATER_TAG, Turn, make_conversation
from alphabet_sort.names import made_names, read_names
from alphabet_sort.scores import listed, similarity

if TYPE_CHECKING:
    from datasets import Dataset
    from verifiers import MultiTurnEnv


def load_environment(
    min_turns: int = 1,
    max_turns: int = 3,
    min_names_per_turn: int = 1,
    max_names_per_turn: int = 5,
    similarity_power: float = 4.0,
    power_per_turn: bool = True,
    num_train_examples: int = 1000,
    num_eval_examples: int = 128,
    seed: int = 0,
    names_path: str | None = None,
    system_prompt: str = "",
) -> "MultiTurnEnv":
    """Make the environment: names to sort, then more names to merge into the list, with the new ones marked.

    The reward is the mean over all turns of similarity ** `similarity_power`; a turn that was not reached counts as 0.
    `all_turns_right` is measured with weight 0.

    Args:
        min_turns: minimum number of turns of a conversation.
        max_turns: maximum number of turns of a conversation.
        min_names_per_turn: minimum number of names in a turn.
        max_names_per_turn: maximum number of names in a turn.
        similarity_power: larger values reduce the reward of almost correct lists.
        power_per_turn: False applies the power to the mean similarity.
        num_train_examples: conversations for training.
        num_eval_examples: conversations for evaluation; with 0 evaluations use the training examples.
        seed: seed of the conversations.
        names_path: text file with one name per line; without it names are generated.
        system_prompt: the system message; "" for none.

    Raises:
        ValueError: invalid arguments, or a missing or malformed file (the message names file and row).
    """
    from alphabet_sort.turns import AlphabetSort

    if not 1 <= min_turns <= max_turns:
        raise ValueError(f"need 1 <= min_turns <= max_turns, not {min_turns} and {max_turns}")
    if not 1 <= min_names_per_turn <= max_names_per_turn:
        raise ValueError(
            f"need 1 <= min_names_per_turn <= max_names_per_turn, not {min_names_per_turn} and {max_names_per_turn}"
        )
    if similarity_power <= 0 or num_train_examples < 1 or num_eval_examples < 0:
        raise ValueError("similarity_power and num_train_examples must be positive, num_eval_examples at least 0")
    names = read_names(names_path) if names_path else made_names()
    if len(names) < max_turns * max_names_per_turn:
        raise ValueError(
            f"{max_turns} turns of {max_names_per_turn} names need {max_turns * max_names_per_turn} names, "
            f"there are {len(names)}"
        )

    def conversations(part: str, count: int) -> "Dataset":
        # Seeded by text, which `random` hashes the same way everywhere.
        source = Random(f"alphabet-sort {part} {seed}")
        turns, per_turn = (min_turns, max_turns), (min_names_per_turn, max_names_per_turn)
        return _dataset([make_conversation(source, names, turns, per_turn) for _ in range(count)], system_prompt)

    return AlphabetSort(
        max_turns=max_turns,
        dataset=conversations("train", num_train_examples),
        eval_dataset=conversations("eval", num_eval_examples) if num_eval_examples else None,
        rubric=_rubric(similarity_power, power_per_turn),
    )


def similarities(completion: Any, info: Any) -> list[float]:
    """Return the similarity of each turn's reply to the right list; 0 for a turn without a reply."""
    replies = [_field(message, "content") for message in completion if _field(message, "role") == "assistant"]
    right = info["lines"]
    replies = [*replies, *[""] * len(right)][: len(right)]
    return [
        similarity(listed(reply if isinstance(reply, str) else "", LATER_TAG if turn else FIRST_TAG), lines)
        for turn, (reply, lines) in enumerate(zip(replies, right, strict=True))
    ]


def _rubric(power: float, power_per_turn: bool) -> Any:
    import verifiers as vf

    def sorted_names(completion: Any, info: Any) -> float:
        """The reward."""
        found = similarities(completion, info)
        if power_per_turn:
            return sum(value**power for value in found) / len(found)
        return float((sum(found) / len(found)) ** power)

    def all_turns_right(completion: Any, info: Any) -> float:
        """1 if every list is exactly right."""
        return float(min(similarities(completion, info)) == 1)

    return vf.Rubric(funcs=[sorted_names, all_turns_right], weights=[1.0, 0.0])


def _field(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, dict) else getattr(message, name, None)


def _dataset(conversations: Sequence[Sequence[Turn]], system_prompt: str) -> "Dataset":
    from datasets import Dataset

    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return Dataset.from_dict(
        {
            "prompt": [[*system, {"role": "user", "content": turns[0].message}] for turns in conversations],
            "answer": ["\n".join(turns[-1].lines) for turns in conversations],
            "info": [
                {"messages": [turn.message for turn in turns], "lines": [turn.lines for turn in turns]}
                for turns in conversations
            ],
        }
    )
