"""research: the search, citations that count, and rollouts with tool calls through verifiers' loop."""

import json

import pytest
from research.corpus import Corpus, Document, read_corpus
from research.environment import load_environment
from research.generated import Question, make_documents
from research.scoring import citation_scores, cited_documents, is_answer

from .scripted import call, play

DOCUMENTS = [
    {"id": "d1", "title": "Velmora", "text": "Velmora was founded in 1743."},
    {"id": "d2", "title": "Ada Quist", "text": "Ada Quist was born in Velmora."},
    {"id": "d3", "title": "Tea", "text": "Tea is a drink." + " x" * 9000},
]
QUESTION = {"question": "When was the birthplace of Ada Quist founded?", "answer": "1743", "evidence": ["d1", "d2"]}


def load_rows(folder, *questions, **args):
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DOCUMENTS))
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    paths = {"corpus_path": str(folder / "corpus.jsonl"), "data_path": str(folder / "questions.jsonl")}
    return load_environment(**paths, **args)


def test_search_ranks_rare_words_first_and_returns_no_others():
    corpus = Corpus([Document(str(n), "", f"common words{' rare' if n == 3 else ''}") for n in range(9)])
    assert [document.name for document in corpus.search("common rare", 2)] == ["3", "0"]
    assert corpus.search("absent", 5) == corpus.search("", 5) == corpus.search("?" * 10_000, 5) == []


def test_read_corpus_folder_names_documents_by_path(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "my file.md").write_text("text")
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert list(read_corpus(tmp_path).documents) == ["a/my_file.md", "b.txt"]


def test_generated_questions_are_answered_by_their_evidence():
    documents, questions = make_documents(0, 40)
    texts = {document.name: f"{document.title} {document.text}" for document in documents}
    assert len(documents) == 80 and len(questions) == 200
    for question in questions:
        assert any(question.answers[0] in texts[name] for name in question.evidence)


@pytest.mark.parametrize(
    ("reply", "answer", "right"),
    [
        ("1743", "1743", True), ("The 1743. [d1]", "1743", True), ("1743 [d1][d2]", "1743", True),
        ("1,743 [d1]", "1743", True), ("**1743**", "1743", True), ("1743", "1,743", True),
        ("12,300 people", "12300 people", True), ("the Red House!", "red house", True), ("3.5", "3.50", True),
        ("Apollo-11", "Apollo 11", True), ("1744", "1743", False), ("1743 1744", "1743", False),
        ("1743 BC", "1743", False), ("1,74", "174", False), ("5", "-5", False), ("3 5", "3.5", False),
        ("3 5 km", "3.5 km", False), ("-5 km", "5 km", False), ("5 miles", "5 km", False),
        ("house", "red house", False), ("", "1743", False),
    ],
)  # fmt: skip
def test_is_answer_ignores_citations_case_and_articles(reply, answer, right):
    assert is_answer(reply, [answer]) is right


@pytest.mark.parametrize(
    ("cited", "shown", "precision", "recall"),
    [
        ({"d1", "d2"}, {"d1", "d2"}, 1, 1),
        ({"d1"}, {"d1", "d2"}, 1, 0.5),
        ({"d1", "d2", "d3", "d4"}, {"d1", "d2", "d3"}, 0.5, 1),
        ({"d1", "d2"}, {"d1"}, 0.5, 0.5),
        ({"d1", "d2"}, set(), 0, 0),
        (set(), {"d1"}, 0, 0),
    ],
)
def test_citation_scores_count_shown_evidence(cited, shown, precision, recall):
    assert citation_scores(cited, shown, Question("", ["x"], frozenset({"d1", "d2"}))) == (precision, recall)


def test_cited_documents_are_those_in_brackets():
    assert cited_documents("a [d1] [d2][d1] [d 3] [] [[d4]] [" + "x" * 100 + "]") == {"d1", "d2", "d4"}
    assert cited_documents("[" * 100_000) == frozenset()


SEARCH, READ = call("search", '{"query": "Ada Quist"}'), call("read", '{"name": "d1"}')


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        ([SEARCH, call("search", '{"query": "Velmora"}'), "<answer>1743 [d1] [d2]</answer>"], 1),
        ([call("read", '{"name": "[d1]"}'), "<answer>1743 [d1]</answer>"], 0.5 + 0.5 * 2 / 3),
        (["<answer>1743 [d1] [d2]</answer>"], 0.5),
        ([READ, "<answer>1744 [d1]</answer>"], 0),
        ([READ, "1743 [d1]"], 0),
        ([READ] * 8, 0),
    ],
)  # fmt: skip
def test_reward_needs_the_answer_and_its_sources(tmp_path, replies, reward):
    env = load_rows(tmp_path, QUESTION)
    state = play(env, env.get_dataset()[0], replies)
    assert state["reward"] == pytest.approx(reward)


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("search", '{"query": 7}', "nothing found"),
        ("search", '{"query": "tea", "state": {}}', "[d3] Tea: Tea is"),
        ("search", "{}", "error: "),
        ("search", "[1]", "error: "),
        ("search", "{", "error: "),
        ("read", '{"name": "../../etc/passwd"}', "error: there is no such document"),
        ("read", '{"name": null}', "error: there is no such document"),
        ("read", '{"name": "d3"}', "[d3] Tea"),
        ("remove", "{}", "error: there is no such tool"),
    ],
)
def test_tools_answer_hostile_calls(tmp_path, name, arguments, result):
    env = load_rows(tmp_path, QUESTION)
    state = play(env, env.get_dataset()[0], [call(name, arguments), "done"])
    [message] = [message for message in state["completion"] if message.role == "tool"]
    assert message.content.startswith(result)
    assert len(message.content) < 8200


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**QUESTION, "evidence": ["d9"]}, "no document 'd9'"),
        ({**QUESTION, "evidence": []}, "evidence"),
        ({**QUESTION, "answers": "x"}, "answers"),
        ({"question": "?", "evidence": ["d1"]}, "no 'answer'"),
    ],
)
def test_malformed_rows_raise(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        load_rows(tmp_path, row)
