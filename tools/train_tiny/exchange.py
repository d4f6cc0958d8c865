"""One question and its answer, the unit that all task generators produce."""
from dataclasses import dataclass


@dataclass
class Exchange:
    """user: the question. reasoning: what to think. answer: what to say after thinking.
    plain: what to say without thinking (None: the same). check: how to judge an answer."""
    task: str
    user: str
    reasoning: str
    answer: str
    plain: str | None = None
    check: tuple[str, str] = ("exact", "")

    def spoken(self, thinking: bool) -> str:
        return self.answer if thinking or self.plain is None else self.plain
