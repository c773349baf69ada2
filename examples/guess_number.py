"""A game of your own, complete: guess a digit in a few turns. Only the last turn pays.

    leeway run async_rl --config quickstart env.name=guess_number:GuessNumber     (started in this folder)

Options come from the config too: env.options.tries=3
"""

from pydantic import BaseModel, PositiveInt

from leeway import Completion, StepEnvironment, Task


class GuessNumber(StepEnvironment):
    """The answer of the task is the number. "higher" or "lower" after each guess; 1 point if the last one is right."""

    class Options(BaseModel, extra="forbid"):
        tries: PositiveInt = 2

    async def reset(self, task: Task):
        self.number, self.guesses = int(task.answer), 0
        return task.prompt

    async def step(self, completion: Completion):
        self.guesses += 1
        guess = number_in(completion.text)
        right = guess == self.number
        if right or self.guesses == self.options.tries:
            return None, float(right), True, {"exact_match": float(right)}
        hint = "no number" if guess is None else "lower" if guess > self.number else "higher"
        return f" {hint} =", 0.0, False, {}


def number_in(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
