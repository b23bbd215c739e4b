"""Parse a reply's text into its reasoning text, its content and its tool calls."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from unstale.envs import Message
from unstale.envs.argument_types import Schemas
from unstale.envs.calls import CallForm

THOUGHT = "<think>"
END_OF_THOUGHT = "</think>"


def any_of(control_texts: Iterable[str]) -> str:
    """Return a pattern that matches each of these texts that has more than one character."""
    marks = [re.escape(mark) for mark in control_texts if len(mark.strip()) > 1]
    return "|".join(marks) or "(?!)"


class ReplyReader:
    """A parser of replies in the format of a chat template."""

    def __init__(
        self,
        form: CallForm | None,
        schemas: Schemas,
        control_texts: Sequence[str],
        *,
        thinks: bool,
        begins_thinking: bool,
    ) -> None:
        """`form` is the format of tool calls, and `schemas` has the tools' schemas.

        `thinks` is True if replies may have reasoning text, and `begins_thinking` if the prompt
        already opens it.
        """
        self._form = form
        self._schemas = schemas
        self._control_texts = control_texts
        self._leading_marks = re.compile(rf"\s*(?:(?:{any_of(control_texts)})\s*)*")
        self._thinks = thinks
        self._begins_thinking = begins_thinking

    def message(self, text: str) -> Message:
        """Return the message of a whole reply.

        If the reply does not end its reasoning text, all of it is in `thoughts`, and the content is
        empty.
        """
        if self._only_thinks(text):
            return Message("assistant", "", thoughts=_split_thoughts(text)[0])
        thoughts, message = self.parse_text(text)
        return replace(message, thoughts=thoughts or "")

    def _only_thinks(self, text: str) -> bool:
        """Return True if a reply begins reasoning text and does not end it."""
        if not self._thinks or END_OF_THOUGHT in text:
            return False
        return self._begins_thinking or text.lstrip("\n").startswith(THOUGHT)

    def parse_text(self, text: str, *, calls: bool = True) -> tuple[str | None, Message]:
        """Return the reasoning text of a reply, and the rest as a message.

        The reasoning text is None if the reply has none or does not end it. With `calls=False`,
        tool calls remain text. Calls inside of reasoning text do not count.
        """
        thoughts = None
        if self._thinks and END_OF_THOUGHT in text:
            thoughts, text = _split_thoughts(text)
        elif self._only_thinks(text):
            calls = False
        return thoughts, self.parse_content(text) if calls else Message("assistant", text)

    def parse_partial(self, text: str, *, calls: bool = True) -> tuple[str, str]:
        """Return the reasoning text and the content of an unfinished reply, as far as they are
        certain.

        Text that may still become something else, such as a tool call, is left out.
        """
        thoughts = ""
        form = self._form
        if self._thinks:
            if END_OF_THOUGHT not in text:  # the reasoning may still turn out to be content
                return "", ""
            thoughts, text = _split_thoughts(text)
        if not calls:
            return thoughts, text
        # left out, unless a malformed call turns the whole text into content
        if text[:1].isspace():
            return thoughts, ""
        if form and form.opens:
            text = text.partition(form.opens)[0]
            lengths = range(len(form.opens) - 1, 0, -1)
            tag_started = next((n for n in lengths if text.endswith(form.opens[:n])), 0)
            text = text[: len(text) - tag_started]
        elif form and any(
            mark.startswith(text[: len(mark)])
            for mark in (form.first_character, *self._control_texts)
        ):
            return thoughts, ""
        return thoughts, text.rstrip()

    def parse_content(self, text: str) -> Message:
        """Return the message of a reply that has no reasoning text."""
        form = self._form
        if form is None:
            return Message("assistant", text.strip())
        if form.opens:
            content, calls = form.read_all(text, self._schemas)
            return Message("assistant", content, calls)
        text = text.strip()
        leading = self._leading_marks.match(text)
        bare = form.read_bare(text, leading.end() if leading else 0)
        return Message("assistant", text) if bare is None else Message("assistant", "", bare)


def _split_thoughts(text: str) -> tuple[str, str]:
    """Return the reasoning text, and the text after the tag `</think>`.

    Without the tag, all of the text is reasoning.
    """
    thoughts, _, rest = text.partition(END_OF_THOUGHT)
    return thoughts.lstrip("\n").removeprefix(THOUGHT).strip("\n"), rest.lstrip("\n")
