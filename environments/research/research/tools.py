"""The tools of a rollout; they note which documents the model was shown."""

from typing import Any

import verifiers as vf

from research.corpus import Corpus, Document
from research.scoring import SHOWN

from .environment_tools.prompts import ERROR, describe_error

SNIPPET_CHARS = 200
MAX_DOCUMENT_CHARS = 8000


class ResearchEnv(vf.StatefulToolEnv):
    """A `ToolEnv` with the tools `search` and `read` over a corpus."""

    def __init__(self, corpus: Corpus, num_results: int, **options: Any) -> None:
        super().__init__(error_formatter=describe_error, **options)
        self._corpus, self._num_results = corpus, num_results
        for tool in (self.search, self.read):
            self.add_tool(tool, args_to_skip=["state"])

    async def search(self, query: str, state: Any) -> str:
        """Find documents by words.

        Args:
            query: the words.
        """
        found = self._corpus.search(query, self._num_results) if isinstance(query, str) else []
        _note(state, found)
        return "\n".join(f"[{d.name}] {d.title}: {_shorten(d.text, SNIPPET_CHARS)}" for d in found) or "nothing found"

    async def read(self, name: str, state: Any) -> str:
        """Read a whole document.

        Args:
            name: its name, such as "t3".
        """
        document = self._corpus.documents.get(name.strip("[] ")) if isinstance(name, str) else None
        if document is None:
            return f"{ERROR}there is no such document"
        _note(state, [document])
        return f"[{document.name}] {document.title}: {_shorten(document.text, MAX_DOCUMENT_CHARS)}"

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Any, state: Any, **_: Any
    ) -> dict[str, Any]:
        """Give a tool its rollout; called by verifiers."""
        return {**tool_args, "state": state}


def _note(state: Any, documents: list[Document]) -> None:
    shown = state.setdefault(SHOWN, [])
    shown += [document.name for document in documents if document.name not in shown]


def _shorten(text: str, count: int) -> str:
    return text if len(text) <= count else f"{text[:count]} ..."
