r"""A taskset of verifiers 0.4, as people write them: HybridRL is not mentioned, and not needed.

The model guesses a secret digit and is told `higher` or `lower`; it has three guesses.

    python -m hybridrl.main data=environment environment.name=verifiers \
        environment.options.id=examples/verifiers_environment.py environment.python=path/to/venv
"""

import random

import verifiers.v1 as vf

PROMPT = "Guess 0-9."


class GuessConfig(vf.TasksetConfig):
    size: int = 1000
    guesses: int = 3


class GuessData(vf.TaskData):
    secret: int
    guesses: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def found(self, task: GuessData, trace: vf.Trace) -> float:
        return float(trace.info.get("found", 0.0))

    @vf.reward(weight=0.1)
    async def digits(self, task: GuessData, trace: vf.Trace) -> float:
        """The share of guesses that were digits."""
        return float(trace.info.get("digits", 0)) / task.guesses


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        draws = random.Random(0)
        for _ in range(self.config.size):
            secret = draws.randrange(10)
            data = GuessData(prompt=PROMPT, secret=secret, guesses=self.config.guesses)
            yield GuessTask(data, self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            trace, segment = interaction.trace, await interaction.turn()
            for left in reversed(range(task.data.guesses)):
                if segment.terminated:
                    break
                answer = segment.last_reply.strip()
                is_digit = len(answer) == 1 and answer.isdecimal()
                trace.info["digits"] = trace.info.get("digits", 0) + is_digit
                if is_digit and int(answer) == task.data.secret:
                    trace.info["found"] = 1.0
                    trace.info["digits"] = task.data.guesses
                    break
                if not left:
                    break
                hint = "?" if not is_digit else "up" if int(answer) < task.data.secret else "down"
                segment = await interaction.turn(hint)


__all__ = ["GuessEnv", "GuessTaskset"]
