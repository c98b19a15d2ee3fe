"""A corpus of documents, and a search over it."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .environment_tools.rows import Row, convert_rows, read_file, text_of

# The usual parameters of BM25 (Robertson and Zaragoza, 2009, The Probabilistic Relevance Framework).
K1, B = 1.2, 0.75
MAX_QUERY_WORDS = 32


@dataclass(frozen=True)
class Document:
    """A text with a title; `name` is what citations contain."""

    name: str
    title: str
    text: str


class Corpus:
    """Documents with a BM25 index.

    Raises:
        ValueError: there are no documents, or two have the same name.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = {document.name: document for document in documents}
        if not documents or len(self.documents) < len(documents):
            raise ValueError("a corpus needs documents, each with its own name")
        self._lengths: dict[str, int] = {}
        self._postings: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for document in documents:
            counts = Counter(words_of(f"{document.title} {document.text}"))
            self._lengths[document.name] = counts.total()
            for word, count in counts.items():
                self._postings[word].append((document.name, count))
        self._mean_length = sum(self._lengths.values()) / len(documents) or 1.0

    def search(self, query: str, count: int) -> list[Document]:
        """Return at most `count` documents that contain a word of the query, best first."""
        scores: dict[str, float] = defaultdict(float)
        for word in dict.fromkeys(words_of(query)[:MAX_QUERY_WORDS]):
            postings = self._postings.get(word, [])
            weight = math.log(1 + (len(self.documents) - len(postings) + 0.5) / (len(postings) + 0.5))
            for name, frequency in postings:
                length = 1 - B + B * self._lengths[name] / self._mean_length
                scores[name] += weight * frequency * (K1 + 1) / (frequency + K1 * length)
        best = sorted(scores, key=lambda name: (-scores[name], name))
        return [self.documents[name] for name in best[:count]]


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


def read_corpus(path: str | Path) -> Corpus:
    """Read a file with `text` and optional `id` and `title`, or a folder of `.txt` and `.md` files.

    Raises:
        ValueError: there is nothing at the path, or it is malformed.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        rows = [{"id": str(number), **row} for number, row in enumerate(read_file(path), 1)]
        return Corpus(convert_rows(rows, str(path), _read_document))
    files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md") and file.is_file())
    if not files:
        raise ValueError(f"{path} has no .txt or .md files")
    return Corpus([_read_text_file(file, path) for file in files])


def _read_document(row: Row) -> Document:
    name = text_of(row, "id")
    if not re.fullmatch(r"[\w./-]{1,80}", name):
        raise ValueError(f"`id` {name[:80]!r} must have at most 80 letters, digits, and . _ / -")
    return Document(name, text_of(row, "title") if row.get("title") else "", text_of(row, "text"))


def _read_text_file(file: Path, folder: Path) -> Document:
    name = re.sub(r"[^\w./-]", "_", str(file.relative_to(folder)))
    try:
        return Document(name, file.stem.replace("_", " "), file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}") from error
