"""Parsing of replies: the reasoning text, the content and the tool calls in a text of the
policy.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from unstale.envs import Message
from unstale.envs.argument_types import Schemas
from unstale.envs.calls import CallForm

THOUGHT = "<think>"
END_OF_THOUGHT = "</think>"


def any_of(control_texts: Iterable[str]) -> str:
    """Return a pattern that matches any of these control tokens.

    Those of one character are left out.
    """
    marks = [re.escape(mark) for mark in control_texts if len(mark.strip()) > 1]
    return "|".join(marks) or "(?!)"


class ReplyReader:
    """A reader of replies in the format of a chat template."""

    def __init__(
        self,
        form: CallForm | None,
        schemas: Schemas,
        control_texts: Sequence[str],
        *,
        thinks: bool,
        begins_thinking: bool,
    ) -> None:
        """`form` is the format of tool calls and `schemas` those of the tools.

        `thinks` is True if replies may have a reasoning text, and `begins_thinking` if the prompt
        opens it.
        """
        self._form = form
        self._schemas = schemas
        self._control_texts = control_texts
        self._leading_marks = re.compile(rf"\s*(?:(?:{any_of(control_texts)})\s*)*")
        self._thinks = thinks
        self._begins_thinking = begins_thinking

    def message(self, text: str) -> Message:
        """Return the message of a reply with this text.

        If the reply does not end its reasoning text, all of it is in `thoughts`, and the content is
        empty.
        """
        if self._only_thinks(text):
            return Message("assistant", "", thoughts=_split_thoughts(text)[0])
        thoughts, message = self.parse_text(text)
        return replace(message, thoughts=thoughts or "")

    def _only_thinks(self, text: str) -> bool:
        """Return True if a reply begins with a reasoning text that it does not end."""
        if not self._thinks or END_OF_THOUGHT in text:
            return False
        return self._begins_thinking or text.lstrip("\n").startswith(THOUGHT)

    def parse_text(self, text: str, *, calls: bool = True) -> tuple[str | None, Message]:
        """Parse a reply. Return its reasoning text, and the reply as a message.

        The reasoning text is None if it is not complete. With `calls=False`, tool calls remain text
        in the message. Calls in the reasoning text are ignored.
        """
        thoughts = None
        if self._thinks and END_OF_THOUGHT in text:
            thoughts, text = _split_thoughts(text)
        elif self._only_thinks(text):
            calls = False
        return thoughts, self.parse_content(text) if calls else Message("assistant", text)

    def parse_partial(self, text: str, *, calls: bool = True) -> tuple[str, str]:
        """Parse an unfinished reply.

        Return the parts of its reasoning text and content that are certain. Text that could still
        become something else, such as a tool call, is left out.
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
        """Return the message of a reply without reasoning text, with its tool calls."""
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
    """Split a text at the tag that ends reasoning.

    Return the reasoning text and the text after the tag. Without the tag, the whole text is
    reasoning.
    """
    thoughts, _, rest = text.partition(END_OF_THOUGHT)
    return thoughts.lstrip("\n").removeprefix(THOUGHT).strip("\n"), rest.lstrip("\n")
