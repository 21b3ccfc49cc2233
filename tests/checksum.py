"""A task on which a random model earns different rewards for different answers, so that every loss has a gradient."""


class Checksum:
    train = [f"{i:02d}+{i:02d}=" for i in range(60)]
    validation = heldout = [f"{i:02d}-{i:02d}=" for i in range(60)]

    def reward(self, prompt: str, answer: str) -> float:
        """Characters' codes added up, modulo 7, in sixths: 0 to 1."""
        return sum(map(ord, answer)) % 7 / 6


def make_task() -> Checksum:
    return Checksum()
