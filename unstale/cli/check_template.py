"""The command `check-template`: check whether a chat template can be continued exactly.

A conversation with a new message must begin with the same text as without it. The command renders
random conversations. If one shows a problem, it is shortened while the problem remains.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.markup import escape
from rich.table import Table

from unstale.cli.template_checks import (
    CONVERSATION_S,
    EXCERPT,
    QUESTION,
    TEMPLATE_ERRORS,
    TOOLS,
    CheckResult,
    run_checks,
)
from unstale.config import ConfigError
from unstale.config.chat_templates import read_template
from unstale.config.files import read_mapping
from unstale.config.hub import reading
from unstale.durability.console import Console
from unstale.envs import Message
from unstale.envs.chat import DAY, Chat
from unstale.envs.guard import Watchdog, time_limit
from unstale.model.loading import load_tokenizer


@dataclass(frozen=True, slots=True)
class TemplateResult:
    """The results of all checks of a chat template. `bool(result)` is True if it can be used."""

    checks: Sequence[CheckResult] = ()
    error: str = ""
    """The reason why the checks could not run. Empty if they ran."""

    def __bool__(self) -> bool:
        return not self.error and not any(check.broken for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        checks = [
            {"name": check.name, "passed": check.num_passed, "problems": list(check.problems)}
            for check in self.checks
        ]
        return {"usable": bool(self), "error": self.error, "checks": checks}


def check_template(
    folder: Path,
    *,
    conversations: int = 1000,
    chat_template: str = "",
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    console: Console | None = None,
) -> TemplateResult:
    """Check the chat template of the model in `folder`. Print the results and return them.

    `conversations` is the number of random conversations. `chat_template` replaces the folder's
    template, and `template_kwargs` are passed to the template. Raises `ConfigError` for a folder
    without a tokenizer or a template.
    """
    if conversations < 1:
        raise ConfigError(f"--conversations must be at least 1, got {conversations}")
    console = console or Console(soft_wrap=True)
    tokenizer = load_tokenizer(folder, read_template(chat_template))
    tokenizer.model_max_length = sys.maxsize  # otherwise it prints a warning
    ends = stop_tokens_of(folder)
    try:
        with reading(folder, "chat template"), Watchdog(partial(print, file=sys.stderr)):
            with time_limit("the chat template", CONVERSATION_S, "use another template"):
                chat = Chat(tokenizer, (), ends=ends, template_kwargs=template_kwargs)
                facts = Table(show_header=False, box=None)
                for name, fact in _facts(chat):
                    facts.add_row(f"[bold]{name}[/]", escape(fact))
                chat = chat.with_tools(TOOLS)
            console.print(facts, highlight=False)
            results = run_checks(chat, conversations)
    except ConfigError as error:
        named = error.__cause__ if isinstance(error.__cause__, TEMPLATE_ERRORS) else error
        console.print(f"[bold red]breaks:[/] {escape(str(named))}", highlight=False)
        return TemplateResult(error=str(named))
    _print_results(results, console)
    return TemplateResult(results)


def _print_results(results: list[CheckResult], console: Console) -> None:
    table = Table("check", "result", "meaning")
    for result in results:
        reasons = []
        for problem, _ in result.problems.values():
            color = "yellow" if problem.harmless else "red"
            reasons.append(f"[{color}]{escape(problem.reason)}[/]")
        word = "[green]passes[/]"
        if reasons:
            word = "[bold red]breaks[/]" if result.broken else "passes, but"
        table.add_row(
            result.name, word, "\n".join(reasons) or f"{result.num_passed:,} conversations"
        )
    console.print(table, highlight=False)
    for result in results:
        for problem, messages in result.problems.values():
            console.print(f"[bold]{escape(problem.reason)}[/]", highlight=False)
            for message in messages:
                console.print(f"    {escape(_summary(message))}", highlight=False)
            excerpt = f"    [dim]{escape(problem.excerpt)}[/]" if problem.excerpt else ""
            console.print(excerpt, highlight=False)


def stop_tokens_of(folder: Path) -> tuple[int, ...]:
    """Return the ids of the tokens that end a reply, from the files of a model folder.

    Empty if they are not known.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            tokens = read_mapping(path).get("eos_token_id")
            if tokens is not None:
                return tuple(tokens) if isinstance(tokens, list) else (tokens,)
    return ()


def _facts(chat: Chat) -> Iterator[tuple[str, str]]:
    """Yield properties of a chat template, each as a name and a text."""
    ends = [chat.text([token], whole=True) for token in chat.stop_tokens]
    yield "end of a reply", " or ".join(ends)
    yield "calls", str(chat.call_form)
    yield "thoughts", "end in </think>" if chat.thinks else "not supported"
    if chat.dated:
        yield "date", f"always {DAY:%d %b %Y}, so that prompts do not change at midnight"
    system = [Message("system", "x"), QUESTION]
    if chat.render(system) == chat.with_tools(TOOLS).render(system):
        yield "tools", "not rendered: the prompt has to describe them"


def _summary(message: Message) -> str:
    thoughts = f" (thinks {message.thoughts[:EXCERPT]!r})" if message.thoughts else ""
    calls = "".join(
        f" {call.name}({json.dumps(dict(call.arguments))})" for call in message.tool_calls
    )
    return f"{message.role}:{thoughts} {message.content[:EXCERPT]!r}{calls}"
