"""The simulated customer, who chooses among given wordings, and leaves when served or annoyed."""

from random import Random

from unstale.envs.desk.domain import EMAIL, Scenario

PATIENCE = 3
"""Number of unhelpful replies after which the customer leaves."""


class Customer:
    """A simulated customer with one or two requests. The words follow from the scenario's seed."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._facts = {"email": EMAIL, **scenario.domain.facts}
        self._is_terse = scenario.level == 1
        self._current = 0
        """Index of the request that the customer is making."""
        self._answered: set[str] = set()
        self._unhelpful = 0
        self.gone = False

    def opening(self) -> str:
        """Return the customer's words for the current request."""
        wish = self._scenario.domain.wishes[self._scenario.requests[self._current].wish]
        return self._choose("wish", wish.terse if self._is_terse else wish.free)

    def answer(self, text: str, *, writes: int) -> str:
        """Return the customer's answer to a message of the policy.

        `writes` is the number of changes that the policy has made to the database. A question gets
        the fact that it asks for. On any other message, the customer asks for help until the
        current request has led to a change.
        """
        if "?" in text:
            return self._answer_question(text.lower())
        if writes <= self._current:
            return self._be_unhelped("Please help me.")
        if writes > self._current + 1 or self._current + 1 == len(self._scenario.requests):
            self.gone = True
            return "Thanks, bye."
        self._current += 1
        self._answered &= {"email"}
        return "Thanks. One more thing. " + self.opening()

    def _answer_question(self, text: str) -> str:
        known = self._scenario.known_facts(self._scenario.requests[self._current])
        kinds = [
            kind
            for kind in self._facts
            if kind in known and self._scenario.domain.heard(kind, text)
        ]
        if not kinds:
            return self._be_unhelped("I do not know.")
        # the first question that was not answered yet
        kind = min(kinds, key=self._answered.__contains__)
        fact = self._facts[kind]
        texts = fact.terse if self._is_terse else fact.free
        answer = self._choose(kind, texts).format(known[kind])
        if kind in self._answered:
            return self._be_unhelped(answer, farewell="I have told you. Bye.")
        self._answered.add(kind)
        return answer

    def _be_unhelped(self, text: str, farewell: str = "Bye.") -> str:
        """Count an unhelpful message. Return `text`, or after `PATIENCE` of them leave with
        `farewell`.
        """
        self._unhelpful += 1
        self.gone = self._unhelpful >= PATIENCE
        return farewell if self.gone else text

    def _choose(self, kind: str, texts: tuple[str, ...]) -> str:
        return Random(f"{self._scenario.seed}/{self._current}/{kind}").choice(texts)
