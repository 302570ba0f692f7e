r"""A game of TextArena for one player, played by the taskset that comes with verifiers, which
itself lists only four that need a dictionary.

    python -m hybridrl.main data=environment environment.name=verifiers \
        environment.options.id=examples/textarena_game.py environment.python=path/to/venv \
        environment.options.taskset.game=Secretary-v0
"""

import verifiers.v1 as vf
from verifiers.v1.tasksets.textarena.taskset import (
    TextArenaConfig,
    TextArenaEnv,
    TextArenaTask,
    TextArenaTaskset,
)


class GameConfig(TextArenaConfig):
    game: str


class GameTaskset(TextArenaTaskset, vf.Taskset[TextArenaTask, GameConfig]):
    def load(self):
        for task in super().load():
            yield task.with_data(system_prompt=None)  # it asks for thoughts


__all__ = ["GameTaskset", "TextArenaEnv"]
