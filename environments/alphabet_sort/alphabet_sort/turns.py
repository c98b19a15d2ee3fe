"""The multi-turn environment class of verifiers."""

from typing import Any

import verifiers as vf


class AlphabetSort(vf.MultiTurnEnv):
    """Says the next message of the conversation after each reply, until there is none."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        """Return the user's next message."""
        return [{"role": "user", "content": state["info"]["messages"][len(state["trajectory"])]}]

    @vf.stop
    async def conversation_over(self, state: Any) -> bool:
        """Return whether the last message has been replied to."""
        return len(state["trajectory"]) >= len(state["info"]["messages"])
