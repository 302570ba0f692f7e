"""An agent framework as people install it (smolagents), with the endpoint as its model."""

import json

import pytest
from agent_cases import TRAINED, Pump, ScriptedEngine, endpoint_of, merging_tokenizer

from hybridrl.serving.agent_session import SAMPLE

smolagents = pytest.importorskip("smolagents")
TOKENIZER = merging_tokenizer("plain")


def calls_a_tool_first(prompt_ids, seed):
    """A model that multiplies by the tool, and answers with what that said."""
    asked = TOKENIZER.decode(prompt_ids)
    name, arguments = "multiply", {"a": 6, "b": 7}
    if "Observation" in asked.rpartition("<|im_start|>user")[2] or "42" in asked:
        name, arguments = "final_answer", {"answer": "42"}
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{call}</tool_call><|end|>"


def test_its_agent_plays_an_episode_whose_tokens_are_exact():
    @smolagents.tool
    def multiply(a: int, b: int) -> int:
        """The product of two numbers.

        Args:
            a: One.
            b: The other.
        """
        return a * b

    endpoint, engine = endpoint_of(TOKENIZER, context_length=20000), ScriptedEngine(TOKENIZER)
    engine.script = calls_a_tool_first
    pump = Pump(endpoint, engine)
    try:
        session = endpoint.sessions.open("s", TRAINED, 0)
        token = endpoint.sessions.token(SAMPLE, session.name)
        model = smolagents.OpenAIModel("m", api_base=endpoint.session_url(session), api_key=token)
        agent = smolagents.ToolCallingAgent([multiply], model, max_steps=4, verbosity_level=0)
        assert agent.run("What is 6 * 7?") == "42"
        branches = session.end()
    finally:
        pump.close()
        endpoint.close()
    kept = [
        token
        for branch in branches
        for token, sampled in zip(branch.response_ids, branch.mask, strict=True)
        if sampled
    ]
    assert kept == [token for _, tokens, _ in engine.sampled for token in tokens]
    assert len(engine.sampled) == 2
