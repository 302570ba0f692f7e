r"""An agent that knows nothing of HybridRL, trained as it is.

    python -m hybridrl.main data=jsonl data.path=questions.jsonl environment.name=command \
        "environment.options.command=[python, examples/agent_program.py]" \
        environment.hidden_columns=[]

Any program that talks to OpenAI's API will do. It is started for each episode, with the row of the
data in its standard input. This one runs nothing that the model wrote, so it may know the answer,
which programs are not given otherwise. The endpoint of the model stands in OPENAI_BASE_URL and
OPENAI_API_KEY, where OpenAI's client looks for it. The number in the last line that it prints is
its reward.
"""

import json
import os
import sys

from openai import OpenAI


def main() -> None:
    row = json.load(sys.stdin)
    client, model = OpenAI(), os.environ.get("HYBRIDRL_MODEL", "policy")
    messages = [{"role": "user", "content": row["prompt"]}]
    reward = 0.0
    for worth in (1.0, 0.5):  # it may try again once
        answer = client.chat.completions.create(model=model, messages=messages)
        said = answer.choices[0].message.content or ""
        if said.strip() == row["answer"]:
            reward = worth
            break
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": "No. Again:"})
    print(reward)


if __name__ == "__main__":
    main()
