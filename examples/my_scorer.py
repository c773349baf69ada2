"""A complete custom reward: it prefers right answers, and among those the short ones.

    leeway run async_rl --config quickstart env.reward=my_scorer:short_and_right     (started in this folder)

Several rewards with weights, each logged under its name:
    leeway run async_rl --config quickstart 'env.rewards={exact_match: 1, my_scorer:brevity: 0.1}'
"""

from leeway import Completion, Task


def short_and_right(task: Task, text: str, *, per_char: float = 0.01) -> float:
    """Options come from the config: env.reward_options={my_scorer:short_and_right: {per_char: 0.02}}."""
    right = text.strip() == task.answer.strip()
    return right * max(0.0, 1.0 - per_char * len(text))


def brevity(task: Task, text: str, completion: Completion) -> float:
    """A third argument called `completion` brings the tokens and how the completion ended."""
    return 1.0 / (1 + len(completion.tokens))
