"""The simulated customer: answers questions in seeded words, and leaves when done or annoyed."""

from random import Random

from unstale.envs.retail.tasks import Scenario
from unstale.envs.retail.wording import FREE_ANSWERS, FREE_WISHES, HEARD, TERSE_ANSWERS, WISHES

PATIENCE = 3
"""Unhelpful replies after which the customer leaves."""


class Customer:
    """One customer with one or two requests. The words depend only on the scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._free = scenario.level > 1
        self._current = 0
        self._answered: set[str] = set()
        self._unhelpful = 0
        self.gone = False

    def opening(self) -> str:
        wishes = FREE_WISHES if self._free else WISHES
        return self._random("wish").choice(wishes[self._scenario.requests[self._current].wish])

    def answer(self, text: str, *, writes: int) -> str:
        """Answer the agent. `writes` is the number of changes that the agent has made."""
        if kind := self._kind_of_question(text):
            return self._answer_question(kind)
        if "?" in text:
            return self._count_unhelpful("I do not know.")
        if writes > self._current:
            if writes > self._current + 1 or self._current + 1 == len(self._scenario.requests):
                return self._leave("Thanks, bye.")
            self._current += 1
            self._answered &= {"email"}
            return "Thanks. One more thing. " + self.opening()
        return self._count_unhelpful("Please help me.")

    def _kind_of_question(self, text: str) -> str:
        """Return the kind of fact that the text asks for, or "". Prefers one not yet answered."""
        text = text.lower()
        known = self._scenario.known_facts(self._scenario.requests[self._current])
        kinds = [
            kind
            for kind, words in HEARD.items()
            if kind in known and any(word in text for word in words)
        ]
        if "?" not in text:
            return ""
        return next(
            (kind for kind in kinds if kind not in self._answered), kinds[0] if kinds else ""
        )

    def _answer_question(self, kind: str) -> str:
        if kind in self._answered:
            self._unhelpful += 1
            if self._unhelpful >= PATIENCE:
                return self._leave("I have told you. Bye.")
        self._answered.add(kind)
        answers = FREE_ANSWERS if self._free else TERSE_ANSWERS
        known = self._scenario.known_facts(self._scenario.requests[self._current])[kind]
        return self._random(kind).choice(answers[kind]).format(known)

    def _count_unhelpful(self, text: str) -> str:
        self._unhelpful += 1
        return self._leave("Bye.") if self._unhelpful >= PATIENCE else text

    def _leave(self, text: str) -> str:
        self.gone = True
        return text

    def _random(self, kind: str) -> Random:
        return Random(f"{self._scenario.seed}/{self._current}/{kind}")
