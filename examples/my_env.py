"""A complete custom environment: answers that are nearly right earn a partial reward.

    leeway run async_rl --config quickstart env.name=my_env:MyEnv        (started in this folder)

Options come from the config too: env.options.partial=0.2
"""

from leeway import Environment, Policy, Task, Trajectory


class MyEnv(Environment):
    """One question, one number. The right number earns 1, other numbers earn less the further off they are, else 0."""

    def __init__(self, partial: float = 0.3) -> None:
        self.partial = partial

    async def rollout(self, task: Task, policy: Policy) -> list[Trajectory]:
        prompt = policy.encode(task.prompt)
        completions = await policy.generate(prompt)  # policy.group_size answers
        trajectories = []
        for completion in completions:
            right = completion.text.strip() == task.answer.strip()
            reward = 1.0 if right else self.partial * closeness(completion.text, task.answer)
            trajectories.append(
                Trajectory.from_completion(prompt, completion, reward=reward, metrics={"exact_match": float(right)})
            )
        return trajectories


def closeness(text: str, answer: str) -> float:
    """1 / (1 + distance) between two whole numbers, 0.0 when one is not a number."""
    try:
        return 1.0 / (1.0 + abs(int(text) - int(answer)))
    except (ValueError, OverflowError):
        return 0.0
