"""The HTTP endpoint of a rollout replica: programs call it as OpenAI's API, and it keeps exactly
the tokens that were sampled.

`endpoint.Endpoint` listens, `exchange.Exchange` brings requests to the thread of the engine and
answers back, a `session.Session` keeps what an episode sampled, `chat` turns messages into tokens
and tokens into messages, and `agents.AgentGenerator` plays a batch of rows through all of it.
"""
