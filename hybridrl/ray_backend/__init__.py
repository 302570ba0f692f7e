"""The devices of a Ray cluster: joining it, one actor per device, and the calls to them.

Nothing else imports Ray, and only `hybridrl.job.job` imports this, when `executor=ray` asks for it.
"""
