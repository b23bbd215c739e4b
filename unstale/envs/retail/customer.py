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
        self._told: set[str] = set()
        self._lost = 0
        self.gone = False

    def opening(self) -> str:
        wishes = FREE_WISHES if self._free else WISHES
        return self._random("wish").choice(wishes[self._scenario.requests[self._current].wish])

    def answer(self, text: str, *, writes: int) -> str:
        """Answer the agent. `writes` is the number of changes that the agent has made."""
        asked = self._asked(text)
        if asked:
            return self._tell(asked)
        if "?" in text:
            return self._lose("I do not know.")
        if writes > self._current:
            if writes > self._current + 1 or self._current + 1 == len(self._scenario.requests):
                return self._leave("Thanks, bye.")
            self._current += 1
            self._told &= {"email"}
            return "Thanks. One more thing. " + self.opening()
        return self._lose("Please help me.")

    def _asked(self, text: str) -> str:
        """Return the kind of fact that a question asks for, one not given yet if possible; or ""."""
        text = text.lower()
        known = self._scenario.told(self._scenario.requests[self._current])
        asked = [
            kind
            for kind, words in HEARD.items()
            if kind in known and any(word in text for word in words)
        ]
        if "?" not in text:
            return ""
        return next((kind for kind in asked if kind not in self._told), asked[0] if asked else "")

    def _tell(self, kind: str) -> str:
        if kind in self._told:
            self._lost += 1
            if self._lost >= PATIENCE:
                return self._leave("I have told you. Bye.")
        self._told.add(kind)
        answers = FREE_ANSWERS if self._free else TERSE_ANSWERS
        known = self._scenario.told(self._scenario.requests[self._current])[kind]
        return self._random(kind).choice(answers[kind]).format(known)

    def _lose(self, text: str) -> str:
        self._lost += 1
        return self._leave("Bye.") if self._lost >= PATIENCE else text

    def _leave(self, text: str) -> str:
        self.gone = True
        return text

    def _random(self, kind: str) -> Random:
        return Random(f"{self._scenario.seed}/{self._current}/{kind}")
