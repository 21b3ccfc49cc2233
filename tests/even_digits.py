"""A task on which even a random model earns something: the share of an answer's characters that are even digits."""


class EvenDigits:
    train = [f"{i:02d}+{i:02d}=" for i in range(60)]
    validation = heldout = [f"{i:02d}-{i:02d}=" for i in range(60)]

    def reward(self, prompt: str, answer: str) -> float:
        return sum(c in "02468" for c in answer) / max(1, len(answer))


def make_task() -> EvenDigits:
    return EvenDigits()
