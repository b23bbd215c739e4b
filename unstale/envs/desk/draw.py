"""The random choices and the customers of one scenario, which is one customer-service task."""

from collections.abc import Sequence
from random import Random

from unstale.envs.desk.database import Desk, Payment, User

PEOPLE = (
    "Ada Lindqvist", "Bela Horvat", "Chidi Okafor", "Dana Petrov", "Emre Yilmaz", "Farah Nasser",
    "Goran Ilic", "Hana Sato", "Ivo Marek", "Jun Park", "Kofi Mensah", "Lena Vogel", "Mina Rossi",
    "Nils Berg", "Olga Duarte",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class Draw:
    """The random choices of one scenario, and the database `desk` that they fill."""

    def __init__(self, random: Random, level: int) -> None:
        self.random = random
        self.level = level
        self.desk = Desk(terse=level == 1)
        self._used: set[str] = set()

    def number(self) -> str:
        """Return a new random number of the scenario: two digits at level 1, four at higher
        levels.
        """
        while True:
            number = str(self.random.randrange(*((10, 100) if self.level == 1 else (1000, 10000))))
            if number not in self._used:
                self._used.add(number)
                return number

    def numbered(self, names: Sequence[str]) -> dict[str, str]:
        """Return new number -> name, for each name."""
        return {self.number(): name for name in names}

    def add_users(
        self, accounts: tuple[str, str], is_special: bool, payments: Sequence[str]
    ) -> None:
        """Add three users to the database. The first one is the customer.

        Each has the first kind of `payments` and one of the others. `accounts` are the usual and
        the special kind of account. The customer has the special one if `is_special`, others have
        it at random.
        """
        random = self.random
        for place, name in enumerate(random.sample(PEOPLE, 3)):
            kinds = [payments[0], random.choice(payments[1:])] if payments else []
            random.shuffle(kinds)
            wallet = tuple(Payment(self.number(), kind) for kind in kinds)
            special = is_special if place == 0 else random.random() < 0.2
            email = name.lower().replace(" ", ".") + "@example.com"
            self.desk.put(User(self.number(), name, email, accounts[special], wallet))
