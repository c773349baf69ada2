"""A game of your own, complete: guess a hidden number by "higher" and "lower". Only the last turn pays.

    leeway run async_rl --config quickstart env.name=guess_number:GuessNumber     (started in this folder)

A player that ignores the hints wins 3 of 7 games; one that uses them wins all. Options come from the config:
env.options.tries=2
"""

import re

from pydantic import BaseModel, PositiveInt

from leeway import Completion, StepEnvironment, Task


class GuessNumber(StepEnvironment):
    """The number follows from the task's answer, which is not shown."""

    class Options(BaseModel, extra="forbid"):
        numbers: PositiveInt = 7
        tries: PositiveInt = 3

    async def reset(self, task: Task):
        self.number, self.guesses = 1 + int(task.answer) % self.options.numbers, 0
        return f"1 to {self.options.numbers} ="

    async def step(self, completion: Completion):
        self.guesses += 1
        said = re.search(r"\d{1,9}", completion.text)
        guess = int(said[0]) if said else 0
        if guess == self.number or self.guesses == self.options.tries:
            right = float(guess == self.number)
            return None, right, True, {"exact_match": right}
        return " lower =" if guess > self.number else " higher =", 0.0, False, {}
