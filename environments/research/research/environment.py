"""The environment: a question, the tools `search` and `read`, and a reward for a right answer with its sources."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from research.corpus import Corpus, read_corpus
from research.generated import Question, make_documents
from research.scoring import SHOWN, citation_scores, cited_documents, is_answer

from .environment_tools.prompts import final_answer, has_answer, hash_data, make_dataset
from .environment_tools.rows import Row, pick, read_splits, text_of

if TYPE_CHECKING:
    from datasets import Dataset
    from verifiers import ToolEnv

SYSTEM_PROMPT = (
    "Answer the question from the documents that the tool `search` finds. When you know the answer, reply with it and "
    "the names of the documents that prove it: <answer>1743 [t3] [p8]</answer>"
)


def load_environment(
    corpus_path: str | None = None,
    data_path: str | None = None,
    eval_data_path: str | None = None,
    dataset_name: str | None = None,
    dataset_subset: str | None = None,
    train_split: str = "train",
    eval_split: str = "test",
    num_train_examples: int = -1,
    num_eval_examples: int = -1,
    num_towns: int = 100,
    num_results: int = 5,
    citation_weight: float = 0.5,
    max_turns: int = 8,
    seed: int = 0,
    system_prompt: str = SYSTEM_PROMPT,
) -> "ToolEnv":
    """Make the environment. Without a corpus it generates one, with questions about it.

    A right answer earns 1 - citation_weight, and citation_weight times the F1 score of its citations. `answer_right`,
    `citation_precision`, `citation_recall` and `has_answer` are metrics with weight 0.

    Args:
        corpus_path: a `.jsonl`, `.json` or `.parquet` file of documents, or a folder of text files.
        data_path: a `.jsonl`, `.json` or `.parquet` file of questions about the corpus.
        eval_data_path: the same for evaluation; without it, `data_path` is used for evaluation too.
        dataset_name: a data set of the hub with such rows.
        dataset_subset: its configuration.
        train_split: its split for training.
        eval_split: its split for evaluation.
        num_train_examples: number of examples; -1 uses all.
        num_eval_examples: the same for evaluation.
        num_towns: size of the generated corpus: two documents and five questions for each town.
        num_results: documents that a search returns.
        citation_weight: share of the reward that citations decide.
        max_turns: maximum number of replies.
        seed: seed of the generated corpus.
        system_prompt: the system message; "" for none.

    Raises:
        ValueError: a missing or malformed file, or invalid arguments.
    """
    import verifiers as vf

    from research.tools import ResearchEnv

    if not 0 <= citation_weight <= 1 or max_turns < 1 or num_results < 1:
        raise ValueError("need 0 <= citation_weight <= 1, and max_turns and num_results of at least 1")
    if (corpus_path is None) != (data_path is None and dataset_name is None):
        raise ValueError("corpus_path needs data_path or dataset_name, and the other way round")
    if corpus_path:
        corpus = read_corpus(corpus_path)

        def read(row: Row) -> Question:
            return read_question(row, corpus)

        train, evaluation = read_splits(
            read, data_path, eval_data_path, dataset_name, dataset_subset, train_split, eval_split
        )
    else:
        documents, questions = make_documents(seed, num_towns)
        corpus = Corpus(documents)
        evaluation, train = questions[: num_towns // 2 + 1], questions[num_towns // 2 + 1 :]
    train, evaluation = pick(train, num_train_examples), pick(evaluation, num_eval_examples)
    corpus_hash = hash_data([*corpus.documents.values()])

    def make_rows(questions: Sequence[Question], first: int = 0) -> "Dataset":
        rows = ((q.text, q.answers[0], (q.answers, sorted(q.evidence), corpus_hash)) for q in questions)
        return make_dataset(rows, system_prompt, first)

    return ResearchEnv(
        corpus,
        num_results,
        max_turns=max_turns,
        dataset=make_rows(train),
        eval_dataset=make_rows(evaluation, len(train)),
        rubric=vf.Rubric(funcs=_make_scores([*train, *evaluation], citation_weight), weights=[1.0, 0.0, 0.0, 0.0, 0.0]),
    )


def read_question(row: Row, corpus: Corpus) -> Question:
    """Return the question of a row: `question`, `answer` or `answers`, and `evidence`, names of documents.

    Raises:
        ValueError: the row is malformed, or names a document that the corpus does not have.
    """
    answers = row.get("answers") or [text_of(row, "answer")]
    evidence = row.get("evidence")
    if not isinstance(answers, list) or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise ValueError("`answers` must be a list of text")
    if not isinstance(evidence, list) or not evidence:
        raise ValueError("`evidence` must be a list of document names")
    if unknown := [name for name in map(str, evidence) if name not in corpus.documents]:
        raise ValueError(f"the corpus has no document {unknown[0][:80]!r}")
    return Question(text_of(row, "question"), tuple(answers), frozenset(map(str, evidence)))


def _make_scores(questions: Sequence[Question], citation_weight: float) -> list[Any]:
    def answer_right(completion: Any, info: Any) -> float:
        """1 if the answer is right, with or without citations."""
        answer = final_answer(completion)
        return float(answer is not None and is_answer(answer, questions[info["number"]].answers))

    def precision_and_recall(completion: Any, info: Any, state: Any) -> tuple[float, float]:
        cited = cited_documents(final_answer(completion) or "")
        return citation_scores(cited, set(state.get(SHOWN, ())), questions[info["number"]])

    def citation_precision(completion: Any, info: Any, state: Any) -> float:
        """Share of the citations that are evidence and were shown."""
        return precision_and_recall(completion, info, state)[0]

    def citation_recall(completion: Any, info: Any, state: Any) -> float:
        """Share of the evidence that is cited."""
        return precision_and_recall(completion, info, state)[1]

    def cited_answer(completion: Any, info: Any, state: Any) -> float:
        """The reward."""
        precision, recall = precision_and_recall(completion, info, state)
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
        return answer_right(completion, info) * (1 - citation_weight + citation_weight * f1)

    return [cited_answer, answer_right, citation_precision, citation_recall, has_answer]
