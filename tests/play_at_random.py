"""Conversations of a random player with an environment, and a tiny model that is to imitate them
first: where answers have a form, such as `[accept]`, a model of random weights never finds it.

    python tests/play_at_random.py FOLDER --answers '[accept]' '[continue]' --episodes 512 \\
        data=environment environment.name=... environment.options...=...
    python -m hybridrl.main algorithm=sft data=jsonl data.path=FOLDER/played.jsonl \\
        data.messages_column=messages model.path=FOLDER/model

Then `model.path` of the job is what that run saved.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from scripted_endpoint import ScriptedEndpoint

from hybridrl import load_config
from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
from hybridrl.environments.environment_pool import EnvironmentPool, EpisodeRequest
from hybridrl.models.model_loading import make_tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--answers", nargs="+", required=True)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    chosen, settings = parser.parse_known_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    config = load_config(settings).environment
    draws = random.Random(chosen.seed)
    endpoint = ScriptedEndpoint(lambda messages: draws.choice(chosen.answers))
    pool = EnvironmentPool(config)
    try:
        plays = []
        for number, row in enumerate(pool.rows(chosen.episodes)):
            url = endpoint.url(session := f"s{number}")
            plays.append(EpisodeRequest(number, row, url, endpoint.token, session, False))
        pool.start(plays)
        found = []
        while len(found) < len(plays):
            found += pool.poll(5.0)
    finally:
        pool.close()
        endpoint.close()
    rewards = [played.reward for played in found if played.kind == "ok"]
    print(f"{len(rewards)} of {len(found)} episodes, mean reward {sum(rewards) / len(rewards):.3f}")
    longest = {}
    for (session, body), (_, said) in zip(endpoint.requests, endpoint.answers, strict=True):
        longest[session] = [*body["messages"], {"role": "assistant", "content": said}]
    with (chosen.folder / "played.jsonl").open("w") as file:
        for messages in longest.values():
            file.write(json.dumps({"messages": messages}) + "\n")
    shape = {"hidden_size": chosen.hidden, "layers": chosen.layers, "heads": 4}
    make_tiny_model(
        chosen.folder / "model",
        build_character_tokenizer(PRINTABLE_CHARACTERS, chat=True),
        seed=chosen.seed,
        context=chosen.context,
        **shape,
    )


if __name__ == "__main__":
    main()
