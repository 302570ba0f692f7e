"""Names of the files and folders of a run, for those that write and read them."""

SETTINGS = "config.yaml"
METRICS = "metrics.jsonl"
STEPS = "steps.jsonl"
EVALUATIONS = "evaluations.json"
SUMMARY = "summary.json"
STATUS = "status.json"
LOCK_FILE = "lock.json"
CLUSTER = "cluster.json"
PLACEMENT = "placement.json"
DATA_REPORT = "data-report.json"
RECOVERIES = "recoveries.jsonl"
REPORT = "report.html"
FILES = (
    *(SETTINGS, METRICS, STEPS, EVALUATIONS, SUMMARY, STATUS, LOCK_FILE, CLUSTER, PLACEMENT),
    *(DATA_REPORT, RECOVERIES),
)
LOGS, SAMPLES, TOKENS, BAD_STEPS, FAILED = "logs", "samples", "tokens", "bad-steps", "failed"
MODEL, INITIAL_MODEL = "model", "initial_model"
CHECKPOINTS_FOLDER = "checkpoints"
"""The folder of the checkpoints, unless `checkpoint.folder` names another."""
LATEST_LINK = "latest"
"""The link to the newest run, in the folder of all runs."""
