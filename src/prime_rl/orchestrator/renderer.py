"""Messages to token ids, once: what the engine has sampled is never tokenised again."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from prime_rl.errors import ConfigError

Message = dict[str, Any]


class Renderer:
    """Applies a tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Wrap `tokenizer`, which must have a chat template (ConfigError)."""
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"tokenizer {tokenizer.name_or_path} has no chat template; set tokenizer.name to one that has"
            )
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, name: str, trust_remote_code: bool = False) -> "Renderer":
        """Load the tokenizer `name`, a local directory or a Hugging Face id; ConfigError if there is none.

        Reads tokenizer.json directly: `AutoTokenizer` would import torch.
        """
        try:
            return cls(PreTrainedTokenizerFast.from_pretrained(name, trust_remote_code=trust_remote_code))
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"tokenizer of model {name!r} cannot be loaded (model.name, tokenizer.name): {reason}"
            ) from None

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, generate: bool = True) -> list[int]:
        """Render `messages` to ids, with the head of the assistant's turn appended if `generate`."""
        ids: list[int] = self._tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=generate, tokenize=True, return_dict=False
        )
        return ids

    def extend(
        self,
        context: list[int],
        seen: Sequence[Message],
        messages: Sequence[Message],
        tools: list[Any] | None = None,
    ) -> list[int]:
        """Render the next turn on top of the exact ids that the engine holds.

        Args:
            context: prompt and sampled ids of the turns so far.
            seen: the messages that `context` stands for.
            messages: the messages of the next turn; usually `seen` and what the environment added.
            tools: tool definitions for the template.

        Returns:
            `context` followed by the template's ids of what is new. Where `messages` do not extend `seen`, or the
            last completion was cut before its end token, the whole is rendered anew and does not start with `context`.
        """
        base, full = self.render(seen, tools, generate=False), self.render(messages, tools)
        if full[: len(base)] != base or context[-1] not in base:
            return full
        end = len(base) - base[::-1].index(context[-1])  # behind the token that ended the last completion
        if self._tokenizer.decode(base[end:]).strip():
            return full  # that token was no end of turn: the completion was cut, the template closes it
        return context + full[end:]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled ids, without special tokens."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text
